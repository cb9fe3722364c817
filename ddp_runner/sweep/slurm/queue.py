"""Slurm's queue: its commands, and how a submitted job stands. Torch-free.

A job is known by its name: that of its array, and its index there. Its run's folder has the name in
``slurm.job`` from before the submission until a command has seen how the job ended, so a command
that is killed while it submits finds its jobs again. Accounting (``sacct``) is not needed: squeue
says whether a job is there, and its run.json how it ended.
"""

import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError, one_line
from ddp_runner.job import Status
from ddp_runner.tracking.alive import DAMAGED, Standing
from ddp_runner.tracking.run_record import RunError, read_run_record, write_run_record

LIMIT_S = 60.0  # for an answer of the controller
RECORD = "slurm.job"  # in a run folder
NAME = re.compile(r"[\w.-]+_\d+", re.ASCII)  # what it holds
LOGS = "slurm"  # in the sweep's folder: what the jobs print, and the scripts that were submitted
WAITING = {
    *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"),
    "SPECIAL_EXIT",
}
# COMPLETING: some of its processes still end.
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
# Why Slurm ended a job that can go on.
STOPPED = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit",
    "DEADLINE": "reached its deadline",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "had a node that did not start",
}


def run_slurm(*command: str, environ: Mapping[str, str] | None = None, fix: str = "") -> str:
    """Run a command of Slurm in an environment, by default ours, and return its stdout.

    Raises:
        UserError: it is not installed, took too long, or failed; then with the `fix`.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=LIMIT_S,
            start_new_session=True,  # a terminal's Ctrl-C is for this process only
            env=environ,
        )
    except FileNotFoundError:
        raise UserError(
            f"hydra/launcher=slurm needs Slurm's commands and {command[0]} is not installed; start "
            "the sweep where sinfo works, such as on a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} did not answer within {LIMIT_S:g} s; try again") from None
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split()) or f"exit code {error.returncode}"
        raise UserError(f"{command[0]} failed: {reason}{fix}") from error
    return done.stdout


def queued_states() -> dict[str, str]:
    """Return Slurm's word for each job of this user that it still knows, by the job's name.

    Slurm forgets a job minutes after its end.

    Raises:
        UserError: Slurm does not answer.
    """
    lines = run_slurm(
        *("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}"),
        "--format=%T %j_%K",
    ).splitlines()
    return {name: state for state, name in (line.split(maxsplit=1) for line in lines)}


def cancel(names: Iterable[str]) -> str | None:
    """Cancel the arrays of these jobs: Slurm sends SIGTERM, and SIGKILL later.

    Return the first fault; None if there is none.
    """
    faults = list[str]()
    for array in sorted({name.rpartition("_")[0] for name in names}):
        try:
            run_slurm("scancel", f"--name={array}")
        except UserError as error:
            faults.append(one_line(error))
    return faults[0] if faults else None


def submitted_as(run_dir: Path) -> str | None:
    """Return the name of the job that runs a run; None if there is none whose end is unknown.

    Raises:
        UserError: the file is damaged, and the job may still run.
    """
    path = run_dir / RECORD
    if not path.exists():
        return None
    name = path.read_text(encoding="utf-8", errors="replace")
    if not NAME.fullmatch(name):
        raise UserError(
            f"{path} is damaged, and names no job of Slurm; remove it once squeue shows no job of "
            "this sweep"
        )
    return name


def job_standing(run_dir: Path, *, name: str, state: str | None, sweep: Path) -> Standing:
    """Return how a job stands, by Slurm's word for it, and by its run.json once it has ended.

    Where Slurm ended the job before its run could say so, the record differs from run.json: it has
    the error. What the run has written last may still be on its way here.

    Args:
        run_dir: of the run.
        name: of the job.
        state: Slurm's word; None: Slurm has forgotten the job, so it has ended.
        sweep: the folder of the sweep.
    """
    if state in WAITING:
        return Standing(Status.QUEUED)
    if state in RUNNING:
        return Standing(Status.RUNNING)
    try:
        record = read_run_record(run_dir, missing_ok=True)
    except UserError as error:
        return Standing(DAMAGED, fault=str(error))
    if (status := record.get("status")) in (Status.COMPLETED, Status.FAILED):
        return Standing(status, record)
    log, job = sweep / LOGS / f"{name}.log", f"Slurm's job {name}"
    again = f"the same command goes on with it, see {log}"
    if state in STOPPED or status == Status.PREEMPTED:
        why = STOPPED.get(state or "", "was stopped")
        return _ended(record, Status.PREEMPTED, "signal", f"{job} {why}; {again}")
    if (printed := _last_error(log)) is not None:
        return _ended(record, Status.FAILED, "user", f"{printed}; see {log}")
    if state is None:
        why = f"Slurm has forgotten job {name} and its run has not completed"
        return _ended(record, Status.PREEMPTED, "signal", f"{why}; {again}")
    why = f"ended ({state}) before its run did"
    if state == "OUT_OF_MEMORY":
        why = "took more memory than hydra.launcher.mem_gb"
    return _ended(record, Status.FAILED, "crash", f"{job} {why}; see {log}")


def _ended(record: Mapping[str, Any], status: Status, kind: str, sentence: str) -> Standing:
    return Standing(status, {**record, "error": RunError(rank=None, kind=kind, sentence=sentence)})


def _last_error(log: Path) -> str | None:
    """Return what a run printed as its error; None if it printed none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    errors = [line for line in lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else None


def note_end(run_dir: Path, found: Standing) -> None:
    """Write into run.json how a job ended, if its run has not said so, and forget the job.

    Nobody else writes there: Slurm has ended the job.

    Raises:
        UserError: a file is damaged, or cannot be written.
    """
    if found.record != read_run_record(run_dir, missing_ok=True):
        error = found.record["error"]
        write_run_record(run_dir, status=found.status, finished_at=time.time(), error=error)
    (run_dir / RECORD).unlink(missing_ok=True)
