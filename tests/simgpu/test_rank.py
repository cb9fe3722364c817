"""Parts of a rank on the simulated GPU; see rank_programs.py for what each answer is of."""

from pathlib import Path
from typing import Any

import pytest
import simgpu_build

pytestmark = [pytest.mark.simgpu, pytest.mark.full]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """Return what the programs saw, all in one process: torch takes seconds to import."""
    return simgpu_build.answers(Path(__file__).with_name("rank_programs.py"))


def test_times_are_read_once_the_device_has_passed_them(seen: dict[str, Any]) -> None:
    """However many parts there are between two lines: an event that is not over has no time."""
    assert seen["timer"] == [["forward"], []]


def test_exchanges_are_timed_without_a_wait(seen: dict[str, Any]) -> None:
    """Until the log line; the first two exchanges are a warm-up."""
    assert seen["exchanges"] == [{}, 2]


def test_peak_memory_is_that_of_the_fullest_device(seen: dict[str, Any]) -> None:
    """What decides whether a model fits is one device's memory, not the sum."""
    assert seen["peak"] == 0.125


def test_every_device_is_seeded(seen: dict[str, Any]) -> None:
    """Also the second of a model that is cut in two."""
    assert seen["draws"] == [True, True]


def test_replicas_compute_in_the_callers_precision(seen: dict[str, Any]) -> None:
    """Autocast's dtype belongs to a thread, and DataParallel has a thread for each replica."""
    assert seen["replicas"] == [["torch.bfloat16", f"simgpu:{index}"] for index in (0, 1)]
