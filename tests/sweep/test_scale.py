"""What a sweep reads and writes grows as its jobs do; bytes are counted, since times vary."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from configs import resolved
from sweeps import batch_of, planned

from ddp_runner.cli.command import compose, parse
from ddp_runner.job import COMPLETED, Job, Outcome, Status
from ddp_runner.sweep import planner
from ddp_runner.sweep.jobs import JobBatch, run_jobs
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.planner import SweepCommand
from ddp_runner.sweep.slurm.watch import poll_interval
from ddp_runner.sweep.sweep_table import sweep_table
from ddp_runner.tracking.run_record import write_run_record

COUNTERS = Path("/proc/self/io")
NUM_JOBS = (60, 120, 240)
MOST_GROWTH = 2.5  # from one to the next


def num_bytes_moved(work: Callable[[], object]) -> int:
    """Return how many bytes this process reads and writes meanwhile, also from the cache."""

    def moved() -> int:
        lines = COUNTERS.read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))

    before = moved()
    work()
    return moved() - before


def queued(folder: Path, num_jobs: int) -> JobBatch:
    """Return jobs of a new sweep, each with its folder."""
    names = [f"{number:05}" for number in range(num_jobs)]
    planned(folder, *names)
    return batch_of(folder, *names, max_failures=num_jobs)


def complete(job: Job) -> Outcome:
    """Stand for a run."""
    assert job.run_dir is not None
    write_run_record(job.run_dir, status=Status.COMPLETED)
    return COMPLETED


def start(folder: Path, num_jobs: int) -> Callable[[], object]:
    """Return what runs a new sweep."""
    return partial(run_jobs, queued(folder, num_jobs), execute=complete)


def start_again(folder: Path, num_jobs: int) -> Callable[[], object]:
    """Return what runs a sweep of which each job is completed."""
    batch = queued(folder, num_jobs)
    run_jobs(batch, execute=complete)
    return partial(run_jobs, batch, execute=complete)


def table(folder: Path, num_jobs: int) -> Callable[[], object]:
    """Return what prints the table of a sweep."""
    run_jobs(queued(folder, num_jobs), execute=complete)
    return partial(sweep_table, folder)


@pytest.mark.full
@pytest.mark.skipif(not COUNTERS.exists(), reason="only Linux counts the bytes of a process")
@pytest.mark.parametrize("prepare", [start, start_again, table])
def test_twice_the_jobs_cost_twice_the_bytes(
    tmp_path: Path, prepare: Callable[[Path, int], Callable[[], object]]
) -> None:
    """If each job read or wrote something of all others, they would cost four times as many."""
    prepare(tmp_path / "warm", 2)()  # imports what is needed
    moved = [num_bytes_moved(prepare(tmp_path / f"{number}", number)) for number in NUM_JOBS]
    assert all(many < MOST_GROWTH * few for few, many in pairwise(moved)), moved


def test_slurm_is_asked_less_often_the_longer_it_takes() -> None:
    """A tenth of the time at most, but for a controller that hardly answers."""
    assert [poll_interval(one) for one in (0.0, 0.1, 2.0, 60.0)] == [5.0, 5.0, 20.0, 60.0]


def test_a_large_sweep_says_how_far_its_planning_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thousands of jobs take a while; a small sweep prints nothing."""
    monkeypatch.setattr(planner, "NOTE_EVERY", 3)
    job = Job(config=resolved("model=toy")[0], started_at=0.0, provenance={})
    common = compose(parse(["-m", "model=toy", "seed=1,2"]))
    command = SweepCommand(
        words=["-m"],
        overrides=(),
        read=lambda words: [],
        common=common,
        compose=lambda words, number: common,
        name_of=lambda composed: str(composed.seed),
        plan=lambda *_: job,
    )
    made = planner.Planner(command, tmp_path, Local(), is_search=False)
    assert len([*made.draft([["seed=1"]] * 7, range(7))]) == 7
    notes = [line for line in capsys.readouterr().out.splitlines() if "planned" in line]
    assert notes == ["3 jobs are planned", "6 jobs are planned"]
