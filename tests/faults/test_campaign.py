"""A few kills of the campaign; benchmarks/kill_campaign.py has a thousand."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from kill_campaign import MODES, NUM_STEPS, RUN, _check_equal, _WrongError, campaign, undisturbed

import pytest


def test_killed_runs_end_as_the_undisturbed_ones() -> None:
    """In each mode: no state that does not load, no wrong resume, nothing left."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        result = campaign(Path(base), kills=8, seed=1, jobs=1, modes=list(MODES), say=print)
    assert result.bad == []
    assert sum(result.kills.values()) >= 8
    assert {mode for mode, _, _ in result.kills} <= set(MODES)
