"""task=check names what is first wrong in a step, and stays silent when nothing is.

The table of faults is in ``step_faults``; benchmarks/right_steps.py makes hundreds of right steps.
"""

from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from right_steps import GPT, MODELS, RightStep, parts_of_bounds, right_steps, world_of
from step_faults import FAULTS, WORLD, first_faults
from tiers import first_of, selected
from torch import nn
from train_states import TOY, build, compose_config, with_work

from ddp_runner.check.check_task import run_checks
from ddp_runner.data.batches import StepBatch
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.parallelism.ddp import DDP
from ddp_runner.parallelism.mode import Engine, Sums
from ddp_runner.train.state import TrainState
from ddp_runner.train.step import StepOutput

QUICK = [
    ("sum for mean", "ddp"),
    ("unreduced parameter", "ddp"),
    ("buffers of another rank", "ddp"),
    ("clipped by the local norm", "fsdp"),
    ("learning rate", "fsdp"),
    ("halved output", "tp"),
]
TABLE = [(name, mode) for name, fault in FAULTS.items() for mode in fault.words]
CASES = [*QUICK, *(case for case in TABLE if case not in QUICK)]
AT_ONCE = 8  # faults that the ranks compute in one call
RIGHT = {
    "partial sums": RightStep("gpt", "tp", (*GPT, "parallelism=tp", "batch.global_size=4")),
    "rounded gradients": RightStep(
        "toy", "ddp", (*MODELS["toy"], "batch.global_size=8", "parallelism.comm_hook=bf16")
    ),
    "a bias before BatchNorm": RightStep(
        "convnet", "ddp", (*MODELS["convnet"], "batch.global_size=8", "train.grad_accum_steps=2")
    ),
}


def test_the_table_covers_all_modes() -> None:
    """Each mode that computes gradients on the CPU has several of the faults."""
    assert len(FAULTS) >= 24
    num_faults = Counter(mode for _, mode in TABLE)
    assert set(num_faults) == set(WORLD)
    assert min(num_faults.values()) >= 3


@pytest.fixture(scope="module")
def sentences(request: pytest.FixtureRequest) -> dict[tuple[str, str], set[str]]:
    """Return what the ranks say is first wrong, for the faults that pytest is going to run."""
    found = {}
    for world_size in sorted(set(WORLD.values())):
        cases = [case for case in selected(request, "case") if WORLD[case[1]] == world_size]
        for start in range(0, len(cases), AT_ONCE):
            some = cases[start : start + AT_ONCE]
            by_rank = run_ranks(first_faults, world_size, some, timeout_s=600)
            found |= dict(zip(some, map(set, zip(*by_rank, strict=True)), strict=True))
    return found


@pytest.mark.parametrize(
    "case", first_of([(case,) for case in CASES], num_quick=len(QUICK)), ids=str
)
def test_a_fault_is_found_and_named(
    case: tuple[str, str], sentences: dict[tuple[str, str], set[str]]
) -> None:
    """With the module where it is, or as a fault of the whole step; all ranks say the same."""
    (sentence,) = sentences[case]
    name, mode = case
    assert sentence
    assert FAULTS[name].words[mode] in sentence


@pytest.mark.parametrize("name", RIGHT)
def test_rounding_is_no_fault(name: str) -> None:
    """Differences exist, far inside their bounds."""
    step = RIGHT[name]
    for ((fault, parts),) in run_ranks(parts_of_bounds, world_of(step), [step]):
        assert fault == ""
        assert 0.0 < max(parts["gradient"]) < 0.9


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_random_steps_raise_no_alarm(seed: int) -> None:
    """Two samples of what the benchmark measures."""
    models = ("toy", "convnet", "mnist_net", "gpt, dropout", "two stages")
    steps = list(islice(right_steps(seed, models=models), 8))
    for world_size in sorted(set(map(world_of, steps))):
        some = [step for step in steps if world_of(step) == world_size]
        for results in run_ranks(parts_of_bounds, world_size, some, timeout_s=600):
            assert [fault for fault, _ in results if fault] == []


