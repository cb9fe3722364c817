"""The script that measures on GPUs: its workloads are valid commands, and a fault is a row."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from configs import resolved

sys.path.append(
    str(Path(__file__).resolve().parents[1] / "benchmarks")
)  # after the helpers, of which one has the same name
from gpu import cells
from gpu_commands import MissingError, steady, tried
from gpu_setup import REAL, TINY, Row, Workload


@pytest.mark.parametrize("work", [*REAL.values(), *TINY.values()], ids=str)
def test_workloads_are_commands_with_full_batches(work: Workload) -> None:
    """A key that is renamed would be noticed on the GPU only; the last batch would recompile."""
    for ranks in (1, 2):
        config, _ = resolved(*work.keys(ranks), "backend.device=cpu")
        assert config.batch.global_size == work.batch * ranks
        assert work.num_samples(ranks) % config.batch.global_size == 0
        assert work.steps >= 2 * work.every  # the first line does not count


def test_a_fault_is_a_row_and_the_others_stay() -> None:
    """What is missing is a reason to skip; both keep the rows before them."""

    def broken(error: Exception) -> Iterator[Row]:
        yield Row("speed", "first", value=3.0, unit="samples/s", against="by hand", its_value=2.0)
        raise error

    first, failed = tried("speed", "second", lambda: broken(RuntimeError("exit code 1\nlast")))
    assert cells(first.facts())[2:] == ["measured", "3", "samples/s", "by hand", "2", "1.5", ""]
    assert (failed.what, failed.outcome) == ("second", "FAILED")
    assert cells(failed.facts())[-1] == "RuntimeError: exit code 1 … last"
    _, skipped = tried("speed", "second", lambda: broken(MissingError("no torchvision")))
    assert (skipped.outcome, skipped.note) == ("skipped", "no torchvision")


def test_the_first_line_is_the_warm_up() -> None:
    """Compiling and connecting are in it."""
    assert steady({"samples_per_s": [1.0, 30.0, 10.0, 20.0]}) == 20.0
