"""A sweep of real commands, and how its jobs stand."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import (
    last_step,
)

from ddp_runner.host import hardware
from ddp_runner.sweep.ledger import LEDGER

POLL_S = 0.2  # asked more often, the tests would take the cores for themselves
needs_two_cores = pytest.mark.skipif(hardware.detect().num_cores < 2, reason="needs two cores")


def statuses(sweep: Path) -> dict[str, str]:
    """Return the status of each job in the ledger, by folder."""
    return {
        one["folder"]: one["status"] for one in json.loads((sweep / LEDGER).read_text())["jobs"]
    }


def the_sweep(folder: Path) -> Path:
    """Return the only sweep folder that commands in a folder have made."""
    (ledger,) = folder.glob(f"outputs/*/{LEDGER}")
    return ledger.parent


def table_row(stdout: str, job: str) -> list[str]:
    """Return the words of a job's line in the table."""
    (line,) = [line for line in stdout.splitlines() if line.startswith(f"{job} ")]
    return line.split()


def both_train(
    process: subprocess.Popen[str], folder: Path, *, beyond: Mapping[str, int] | None = None
) -> bool:
    """Tell whether two jobs run, each beyond a step of its own; fail if the command has ended."""
    assert process.poll() is None, (folder / "stderr").read_text()
    running = {run_dir for run_dir, _ in workers(process.pid)}
    return len(running) == 2 and all(
        last_step(run_dir) > (beyond or {}).get(run_dir.name, 0) for run_dir in running
    )


def workers(launcher_pid: int) -> Iterator[tuple[Path, psutil.Process]]:
    """Yield the workers of all slots: each with its run's folder, where its log is open."""
    try:
        descendants = psutil.Process(launcher_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return  # the command has ended meanwhile
    for process in descendants:
        with suppress(psutil.Error):
            for file in process.open_files():
                if Path(file.path).name.startswith("rank-"):
                    yield Path(file.path).parent.parent, process
