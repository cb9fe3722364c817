"""A model that is split over ranks: how it is built, evaluated and rejected, and its shards."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import resolved
from ranks import RankFailedError, run_ranks
from tiers import first_of
from torch import Tensor, nn
from train_states import TOY, build, compose_config, evaluated, take_steps, with_work

from ddp_runner.checkpoint.state_parts import gathered
from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config
from ddp_runner.data.splits import TensorSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.parallelism import mesh
from ddp_runner.parallelism.modules import build_by_modules, matched
from ddp_runner.parallelism.shards import full_tensor, is_shard, own_part, shard_like
from ddp_runner.train.step import StepOutput

GPT = ("model=gpt", "model.num_layers=2", "model.width=16", "model.num_heads=2")
ODD = ("model=toy", "+model.hidden_size=7", *TOY[1:])


class Widths(nn.Module):
    """Fills its parameters module by module."""

    def __init__(self, *, extra: str = "") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        if extra == "buffer":
            self.register_buffer("scale", torch.ones(1))
        if extra == "tied":
            self.again = nn.Linear(3, 4)
            self.again.weight = self.first.weight

    def init_weights(self, module: nn.Module) -> None:
        """Draw the weights, and zero the biases."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)


class Forgets(Widths):
    """Leaves its biases out."""

    def init_weights(self, module: nn.Module) -> None:
        """Draw the weights alone."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)


def test_a_model_built_by_modules_depends_on_the_seed_alone() -> None:
    """Neither on what was drawn before nor on the default device."""
    torch.manual_seed(3)
    first = build_by_modules(Widths)
    torch.manual_seed(3)
    torch.rand(1)
    second = build_by_modules(Widths)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first.get_parameter("first.weight")[:2, :3], torch.zeros(2, 3))
    with torch.device("meta"):
        assert all(one.is_meta for one in build_by_modules(Widths).parameters())


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Linear(1, 1), "needs a model with the method init_weights"),
        (lambda: Widths(extra="buffer"), r"nothing fills its buffers \(scale\)"),
        (lambda: Widths(extra="tied"), "that two modules share would become two"),
        (Forgets, "leaves bias of first without values"),
    ],
)
def test_a_model_that_cannot_be_built_by_modules_is_one_line(
    build: Callable[[], nn.Module], reason: str
) -> None:
    """Its values would be random."""
    with pytest.raises(UserError, match=reason):
        build_by_modules(build)


def test_each_part_of_a_name_is_matched_by_itself() -> None:
    """A star stands for one part; what matches nothing names the nearest."""
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Sequential(nn.Linear(1, 1)))
    assert list(matched(model, "*", key="model.blocks")) == ["0", "1"]
    assert list(matched(model, "*.0", key="model.blocks")) == ["0.0", "1.0"]
    with pytest.raises(UserError, match=r"model.blocks \(2\.\*\) matches no module of the model"):
        matched(model, "2.*", key="model.blocks")


def held(env: DistEnv, config: Config) -> tuple[int, int, bool]:
    """Return how many numbers this rank holds, of how many, and whether its shards are whole."""
    module = build(env, config).module
    parameters = list(module.parameters())
    own = sum(own_part(one).numel() for one in parameters)
    state = gathered(module.state_dict(), {}, keep=True, copies=set(), group=None)
    again = {name: shard_like(state[name], one) for name, one in module.state_dict().items()}
    is_same = all(
        torch.equal(own_part(again[name]), own_part(one))
        for name, one in module.state_dict().items()
    )
    return own, sum(one.numel() for one in parameters), is_same


@pytest.mark.parametrize(
    ("world_size", "keys", "parts"),
    first_of(
        [(2, "parallelism=fsdp", 2), (4, "parallelism=fsdp_tp", 4), (4, "parallelism=hsdp", 2)]
    ),
)
def test_a_rank_holds_its_part_of_the_parameters(world_size: int, keys: str, parts: int) -> None:
    """Shards that are put together and cut again are the same; over two axes as well."""
    config = compose_config(*GPT, keys, "batch.global_size=8", world_size=world_size)
    found = run_ranks(held, world_size, config)
    total = found[0][1]
    assert all(is_same for _, _, is_same in found)
    assert sum(own for own, _, _ in found) >= total * world_size // parts
    # The embedding and the norms are whole in tensor parallelism, but sharded by FSDP.
    assert max(own for own, _, _ in found) < total / parts * (1.0 if parts == 2 else 1.7) + 16


def scores(env: DistEnv, config: Config, num_samples: int) -> dict[str, float]:
    """Evaluate a few samples after a step."""
    state = build(env, config)
    take_steps(env, config, 1, state=state)
    data = state.work.dataset
    few = TensorSplit(data.eval.inputs[:num_samples], data.eval.targets[:num_samples])
    state = with_work(state, dataset=replace(data, eval=few))
    return evaluated(state)[0]


def differently_rounded(env: DistEnv, config: Config) -> float:
    """Return an evaluation's loss, of which rank 1 computes the last digits otherwise."""
    state = build(env, config)

    def step(model: nn.Module, batch: Any) -> StepOutput:
        found = state.work.step_fn(model, batch)
        return replace(found, loss_sum=found.loss_sum.double() + 1e-9 * env.rank)

    return evaluated(with_work(state, step_fn=step))[0]["eval/loss"]


def test_ranks_of_the_same_samples_have_the_same_result() -> None:
    """Each would stop, or lower its rate, by its own, and wait for the others for ever."""
    config = compose_config(*TOY, "parallelism=tp", world_size=2)
    first, second = run_ranks(differently_rounded, 2, config)
    assert first == second


