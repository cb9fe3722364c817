"""What a sweep costs besides its jobs, at 100, 1,000 and 10,000 of them.

python benchmarks/sweep_scale.py
python benchmarks/sweep_scale.py --jobs 100 200 --profile

The jobs run on a fake executor, which writes the run.json of a completed run and nothing else, so
all that is left is the sweep's own work. Each size is a process of its own, for its peak of memory.
Read how the columns grow: a part that costs the same for each job grows as the jobs do.
"""

import argparse
import contextlib
import cProfile
import io
import json
import math
import os
import pstats
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig

from ddp_runner.cli import app, start_runs
from ddp_runner.cli.sweeping import Jobs
from ddp_runner.job import COMPLETED, EXIT_COMPLETED, Job, Outcome, Status
from ddp_runner.sweep import run_sweep as run_module
from ddp_runner.sweep.jobs import JobBatch, run_jobs
from ddp_runner.sweep.local import Local
from ddp_runner.sweep.survey import survey
from ddp_runner.sweep.sweep_dir import read_plan, unfinished_sweep
from ddp_runner.sweep.sweep_table import sweep_table
from ddp_runner.tracking.run_record import end_session, start_session

METRICS = {"eval/accuracy": 0.97, "train/loss": 0.2, "perf/samples_per_s": 4267.0}
# compose: by Hydra; plan: resolve, validate and freeze; run: locks and run.json; table: of
# the sweep; find: an unfinished sweep of this command; status: python -m ddp_runner.status; again:
# what a second start does once it has planned. For these, all jobs are planned before any starts;
# first: when the first job starts otherwise, while a thread plans the rest.
COLUMNS = ("jobs", "first", "compose", "plan", "run", "table", "find", "status", "again", "MiB")


class Instant(Local):
    """Completes each job at once."""

    batch: JobBatch
    began_at = ended_at = 0.0  # its jobs

    def run(self, batch: JobBatch) -> dict[str, Outcome]:
        """Complete what is left of a batch."""
        self.began_at, self.batch = time.perf_counter(), batch
        outcomes = run_jobs(batch, execute=_complete)
        self.ended_at = time.perf_counter()
        return outcomes


class First(Local):
    """Stops the sweep as its first jobs start."""

    began_at = 0.0

    def run(self, batch: JobBatch) -> dict[str, Outcome]:
        """Answer as if Ctrl-C had come."""
        self.began_at = time.perf_counter()
        return {"signal": Outcome.stopped(signal.SIGINT)}


def _complete(job: Job) -> Outcome:
    """Leave the run.json that a run of a second would leave."""
    assert job.run_dir is not None
    start_session(job.run_dir, started_at=job.started_at, status=Status.RUNNING)
    end_session(job.run_dir, status=Status.COMPLETED, metrics=METRICS)
    return COMPLETED


def main() -> None:
    """Measure each number of jobs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument(
        "--folder", help="where the sweeps are written, and removed (default: /tmp)"
    )
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            print(json.dumps(measure(args.one, Path(folder), is_profiled=args.profile)))
        return
    print("seconds; MiB is the peak of the sweep's process")
    print("".join(column.rjust(9) for column in COLUMNS), flush=True)
    for jobs in args.jobs:
        command = [sys.executable, __file__, f"--one={jobs}"]
        command += ["--profile"] * args.profile + [f"--folder={args.folder}"] * bool(args.folder)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        cells = (
            f"{found[one]:.0f}" if one in ("jobs", "MiB") else f"{found[one]:.2f}"
            for one in COLUMNS
        )
        print("".join(cell.rjust(9) for cell in cells), flush=True)


def measure(jobs: int, folder: Path, *, is_profiled: bool) -> dict[str, float]:
    """Return the seconds of each part of a sweep of so many jobs."""
    os.chdir(folder)
    arguments = ["-m", "model=toy", f"seed=range({jobs})"]
    profile = cProfile.Profile()
    first_s = seconds_to_first_job([*arguments, "hydra.sweep.dir=stopped"])
    vars(run_module)["PLANNING_S"] = math.inf
    if is_profiled:
        profile.enable()
    executor, seconds = sweep(arguments)
    profile.disable()
    (found,) = Path("outputs").iterdir()
    seconds |= {
        "jobs": jobs,
        "first": first_s,
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "table": _seconds(lambda: sweep_table(found)),
        "status": _seconds(lambda: survey([Path("outputs")])),
        "find": _seconds(
            lambda: unfinished_sweep(Path("outputs"), command=["other"], retry_failed=False)
        ),
    }
    if is_profiled:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(70)
    jobs = read_plan(found).jobs.values()
    assert all(one.standing(found).status == Status.COMPLETED for one in jobs)
    # The same command once more, without composing: each job is done already.
    seconds["again"] = _seconds(lambda: run_jobs(executor.batch, execute=_complete))
    return seconds


def seconds_to_first_job(arguments: Sequence[str]) -> float:
    """Return the time from the command, once its modules are imported, to its first job."""
    executor = First()
    vars(run_module)["Local"] = lambda: executor
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        app.run(arguments, started_at=time.time())
    return executor.began_at - start


def sweep(arguments: Sequence[str]) -> tuple[Instant, dict[str, float]]:
    """Run a sweep; return what ran its jobs, and the seconds of its parts."""
    executor, composing = Instant(), [0.0]

    class TimedJobs(Jobs):
        def compose(self, words: Sequence[str], number: int) -> DictConfig:
            start = time.perf_counter()
            try:
                return super().compose(words, number)
            finally:
                composing[0] += time.perf_counter() - start

    vars(run_module)["Local"] = lambda: executor
    vars(start_runs)["Jobs"] = TimedJobs
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        exit_code = app.run(arguments, started_at=time.time())
    assert exit_code == EXIT_COMPLETED
    plan_s = executor.began_at - start - composing[0]
    run_s = executor.ended_at - executor.began_at
    return executor, {"compose": composing[0], "plan": plan_s, "run": run_s}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
