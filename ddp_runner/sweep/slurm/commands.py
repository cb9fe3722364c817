"""Slurm's own commands: which jobs are in the queue, and cancelling them. Torch-free."""

import os
import subprocess
from collections.abc import Collection, Mapping
from functools import cache

from ddp_runner.errors import UserError, one_line

LIMIT_S = 60.0  # for an answer of the controller
MOST_IDS = 500  # of one command line
WAITING = {
    *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"),
    "SPECIAL_EXIT",
}
# COMPLETING: some of its processes still end.
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}


def run_slurm(*command: str, environ: Mapping[str, str] | None = None) -> str:
    """Run a command of Slurm in an environment, by default ours, and return its stdout.

    Raises:
        UserError: it is not installed, failed, or took too long.
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
        raise UserError(f"{command[0]} failed: {reason}") from error
    return done.stdout


def queued_states() -> dict[str, str]:
    """Return the state of each job of this user that Slurm still knows, by its number.

    An element of an array has the number JOB_INDEX. Slurm forgets a job minutes after its end.

    Raises:
        UserError: Slurm does not answer.
    """
    lines = run_slurm(
        *("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}"),
        "--format=%i %T",
    ).splitlines()
    return dict(line.split(maxsplit=1) for line in lines if " " in line.strip())


@cache  # thousands of jobs may have the name, and a name is asked for at a launcher's start only
def jobs_named(name: str) -> list[str]:
    """Return the numbers of the jobs of this name that Slurm still knows, without indexes.

    Raises:
        UserError: Slurm does not answer.
    """
    asked = ("squeue", "--noheader", "--array", "--states=all", f"--name={name}", "--format=%F")
    return sorted(set(run_slurm(*asked).split()))


def cancel(numbers: Collection[str]) -> str | None:
    """Cancel jobs: Slurm sends SIGTERM, and SIGKILL later. Return why it failed, or None."""
    left, fault = sorted(numbers), None
    for first in range(0, len(left), MOST_IDS):
        try:
            run_slurm("scancel", *left[first : first + MOST_IDS])
        except UserError as error:
            fault = fault or one_line(error)
    return fault
