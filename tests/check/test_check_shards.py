"""task=check of modes that split a model over ranks: what they promise, broken one at a time."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from broken_models import untouched
from modes import PIPELINES
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule
from train_states import build, compose_config

from ddp_runner.check.check_task import run_checks
from ddp_runner.check.rank_differences import Verdict
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.shards import own_part
from ddp_runner.parallelism.stages import stages_of
from ddp_runner.train.state import TrainState

SMALL = ("model=toy", "batch.global_size=8", "dataset.num_samples=27")
STAGED = (
    *("model=gpt", "dataset.sequence_length=8", "model.num_layers=4", "model.width=16"),
    *("model.num_heads=2", "batch.global_size=8", "train.grad_accum_steps=4", "train.clip_norm=1"),
)
Break = Callable[[TrainState, DistEnv], TrainState]


def altered(state: TrainState, env: DistEnv) -> TrainState:
    """Give the last rank other elements of the last parameter."""
    if env.rank == env.world_size - 1:
        with torch.no_grad():
            own_part(list(state.module.parameters())[-1]).add_(0.5)
    return state


def unreduced(state: TrainState, env: DistEnv) -> TrainState:
    """Keep each rank's own gradients."""
    assert isinstance(state.model, FSDPModule)
    state.model.set_requires_gradient_sync(False)
    return state


def other_samples(state: TrainState, env: DistEnv) -> TrainState:
    """Give two ranks that compute one share a share each."""
    batches = replace(state.batches, num_shares=2, share=env.rank)
    return replace(state, batches=batches)


def halved(state: TrainState, env: DistEnv) -> TrainState:
    """Let the last stage compute something other than the whole model."""
    module = cast(Any, state.module)
    module.head = lambda hidden, head=module.head: 0.5 * head(hidden)
    return state


def untied(state: TrainState, env: DistEnv) -> TrainState:
    """Let each stage with a tied parameter keep its own part of the gradient."""
    stages = stages_of(state.module)
    assert stages is not None
    stages.ties = ()
    return state


# The mode, what is broken, the check that fails first (None: none does), what it says.
Case = tuple[str, Break, str | None, str]
START = "all ranks begin with rank 0's weights"
STEP = "a step is one process's, within rounding"
ON_TWO: dict[str, Case] = {
    "fsdp": ("fsdp", untouched, None, "4 starting parameters 0, "),
    "tp": ("tp", untouched, None, "4 starting parameters 0, "),
    "a shard": (
        "fsdp",
        altered,
        STEP,
        "the first wrong module is net2: its bias at the start is off by ",
    ),
    "a replica": ("tp", altered, START, "net2.bias on rank 1 is not rank 0's (largest differ"),
    "no reduction": (
        "fsdp",
        unreduced,
        STEP,
        "the gradient of its bias is missing: not reduced, or not computed?",
    ),
    "samples": (
        "tp",
        other_samples,
        "each training sample is used once an epoch",
        "rank 1 has other batches than rank 0, and both compute one share, in 4 steps x 2 shares",
    ),
}
ON_FOUR: dict[str, Case] = {
    "hsdp": ("hsdp", untouched, None, "4 starting parameters 0, "),
    "fsdp_tp": ("fsdp_tp", untouched, None, "4 starting parameters 0, "),
    "a shard of a replica": ("hsdp", altered, START, "net2.bias on ranks 2, 3 is not rank 0's ("),
    "ddp_pp": ("ddp_pp", untouched, None, "38 gradients"),
    "a stage of a replica": (
        "ddp_pp",
        altered,
        START,
        "norm.weight on ranks 2, 3 is not rank 0's (",
    ),
}
STAGES: dict[str, Case] = {
    "pp": ("pp", untouched, None, "38 gradients"),
    "a stage": ("pp", altered, STEP, "norm: its weight at the start is 1.5 times"),
    "another head": ("pp", halved, STEP, "do embed, the blocks and head compute what forwar"),
    "a tied parameter": ("pp", untied, STEP, "the gradient of its weight"),
}


def check_all(env: DistEnv, cases: Mapping[str, Case]) -> dict[str, list[Verdict]]:
    """Check each state in turn, on ranks that stay."""
    found = {}
    for name, (mode, broken, *_) in cases.items():
        keys = STAGED if mode in PIPELINES else SMALL
        config = compose_config(*keys, f"parallelism={mode}", world_size=env.world_size)
        found[name] = list(run_checks(broken(build(env, config), env)))
    return found


def test_stages_are_checked() -> None:
    """The whole model is compared, the ranks' tied parameters with it."""
    _assert_found(STAGES)


@pytest.mark.full
@pytest.mark.parametrize("cases", [ON_TWO, pytest.param(ON_FOUR, marks=pytest.mark.slow)])
def test_what_is_split_over_ranks_is_checked(cases: dict[str, Case]) -> None:
    """A good model passes; a fault is named by the check that fails first, on every rank alike."""
    _assert_found(cases)


def _assert_found(cases: dict[str, Case]) -> None:
    first, *others = run_ranks(check_all, 4 if cases is ON_FOUR else 2, cases, timeout_s=240)
    assert all(other == first for other in others)
    for name, (_, _, check, detail) in cases.items():
        failed = [finding for finding in first[name] if not finding.ok]
        if check is None:
            assert (name, failed, len(first[name])) == (name, [], 10)
            (found,) = [one for one in first[name] if one.name == STEP]
        else:
            found = failed[0]
            assert (name, found.name) == (name, check)
        assert detail in found.detail, name
