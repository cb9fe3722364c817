"""The pages about your own work: each file that they show runs, by the command beside it."""

import math
import re
from pathlib import Path

import pytest
from commands import run_command
from pages import commands, write_files
from real_data import write_tiny_mnist
from run_folders import metrics, record

pytestmark = pytest.mark.full

PAGES = (
    "docs/your_own.md",
    "docs/your_own_data.md",
    "docs/your_own_step.md",
    "docs/your_own_streams.md",
    "docs/your_own_optimizing.md",
    "docs/language_models.md",
)
# tests/test_your_own_large_data.py has the pictures, tests/inference/test_sample.py has the GPTs.
ELSEWHERE = re.compile(r"dataset=pet|model=gpt|experiment=gpt|task=sample")
CASES = [
    (page, number)
    for page in PAGES
    for number, words in enumerate(commands(page))
    if not any(map(ELSEWHERE.match, words))
]


@pytest.mark.parametrize(("page", "number"), CASES)
def test_each_command_of_a_page_runs(page: str, number: int, tmp_path: Path) -> None:
    """On two ranks, in the folder that holds the page's files, and learns something."""
    write_files(page, tmp_path)
    write_points(tmp_path / "data")
    write_tiny_mnist(tmp_path / "data")
    done = run_command(
        *commands(page)[number],
        "world_size=2",
        folder=tmp_path,
        environ={"PYTHONPATH": str(tmp_path), "DDP_RUNNER_DATA_ROOT": None},
    )
    assert done.exit_code == 0, done.stderr
    lines = metrics(done.run_dir)
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert record(done.run_dir)["status"] == "completed"
    assert losses
    assert all(map(math.isfinite, losses))


def write_points(folder: Path) -> None:
    """Write the CSV files that a page names: points on both sides of a line."""
    folder.mkdir()
    for name, size in (("a", 30), ("b", 21), ("test", 12)):
        lines = [f"{i / size},{1 - i / size},{int(2 * i > size)}" for i in range(size)]
        text = "\n".join(["x,y,label", *lines, ""])
        (folder / f"points_{name}.csv").write_text(text, encoding="utf-8")
