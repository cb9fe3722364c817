"""Look at a sweep of real commands: its folder, its ledger, its table, its running jobs."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from commands import rank_logs
from run_folders import last_step

from ddp_runner.host import hardware
from ddp_runner.sweep.ledger import LEDGER, Ledger

POLL_S = 0.2  # more often would take too much of the cores
needs_two_cores = pytest.mark.skipif(hardware.detect().num_cores < 2, reason="needs two cores")


def only_sweep(folder: Path) -> Path:
    """Return the only sweep folder that commands in a folder have made."""
    (ledger,) = folder.glob(f"outputs/*/{LEDGER}")
    return ledger.parent


def statuses(sweep: Path) -> dict[str, str]:
    """Return the status of each job in the ledger, by folder."""
    return {entry.folder: entry.status for entry in Ledger(sweep).read().values()}


def table_row(stdout: str, job: str) -> list[str]:
    """Return the words of a job's line in the table."""
    (line,) = [line for line in stdout.splitlines() if line.startswith(f"{job} ")]
    return line.split()


def both_train(
    process: subprocess.Popen[str], folder: Path, *, beyond: Mapping[str, int] | None = None
) -> bool:
    """Return whether two jobs run, each beyond a step; fail if the command has ended.

    Args:
        process: the sweep's command.
        folder: where it was started.
        beyond: the step of each job, by folder name; 0 where it is missing.
    """
    assert process.poll() is None, (folder / "stderr").read_text()
    running = {log.parent.parent for log, _ in rank_logs(process.pid)}
    return len(running) == 2 and all(
        last_step(run_dir) > (beyond or {}).get(run_dir.name, 0) for run_dir in running
    )
