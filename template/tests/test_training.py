"""Two ranks learn the digits, in a real run, and take the steps that one rank takes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def train(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run ``python -m my_project`` to its end; return the lines of its metrics."""
    command = [sys.executable, "-m", "my_project", f"hydra.run.dir={folder}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of this project's model on two ranks."""
    return train(tmp_path_factory.mktemp("runs") / "two", "world_size=2")


def test_two_ranks_learn_the_digits(two_ranks: list[dict[str, Any]]) -> None:
    """All ten of them."""
    last = next(line for line in reversed(two_ranks) if "eval/accuracy" in line)
    assert last["eval/accuracy"] > 0.9
    assert last["eval/worst_class"] > 0.7


def test_one_rank_takes_the_same_steps(two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    """One seed and one global batch give one curve; only rounding differs.

    Not with dropout, whose random numbers differ by rank, nor with BatchNorm, whose statistics do.
    """
    one_rank = train(tmp_path / "one", "world_size=1")
    losses, expected = (
        [line["train/loss"] for line in lines if "train/loss" in line]
        for lines in (one_rank, two_ranks)
    )
    assert len(expected) > 5
    assert losses == pytest.approx(expected, rel=1e-2)
