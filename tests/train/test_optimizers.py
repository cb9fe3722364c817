"""Every optimizer of torch works by its name, and so does a factory of the user's."""

import inspect
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from train_states import TOY, compose_config, equal, take_steps

from ddp_runner.checkpoint.optimizer_state import settings_of
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.train.optimizers import build_optimizer

OPTIMIZERS = [
    name
    for name, one in vars(torch.optim).items()
    if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer) and name != "Optimizer"
]
GROUP = {"match": "1.*", "lr": 0.002}


def config_of(target: str, groups: list[dict[str, Any]], **keys: Any) -> Config:
    """Return a config with this optimizer and these parameter groups."""
    config = compose_config(*TOY, f"allowed_targets=[{__name__}]")
    optimizer = {"name": "mine", "_target_": target, "lr": 0.01, **keys}
    params = replace(config.params, groups=groups)
    return replace(config, optimizer=optimizer, params=params)


def network(name: str) -> nn.Module:
    """Return two layers that the optimizer can train: Muon takes matrices, SparseAdam tables."""
    if name == "SparseAdam":
        return nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Embedding(6, 4, sparse=True))
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False))


def take_step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take a step on random inputs, which follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    inputs: Tensor = torch.randn(5, 6, generator=generator)
    if isinstance(next(module.children()), nn.Embedding):
        inputs = torch.randint(6, (5,), generator=generator)
    optimizer.zero_grad()
    sum(layer(inputs).square().sum() for layer in module.children()).backward()
    optimizer.step()


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"LBFGS"}))
def test_an_optimizer_of_torch_works_as_it_is(name: str) -> None:
    """It trains both groups, and continues from a saved state that holds nothing but plain data."""
    config, module = config_of(f"torch.optim.{name}", [GROUP]), network(name)
    optimizer = build_optimizer(config, module)
    assert [group["lr"] for group in optimizer.param_groups] == [0.002, 0.01]
    before = {key: value.clone() for key, value in module.state_dict().items()}
    take_step(module, optimizer, 1)
    assert all(not torch.equal(before[key], one) for key, one in module.state_dict().items())

    file = BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved, other = torch.load(file, weights_only=True), network(name)
    other.load_state_dict(saved["model"])
    resumed = build_optimizer(config, other)
    resumed.load_state_dict(saved["optimizer"])
    take_step(module, optimizer, 2)
    take_step(other, resumed, 2)
    assert equal(module.state_dict(), other.state_dict())
    assert equal(optimizer.state_dict(), resumed.state_dict())


@pytest.mark.parametrize(
    ("count", "given", "foreach"), [(None, {}, None), (8, {}, False), (8, {"foreach": True}, True)]
)
def test_virtual_ranks_step_one_parameter_at_a_time(
    count: int | None, given: dict[str, bool], foreach: bool | None
) -> None:
    """Torch's default differs between whole and sharded parameters on a GPU; a key decides."""
    config = config_of("torch.optim.NAdam", [], **given)
    config = replace(config, batch=replace(config.batch, virtual_ranks=count))
    (group,) = build_optimizer(config, nn.Linear(2, 2)).param_groups
    assert group["foreach"] is foreach


def test_an_optimizer_that_computes_the_loss_again_is_rejected() -> None:
    """LBFGS asks for a closure: in the middle of a run that would be a TypeError."""
    with pytest.raises(UserError) as error:
        build_optimizer(config_of("torch.optim.LBFGS", []), network("LBFGS"))
    assert str(error.value) == (
        "optimizer=mine (torch.optim.LBFGS) computes the loss several times in a step, by a "
        "closure, and a run computes it once; write a loop of your own, as in "
        "docs/your_own_loop.md#lbfgs, or optimizer=adamw"
    )


