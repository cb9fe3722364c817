"""The table of a sweep is as wide as its cells, or as the terminal."""

from pathlib import Path

import pytest
from sweeps import planned

from ddp_runner.errors import UserError
from ddp_runner.sweep.sweep_table import read_objective, sweep_table
from ddp_runner.tracking.alive import standing
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record

NAMES = tuple(f"model=convnet,optimizer.lr=0.123456,parallelism=ddp,seed={seed}" for seed in (1, 2))
METRICS = {"eval/accuracy": 0.97, "eval/loss": 0.1, "train/loss": 0.2, "perf/samples_per_s": 4267.0}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return the folder of a sweep: one job is completed, the other waits."""
    planned(tmp_path, *NAMES)
    write_run_record(
        tmp_path / NAMES[0], status="completed", startup_s=1.5, wall_s=123.25, metrics=METRICS
    )
    return tmp_path


def test_a_table_without_a_terminal_is_whole(sweep: Path) -> None:
    """No line is shortened, however long it is."""
    _, title, first, second, _ = sweep_table(sweep).split("\n")
    assert title.split() == ["job", "status", "start", "wall", "samples/s", "metrics"]
    results = "1.50 s  123.25 s  4267       eval/accuracy 0.9700  eval/loss 0.1000  train/loss"
    assert first == f"{NAMES[0]}  completed  {results} 0.2000"
    assert second == f"{NAMES[1]}  queued     -       -         -"


@pytest.mark.parametrize(
    ("width", "job", "end"),
    [
        (150, "model=convnet,lr=0.123456,", "0.2000"),
        (79, "mo=convnet,l…", "  4267 …"),
        (40, "mo=convnet,l…", "completed …"),
    ],
)
def test_a_table_fits_its_terminal(sweep: Path, width: int, job: str, end: str) -> None:
    """First the names of jobs become shorter; then the lines end early."""
    _, title, first, second, _ = sweep_table(sweep, width=width).split("\n")
    assert all(len(line) <= width for line in (title, first, second))
    assert title.startswith("job  ")
    assert first.startswith(job)
    assert first.endswith(end)
    assert second.startswith(job)
    assert "=1  completed " in first
    assert "=2  queued " in second


def test_a_metric_that_the_job_has_not_is_an_error_with_the_nearest(sweep: Path) -> None:
    """A job that failed has a reason instead, and one that has not ended has nothing yet."""
    done, waiting = (sweep / name for name in NAMES)
    assert read_objective(done, standing(RunDir(done)), name="eval/loss") == 0.1
    with pytest.raises(UserError, match=r"\(eval/los\) is not a metric .*\.objective=eval/loss"):
        read_objective(done, standing(RunDir(done)), name="eval/los")
    assert read_objective(waiting, standing(RunDir(waiting)), name="eval/loss") is None
    write_run_record(waiting, status="failed", error={"sentence": "it diverged"})
    assert read_objective(waiting, standing(RunDir(waiting)), name="eval/loss") == "it diverged"
