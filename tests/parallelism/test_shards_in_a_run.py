"""Shards beside the rest of a run: evaluations, averages, clipping, random numbers, layouts."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiers import first_of
from torch import Tensor, nn
from train_states import TOY, build, compose_config, equal, rejection, run_loop, take_steps

from ddp_runner.checkpoint.optimizer_state import (
    by_names,
    load_optimizer,
    parameter_names,
    settings_of,
)
from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.models.toy import ToyModel
from ddp_runner.train.first_batch import try_evaluation

GPT = (
    *("model=gpt", "model.num_layers=2", "model.width=16", "model.num_heads=2"),
    *("batch.global_size=8", "dataset.sequence_length=16", "dataset.eval_fraction=0.0005"),
)
EACH_STEP = ("train.eval_every_steps=1", "ema.decay=0.9")


def weights_of(env: DistEnv, config: Config, max_steps: int, folder: Path | None) -> torch.Tensor:
    """Train to a step as a run does; return the weights."""
    state = build(env, config)
    try_evaluation(state)
    return run_loop(env, config, max_steps=max_steps, folder=folder, state=state).weights


@pytest.mark.full
@pytest.mark.parametrize("kept_for", first_of(["1", "false"]))
def test_blocks_that_stay_whole_are_shards_again_after_an_evaluation(
    kept_for: str, tmp_path: Path
) -> None:
    """A trial, an evaluation of the average and a resume take shards, not what a forward left."""
    kept = ("parallelism=fsdp", f"parallelism.reshard_after_forward={kept_for}")
    config = compose_config(*GPT, *kept, *EACH_STEP, world_size=2)
    through = run_ranks(weights_of, 2, config, 4, None)[0]
    run_ranks(weights_of, 2, config, 2, tmp_path)
    resumed = run_ranks(weights_of, 2, config, 4, tmp_path)[0]
    assert torch.equal(resumed, through)


def clipped(env: DistEnv, config: Config) -> torch.Tensor:
    """Return the weights after some steps."""
    return take_steps(env, config, 3).weights


@pytest.mark.full
def test_values_are_clipped_after_the_sum_over_ranks() -> None:
    """With sequence parallelism each rank has a summand of the gradient of a norm."""
    keys = (
        *GPT,
        "train.clip_norm=null",
        "train.clip_value=1e-4",
        "optimizer=sgd",
        "optimizer.lr=1",
    )
    whole = run_ranks(clipped, 1, compose_config(*keys, "parallelism=single"))[0]
    split = ("parallelism=tp", "parallelism.sequence_parallel=true")
    for found in run_ranks(clipped, 2, compose_config(*keys, *split, world_size=2)):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)


class Scaled(ToyModel):
    """Has a parameter without dimensions, as CLIP's temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.offset = nn.Parameter(torch.tensor(0.1), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        return super().forward(inputs) * self.logit_scale.exp() + self.offset


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "world_size"), first_of([("fsdp", 2), ("hsdp", 4), ("fsdp_tp", 4)])
)
def test_a_parameter_without_dimensions_is_trained_as_by_one_process(
    mode: str, world_size: int
) -> None:
    """FSDP2 cannot shard it; its gradient is averaged over the ranks all the same."""
    keys = (
        *(*TOY, f"model._target_={__name__}.Scaled", f"allowed_targets=[{__name__}]"),
        *("train.grad_accum_steps=2", "train.clip_norm=0.5", "optimizer.momentum=0.9"),
    )
    whole = run_ranks(clipped, 1, compose_config(*keys, "parallelism=single"))[0]
    config = compose_config(*keys, f"parallelism={mode}", world_size=world_size)
    for found in run_ranks(clipped, world_size, config):
        torch.testing.assert_close(found, whole)


class Counts(torch.optim.SGD):
    """Keeps a count in its state, which belongs to no parameter."""

    def step(self, closure: object = None) -> None:
        """Count the step."""
        self.state["count"] = self.state.get("count", 0) + 1
        super().step()


def test_an_optimizer_keeps_what_belongs_to_no_parameter() -> None:
    """Torch saves and loads such a state as it is."""
    model = nn.Linear(2, 2)
    first, second = (Counts(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    model(torch.ones(2)).sum().backward()
    first.step()
    before = settings_of({"model": model, "optimizer": second})["optimizer"]
    names = parameter_names({"model": model})
    saved = {**by_names(first, names), "settings": before}
    load_optimizer(second, saved, before, names)
    assert second.state["count"] == 1
    assert equal(second.state_dict()["state"], first.state_dict()["state"])


def placed(env: DistEnv) -> bool:
    """Place a model whose weight is a transpose; return whether a forward gives what it should."""
    config = compose_config("parallelism=fsdp", world_size=2)
    mode = make("parallelism", config.parallelism)
    model = nn.Linear(3, 4, bias=False)
    model.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4).t() + env.rank)
    expected = torch.arange(12.0).reshape(3, 4).sum(0)
    module = mode.place(lambda: model, [torch.device("cpu")])
    return torch.equal(module(torch.ones(3)), expected)


def test_a_transposed_weight_is_sharded() -> None:
    """Neither a broadcast nor FSDP takes a tensor with holes."""
    assert run_ranks(placed, 2) == [True, True]


def norm_dtypes(env: DistEnv, config: Config) -> set[torch.dtype]:
    """Return the types in which BatchNorm's weights are gathered."""
    module, dtypes = build(env, config).module, set[torch.dtype]()
    for one in module.modules():
        if isinstance(one, nn.BatchNorm2d):
            one.register_forward_pre_hook(lambda norm, _: dtypes.add(norm.weight.dtype))
    module(torch.zeros(2, 1, 28, 28))
    return dtypes


@pytest.mark.full
def test_a_block_with_batch_norm_is_gathered_in_fp32() -> None:
    """Its running statistics are fp32, and on CUDA both must be alike."""
    keys = ("model=convnet", "parallelism=fsdp", "train.precision=bf16")
    config = compose_config(*keys, "+model.blocks=[layer1,layer2]", world_size=2)
    assert run_ranks(norm_dtypes, 2, config) == [{torch.float32}] * 2


def losses(env: DistEnv, config: Config) -> list[float]:
    """Return the losses of some steps."""
    return take_steps(env, config, 3).losses


@pytest.mark.full
@pytest.mark.parametrize("blocks", ["[blocks.*,blocks.0]", "[blocks.*,blocks.*.mlp]"])
def test_blocks_may_meet(blocks: str) -> None:
    """A block that two patterns name is one; of nested ones the inner is sharded first."""
    whole = run_ranks(losses, 1, compose_config(*GPT, "parallelism=single"))[0]
    config = compose_config(*GPT, "parallelism=fsdp", f"model.blocks={blocks}", world_size=2)
    assert run_ranks(losses, 2, config)[0] == pytest.approx(whole, rel=1e-5)


def test_only_linear_layers_and_embeddings_are_split_by_features() -> None:
    """Torch would raise from within, on each rank."""
    plan = "+model.tensor_parallel={blocks.*.mlp_norm:colwise}"
    config = compose_config(*GPT, "parallelism=tp", plan.replace("+", "++"), world_size=2)
    sentence = (
        "model.tensor_parallel (blocks.0.mlp_norm: colwise) needs a linear layer or an embedding"
    )
    assert all(sentence in found for found in run_ranks(rejection, 2, config))