@dataclass(frozen=True)
class Reducing(DDP):
    """A mode whose engine adds up the gradients, and whose backward does not."""

    divides: bool = True

    def engine(self, state: Any, local: Any) -> Any:
        """Return the engine."""
        return ReducingEngine(local, self.divides)


class ReducingEngine(Engine[TrainState, StepBatch]):
    """Reduces after the backward."""

    def __init__(self, local: Engine[TrainState, StepBatch], divides: bool) -> None:
        self.local, self.divides = local, divides

    def backward(self, state: TrainState, batch: StepBatch) -> Sums:
        """Leave the mean, or the sum, of the gradients."""
        sums = self.local.backward(replace_model(state), batch)
        for parameter in state.module.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            if self.divides:
                parameter.grad /= dist.get_world_size()
        return sums


def replace_model(state: TrainState) -> TrainState:
    """Return the state without the wrapper that reduces."""
    return replace(state, model=state.module)


def of_engine(env: DistEnv, divides: bool) -> list[str]:
    """Return what is wrong with an engine that reduces."""
    state = build(env, compose_config(*TOY, world_size=env.world_size))
    mode: Any = state.work.mode
    own = Reducing(**{one.name: getattr(mode, one.name) for one in fields(mode)}, divides=divides)
    verdicts = run_checks(with_work(state, mode=own))
    return [verdict.detail for verdict in verdicts if not verdict.ok]


@pytest.mark.parametrize("divides", [True, False])
def test_the_engine_of_a_mode_is_checked(divides: bool) -> None:
    """The check takes the step of a run, so that it sees what an engine leaves out."""
    for wrong in run_ranks(of_engine, 2, divides):
        assert len(wrong) == (0 if divides else 1)
        assert (
            divides
            or "is 2 times one process's (a sum where a mean belongs?); the same factor" in wrong[0]
        )


def of_gathering(env: DistEnv) -> list[str]:
    """Return what is wrong with a step that takes a mean over the ranks, as a loss may need."""
    state = build(env, compose_config(*TOY, world_size=env.world_size))
    step = state.work.step_fn

    def gathering(model: nn.Module, data: Any) -> StepOutput:
        output, size = step(model, data), dist.get_world_size()
        every = [torch.zeros_like(output.loss_sum) for _ in range(size)]
        dist.all_gather(every, output.loss_sum.detach())
        mean = sum(every) / size
        return replace(output, loss_sum=output.loss_sum + (mean - mean))

    verdicts = run_checks(with_work(state, step_fn=gathering))
    return [verdict.detail for verdict in verdicts if not verdict.ok]


def test_a_step_that_communicates_has_the_real_ranks() -> None:
    """As the only rank it could not gather, and a mean would be a sum."""
    for wrong in run_ranks(of_gathering, 2):
        assert wrong == []


@pytest.mark.parametrize("name", ["Checkpointing", "Shared"])
def test_an_unusual_model_is_right(name: str) -> None:
    """It repeats its forward in the backward, or calls a module in several places."""
    for wrong in run_ranks(of_model, 2, name):
        assert wrong == []


def of_model(env: DistEnv, name: str) -> list[str]:
    """Return what is wrong with a step of a model in broken_models."""
    keys = (f"model._target_=broken_models.{name}", "allowed_targets=[broken_models]")
    state = build(env, compose_config(*TOY, *keys, world_size=env.world_size))
    return [verdict.detail for verdict in run_checks(state) if not verdict.ok]


def test_a_model_that_depends_on_the_number_of_ranks_is_named() -> None:
    """One process builds other parameters, which cannot be compared."""
    for error in run_ranks(of_sized, 2):
        assert error == (
            "net.weight of the model has shape (5, 10) here, and (10, 10) in one process; build "
            "the model without asking for the rank or the number of ranks"
        )


def of_sized(env: DistEnv) -> str:
    """Return the error of a model whose width depends on the number of ranks."""
    with pytest.raises(UserError) as error:
        of_model(env, "Sized")
    return str(error.value)
