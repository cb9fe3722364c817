"""The processes of a machine's ranks, and what is left alone at their end."""

import subprocess
from pathlib import Path

from configs import resolved

from ddp_runner.job import Job
from ddp_runner.launch.rank_processes import RankProcesses
from ddp_runner.launch.scratch import Scratch


def test_ranks_that_never_started_take_no_other_process_along(tmp_path: Path) -> None:
    """Machines that do not meet have no ranks to end."""
    config, _ = resolved("model=toy")
    with subprocess.Popen(["sleep", "600"]) as child:
        RankProcesses(Job(config, started_at=0.0, code={}), Scratch(tmp_path)).end()
        is_left = child.poll() is None
        child.kill()
    assert is_left
