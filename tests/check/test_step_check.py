"""task=check names what is first wrong in a step, and stays silent when nothing is.

The table of faults is in ``step_faults``; benchmarks/right_steps.py makes hundreds of right steps.
"""

from collections import Counter
from itertools import islice

import pytest
from ranks import run_ranks
from right_steps import GPT, MODELS, RightStep, parts_of_bounds, right_steps, world_of
from step_faults import FAULTS, WORLD, first_faults
from tiers import first_of, selected

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
@pytest.mark.parametrize("seed", range(2))
def test_random_steps_raise_no_alarm(seed: int) -> None:
    """Two samples of what the benchmark measures."""
    models = ("toy", "convnet", "mnist_net", "gpt, dropout", "two stages")
    steps = list(islice(right_steps(seed, models=models), 8))
    for world_size in sorted(set(map(world_of, steps))):
        some = [step for step in steps if world_of(step) == world_size]
        for results in run_ranks(parts_of_bounds, world_size, some, timeout_s=600):
            assert [fault for fault, _ in results if fault] == []
