"""Slurm's queue: its commands, and the standing of a submitted job. Torch-free.

The file ``slurm.job`` in a run's folder holds the job's name, its array's and an index, from before
its submission until a command has noted its end. So the next command finds the jobs of a command
that was killed while it submitted. squeue shows whether a job exists, and run.json how it ended, so
accounting (``sacct``) is not needed.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError
from ddp_runner.job import FailureKind, Status
from ddp_runner.tracking.alive import DAMAGED, Standing, standing
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import RunError, read_run_record, write_run_record

LIMIT_S = 60.0  # time limit of a Slurm command
NAME = re.compile(r"[\w.-]+_\d+", re.ASCII)  # the content of slurm.job
LOGS = "slurm"  # folder in the sweep's: the jobs' output, and the submitted scripts
WAITING = {
    *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"),
    "SPECIAL_EXIT",
}
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
# States of an ended job that can be resumed.
STOPPED = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit",
    "DEADLINE": "reached its deadline",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "had a node that did not start",
}


def run_slurm(*command: str, environ: Mapping[str, str] | None = None, fix: str = "") -> str:
    """Run a command of Slurm and return its stdout; a message about its failure ends with `fix`.

    Raises:
        UserError: the command is not installed, took too long, or failed.
    """
    if shutil.which(command[0]) is None:
        raise UserError(
            f"hydra/launcher=slurm needs Slurm's commands and {command[0]} is not installed",
            "start the sweep where sinfo works, such as on a login node",
        )
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            start_new_session=True,  # a terminal's Ctrl-C must not reach it
            env=environ,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} did not answer within {LIMIT_S:g} s", "try again") from None
    if process.returncode:
        reason = " ".join(process.stderr.split()) or f"exit code {process.returncode}"
        raise UserError(f"{command[0]} failed: {reason}{fix}")
    return process.stdout


def queued_states() -> dict[str, str]:
    """Return the state of each job of this user, by name; Slurm forgets ended jobs in minutes."""
    lines = run_slurm(
        *("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}"),
        "--format=%T %j_%K",
    ).splitlines()
    return {name: state for state, name in (line.split(maxsplit=1) for line in lines)}


def cancel(names: Iterable[str]) -> None:
    """Cancel the arrays of these jobs: Slurm sends SIGTERM, and SIGKILL later."""
    for array in sorted({name.rpartition("_")[0] for name in names}):
        run_slurm("scancel", f"--name={array}")


def submitted_as(run_dir: Path) -> str | None:
    """Return the name of a run's job in Slurm; None if it has no job, or the job's end is noted.

    Raises:
        UserError: the file is damaged; its job may still run.
    """
    path = RunDir(run_dir).slurm_job
    if not path.exists():
        return None
    name = path.read_text(encoding="utf-8", errors="replace")
    if not NAME.fullmatch(name):
        raise UserError(
            f"{path} is damaged and does not name a job of Slurm",
            "remove it after all jobs of this sweep have left squeue",
        )
    return name


def job_standing(run_dir: Path, *, name: str, state: str | None, sweep: Path) -> Standing:
    """Return how a submitted job stands, by its state and, once it has ended, by its run.json.

    If Slurm ended the job before its run noted an end, the returned record has the reason, unlike
    run.json. The state is None if Slurm has forgotten the job, so it has ended.
    """
    if state in WAITING:
        return Standing(Status.QUEUED)
    if state in RUNNING:
        return Standing(Status.RUNNING)
    current = standing(RunDir(run_dir))
    if current.status == DAMAGED:
        return current
    record, status = current.record, current.record.get("status")
    if status in (Status.COMPLETED, Status.FAILED):
        return Standing(status, record)
    log, job = sweep / LOGS / f"{name}.log", f"Slurm's job {name}"
    advice = f"the same command continues it, see {log}"
    if state in STOPPED or status == Status.PREEMPTED:
        reason = STOPPED.get(state or "", "was stopped")
        return _ended(record, Status.PREEMPTED, "signal", f"{job} {reason}; {advice}")
    if (line := _last_error(log)) is not None:
        return _ended(record, Status.FAILED, "user", f"{line}; see {log}")
    if state is None:
        reason = f"Slurm has forgotten job {name} and its run has not completed"
        return _ended(record, Status.PREEMPTED, "signal", f"{reason}; {advice}")
    reason = f"ended ({state}) before its run did"
    if state == "OUT_OF_MEMORY":
        reason = "took more memory than hydra.launcher.mem_gb"
    return _ended(record, Status.FAILED, "crash", f"{job} {reason}; see {log}")


def _ended(record: Mapping[str, Any], status: Status, kind: FailureKind, sentence: str) -> Standing:
    return Standing(status, {**record, "error": RunError(rank=None, kind=kind, sentence=sentence)})


def _last_error(log: Path) -> str | None:
    """Return the last error line in a job's log; None without a log or an error."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else None


def note_end(run_dir: Path, ended: Standing) -> None:
    """Note in run.json how a job ended, if its run has not done so, and forget the job."""
    if ended.record != read_run_record(run_dir, missing_ok=True):
        error = ended.record["error"]
        write_run_record(run_dir, status=Status(ended.status), finished_at=time.time(), error=error)
    RunDir(run_dir).slurm_job.unlink(missing_ok=True)
