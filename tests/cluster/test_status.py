"""The status of a run on one host, as another host sees it on the disk that both share."""

import json
import os
import time
from pathlib import Path
from typing import Any

from clusters import Host, needs, network
from commands import RUNNER, background, run_command, wait_for
from run_folders import last_step, run_dirs
from trainings import LONG

pytestmark = needs()
STATUS = (*RUNNER[:-1], "ddp_runner.status")


def seen_from(host: Host, outputs: Path) -> dict[str, Any]:
    """Return the only run that the host sees, and the exit code of its look."""
    folder = outputs.parent / "look"
    end = run_command(str(outputs), "--json", folder=folder, program=STATUS, prepare=host.enter)
    assert end.stderr == ""
    (found,) = json.loads(end.stdout)["runs"]
    return {**found, "exit_code": end.exit_code}


def test_another_host_sees_a_run_and_that_its_host_was_lost(tmp_path: Path) -> None:
    """By the heartbeat: a process of another host cannot be asked."""
    outputs = tmp_path / "outputs"
    with network() as net:
        first, second = net.hosts
        with background(*LONG, folder=tmp_path, prepare=first.enter):
            wait_for(lambda: last_step(outputs) >= 3)
            found = wait_for(
                lambda: (now := seen_from(second, outputs))["status"] == "running" and now
            )
            assert (found["hosts"], found["exit_code"]) == (["n1"], 0)
            first.kill()
            assert seen_from(first, outputs)["status"] == "lost"  # at once, by the lock
        (run_dir,) = run_dirs(outputs)
        for path in run_dir.iterdir():
            os.utime(path, (time.time() - 120,) * 2)
        found = seen_from(second, outputs)
        assert (found["status"], found["exit_code"]) == ("lost", 1)
        assert " on n1 is gone; continue with resume=" in found["reason"]