def by_kind(module: nn.Module, *, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer whose groups are made by what the modules are, as no pattern can."""
    tables = [one.weight for one in module.modules() if isinstance(one, nn.Embedding)]
    others = [one.weight for one in module.modules() if isinstance(one, nn.Linear)]
    return torch.optim.SGD([{"params": tables, "lr": lr / 10}, {"params": others}], lr=lr)


def test_a_factory_may_take_the_model_itself() -> None:
    """Then patterns would be lost, so they are rejected."""
    target, module = f"{__name__}.by_kind", nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))
    optimizer = build_optimizer(config_of(target, []), module)
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.01]
    with pytest.raises(UserError, match=r"makes its own groups; leave out params\.groups"):
        build_optimizer(config_of(target, [GROUP]), module)


@pytest.mark.parametrize(
    ("target", "groups", "no_decay", "sentence"),
    [
        ("SGD", [{"match": "1.*", "momentun": 0.5}], False,
         "params.groups.0.momentun: optimizer=mine (torch.optim.SGD) has no momentun; did you mean "
         "momentum?"),
        ("Rprop", [], True,
         "params.no_decay: optimizer=mine (torch.optim.Rprop) has no weight_decay; leave it out"),
    ],
)  # fmt: skip
def test_a_key_that_the_optimizer_does_not_have_is_named(
    target: str, groups: list[dict[str, Any]], no_decay: bool, sentence: str
) -> None:
    """Torch keeps such a key in the group and never reads it."""
    config = config_of(f"torch.optim.{target}", groups)
    config = replace(config, params=replace(config.params, no_decay=no_decay))
    with pytest.raises(UserError) as error:
        build_optimizer(config, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert str(error.value) == sentence


SPARSE = (*TOY, "model._target_=broken_models.SparseBag", "allowed_targets=[broken_models]")


def after_three_steps(env: DistEnv, config: Config) -> Tensor | str:
    """Return the weights, or why no step can be taken."""
    try:
        return take_steps(env, config, 3).weights
    except (UserError, RuntimeError) as error:  # a server loses the trainer that rejects
        return str(error)


@pytest.mark.parametrize("keys", [("train.clip_value=0.01",), ("train.clip_norm=0.01",)])
def test_sparse_gradients_take_the_steps_of_dense_ones(keys: tuple[str, ...]) -> None:
    """Clipped by each row's sum, with momentum, over micro-batches and ranks."""
    common = (*SPARSE, *keys, "optimizer.momentum=0.9", "train.grad_accum_steps=2")
    sparse, dense = (
        run_ranks(after_three_steps, 2, compose_config(*common, *one, world_size=2))[0]
        for one in ((), ("+model.sparse=false",))
    )
    torch.testing.assert_close(sparse, dense)


@pytest.mark.parametrize(
    ("keys", "world_size", "who"),
    [
        (("optimizer=adam", "parallelism=single"), 1, "optimizer=adam"),
        (("optimizer.weight_decay=0.1", "parallelism=single"), 1, "optimizer=sgd"),
        (("parallelism=fsdp",), 2, "parallelism=fsdp"),
        (("parallelism=ps",), 2, "parallelism=ps"),
    ],
)
def test_who_takes_no_sparse_gradients_says_so(
    keys: tuple[str, ...], world_size: int, who: str
) -> None:
    """In one line and before the weights change, not in torch's words alone."""
    config = compose_config(*SPARSE, *keys, world_size=world_size)
    rejection = run_ranks(after_three_steps, world_size, config)[-1]
    assert rejection.startswith(f"{who} ")
    assert "leave out sparse=True in " in rejection


class Unconsolidated(torch.optim.SGD):
    """Keeps its state on other ranks, as torch's ZeroRedundancyOptimizer does."""

    def state_dict(self) -> dict[str, Any]:
        """Reject."""
        raise RuntimeError("Optimizer state has not been consolidated on this rank")


def test_an_optimizer_without_a_state_is_one_line() -> None:
    """Nothing could be saved, so it is told before the first step."""
    module = nn.Linear(2, 2)
    optimizer = Unconsolidated(module.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"Unconsolidated, gives no state to save .*has not"):
        settings_of({"model": module, "optimizer": optimizer})
