"""Ranks that fail in every way, in one real sweep: which rank is named, what restarts."""

from pathlib import Path

import psutil
import pytest
from commands import TIME_LIMIT_S, background, fork_server, rank_processes, wait_for, wait_for_end
from configs import write_experiment
from run_folders import last_step, record

pytestmark = pytest.mark.full

# Rank 1 fails while rank 0 waits for it in a collective.
FAULTY = '''
import os, signal, subprocess, time
import torch
from torch import nn

class Faulty(nn.Linear):
    """Works for one step; then rank 1 fails in the chosen way."""

    def __init__(self, fault):
        super().__init__(10, 5)
        self.fault, self.calls = fault, 0
        if fault == "parent":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            with open(f"child-{os.environ['RANK']}", "w") as file:
                file.write(str(child.pid))

    def forward(self, inputs):
        self.calls += self.training  # what is tried before the first step does not count
        if self.calls < 2:
            return super().forward(inputs)
        if self.fault == "not_finite":
            return super().forward(inputs) * float("nan")
        if os.environ["RANK"] == "1":
            match self.fault:
                case "parent" | "again":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "suspended":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "wait":
                    time.sleep(600)
        return super().forward(inputs)
'''
ANY = None  # all ranks fail alike
ROWS = {  # by fault: rank and kind of the failure, the beginning of its sentence, the restarts
    "parent": (1, "signal", "rank 1 was killed by SIGKILL", 0),
    "suspended": (1, "late", "rank 1 did not reach the collective in which the others waited", 0),
    "not_finite": (ANY, "user", "train/loss became nan", 0),
    "again": (ANY, "user", "three restarts in a row made no progress beyond step 0", 3),
    "wait": (0, "signal", "the fork server was killed", 0),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rank_that_failed_first_is_named_however_it_ended(tmp_path: Path) -> None:
    """A sweep has a job for each fault; its launcher survives all of them.

    A failure that the user must fix is not restarted, and restarts without progress stop. A
    suspended rank is killed. Children of ranks end with them.
    """
    (tmp_path / "faulty.py").write_text(FAULTY)
    for fault, (*_, restarts) in ROWS.items():
        allowed = 9 if restarts or fault == "not_finite" else 0
        write_experiment(
            tmp_path / "conf",
            fault,
            "model=toy",
            "model._target_=faulty.Faulty",
            f"model.fault={fault}",
            "train.log_every_steps=1",
            "checkpoint.every_epochs=null",
            f"launch.max_restarts={allowed}",
            "backend.timeout_s=6",
        )
    sweep = tmp_path / "sweep"
    runs = {fault: sweep / f"experiment={fault}" for fault in ROWS}
    with background(
        "-m",
        f"--config-dir={tmp_path / 'conf'}",
        f"experiment={','.join(ROWS)}",
        "allowed_targets=[faulty]",
        "hydra.sweep.dir=sweep",
        folder=tmp_path,
        environ={"PYTHONPATH": str(tmp_path)},
    ) as process:
        wait_for(lambda: process.poll() or last_step(runs["wait"]) >= 1, timeout_s=2 * TIME_LIMIT_S)
        assert len(rank_processes(process.pid)) == 2
        fork_server(process.pid).kill()
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 2
    for fault, (rank, kind, sentence, restarts) in ROWS.items():
        fields = record(runs[fault])
        error = fields["error"]
        assert (rank in (ANY, error["rank"]), error["kind"]) == (True, kind), (fault, error)
        assert error["sentence"].startswith(sentence), (fault, error)
        assert (fields["status"], fields["restarts"]) == ("failed", restarts), fault
    assert "no stack could be read" in record(runs["suspended"])["error"]["sentence"]
    first = "first failed because rank 1 was killed by SIGKILL"
    assert first in record(runs["again"])["error"]["sentence"]
    assert not any(psutil.pid_exists(int(path.read_text())) for path in tmp_path.glob("child-*"))
    assert len(list(tmp_path.glob("child-*"))) == 2