@pytest.mark.parametrize("mode", first_of(["fsdp", "tp"]))
@pytest.mark.parametrize("num_samples", first_of([1, 5]))
def test_ranks_with_fewer_samples_evaluate_beside_the_others(mode: str, num_samples: int) -> None:
    """A forward waits for all ranks; placeholders count for nothing, and no sample twice."""
    keys = (*TOY, "batch.eval_per_rank=2")
    (expected,) = run_ranks(scores, 1, compose_config(*keys, "parallelism=single"), num_samples)
    config = compose_config(*keys, f"parallelism={mode}", world_size=2)
    for found in run_ranks(scores, 2, config, num_samples):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (("+model.tensor_parallel.net3=colwise",), "matches no module of the model; the nearest"),
        (("model.tensor_parallel.net1=columns",), "net1: columns) must be one of colwise, row"),
        (("parallelism.tensor_parallel_size=4",), "net1 has 10 outputs, which 4 ranks cannot"),
    ],
    ids=["no module", "no word", "no equal parts"],
)
def test_a_plan_that_does_not_fit_is_one_line(keys: tuple[str, ...], reason: str) -> None:
    """It is found before anything is computed."""
    world_size = 4 if "size=4" in keys[-1] else 2
    config = compose_config(*TOY, "parallelism=tp", *keys, world_size=world_size)
    with pytest.raises(RankFailedError) as error:
        run_ranks(held, world_size, config)
    assert reason in str(error.value)


def odd_lengths(env: DistEnv, config: Config) -> str:
    """Return how a model whose sequences are split answers to seven tokens."""
    module = build(env, config).module
    with pytest.raises(UserError) as error:
        module(torch.zeros(1, 7, dtype=torch.int64))
    return str(error.value)


def test_sequences_are_split_into_equal_parts() -> None:
    """Other lengths would give the ranks positions that do not fit."""
    keys = ("parallelism=tp", "parallelism.sequence_parallel=true", "batch.global_size=8")
    for answer in run_ranks(odd_lengths, 2, compose_config(*GPT, *keys, world_size=2)):
        assert answer.startswith("parallelism.sequence_parallel=true splits sequences of 7 over 2")


def halves(env: DistEnv, config: Config) -> list[Any]:
    """Return the dtypes that a block and the root gather, and whether the loss falls."""
    state = build(env, config)
    dtypes = list[Tensor]()
    block, norm = state.module.blocks[0].mlp.up, state.module.norm
    for module in (block, norm):
        module.register_forward_pre_hook(lambda one, _: dtypes.append(one.weight.dtype))
    losses = take_steps(env, config, 8, state=state).losses
    stored = {own_part(one).dtype for one in state.module.parameters()}
    return [set(dtypes), stored, losses[-1] < losses[0]]


class Drawing(nn.Module):
    """Draws numbers where its features are split, and where they are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 10), nn.Linear(10, 5)
        self.drawn = list[list[float]]()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        hidden = self.net1(inputs)
        self.drawn.append(torch.rand(3).tolist())
        outputs: Tensor = self.net2(hidden)
        self.drawn.append(torch.rand(3).tolist())
        return outputs


def drawn_parts(env: DistEnv, config: Config) -> list[list[float]]:
    """Return what a rank draws in a step."""
    state = build(env, config)
    take_steps(env, config, 1, state=state)
    found: list[list[float]] = state.module.drawn
    return found


@pytest.mark.full
def test_ranks_draw_their_own_numbers_where_features_are_split() -> None:
    """Dropout would otherwise drop the same units of different heads; elsewhere they agree."""
    keys = (*TOY, f"model._target_={__name__}.Drawing", f"allowed_targets=[{__name__}]")
    config = compose_config(*keys, "parallelism=tp", world_size=2)
    (split, whole), (other_split, other_whole) = run_ranks(drawn_parts, 2, config)
    assert whole == other_whole
    assert not set(split) & set(other_split)
    assert run_ranks(drawn_parts, 2, config)[1] == [other_split, other_whole]


@pytest.mark.full
def test_blocks_are_gathered_in_bf16_and_kept_in_fp32() -> None:
    """What is outside of the blocks, and what the optimizer changes, keeps its precision."""
    keys = ("parallelism=fsdp", "train.precision=bf16", "batch.global_size=8", "optimizer.lr=0.01")
    for found in run_ranks(halves, 2, compose_config(*GPT, *keys, world_size=2)):
        assert found == [{torch.bfloat16, torch.float32}, {torch.float32}, True]


def test_a_whole_tensor_is_no_shard() -> None:
    """Nothing is gathered, and the state is the very one that was given."""
    state = nn.Linear(2, 2).state_dict()
    found = gathered(state, {}, keep=False, copies=set(), group=None)
    assert all(found[name] is value for name, value in state.items())
    assert not any(map(is_shard, state.values()))
    assert full_tensor(state["weight"]) is state["weight"]
    mode = make("parallelism", resolved("parallelism=fsdp")[0].parallelism)
    assert mode.layout(DistEnv(3, 3, 4, 4)).eval_share == (3, 4)


def test_memory_that_cannot_be_returned_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank would grow as without the key."""
    keys = ("parallelism=fsdp", "parallelism.return_memory=true", "backend.device=cpu")
    mode = make("parallelism", resolved(*keys)[0].parallelism)
    monkeypatch.setattr(mesh, "return_freed_memory", lambda: False)
    with pytest.raises(UserError, match=r"parallelism\.return_memory=true needs glibc"):
        mode.place(nn.Module, [torch.device("cpu")])
