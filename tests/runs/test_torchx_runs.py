"""Jobs of TorchX on this machine: a retry and a stop go on in the run folder of their job."""

import json
import os
import signal
from pathlib import Path

import pytest
from commands import background, rank_processes, wait_for, wait_for_end
from run_folders import checkpoint_steps, rank_log, record, run_dirs
from torchx_jobs import TORCHX, torchx
from trainings import EQUAL, assert_continued, shared_outputs

LOCAL = ("run", "-s", "local_cwd", "--workspace=")
JOB = ("ddp_runner.torchx:run", "-j", "1x2", "--", *EQUAL)


def planned(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of a job's only machine, and its variables, which a retry has as well."""
    end = torchx(*LOCAL, "--dryrun", "--json", *JOB, folder=folder)
    assert end.returncode == 0, end.stderr
    (replica,) = json.loads(end.stdout)["request"]["role_params"]["ddp_runner"]
    return replica["args"], replica["env"] | with_torchrun()


def with_torchrun() -> dict[str, str]:
    """Return a PATH on which bash finds the torchrun of these tests."""
    return {"PATH": f"{Path(TORCHX).parent}:{os.environ['PATH']}"}


@pytest.mark.slow
def test_a_retry_continues_in_the_folder_of_its_job_beside_an_equal_job(tmp_path: Path) -> None:
    """A rank is killed and the job ends; an equal job is stopped; the first is started again."""
    command, environ = planned(tmp_path)
    first = shared_outputs(tmp_path, "first")
    with background(folder=first, program=command, environ=environ) as job:
        (ours,) = wait_for(lambda: run_dirs(tmp_path))
        wait_for(lambda: checkpoint_steps(ours) and 1 in rank_processes(job.pid))
        rank_processes(job.pid)[1].kill()
        assert wait_for_end(job, first).exit_code != 0

    other = shared_outputs(tmp_path, "other")
    with background(
        *LOCAL, "--log", *JOB, folder=other, program=(TORCHX,), environ=with_torchrun()
    ) as stopped:
        theirs = wait_for(lambda: set(run_dirs(tmp_path)) - {ours}).pop()
        wait_for(lambda: checkpoint_steps(theirs))
        stopped.send_signal(signal.SIGTERM)
        wait_for_end(stopped, other)
    assert record(theirs)["status"] == "preempted"
    assert checkpoint_steps(theirs)[-1] == record(theirs)["step"]

    retry = shared_outputs(tmp_path, "retry")
    with background(folder=retry, program=command, environ=environ) as job:
        assert wait_for_end(job, retry).exit_code == 0
    assert set(run_dirs(tmp_path)) == {ours, theirs}
    assert_continued(ours)
    assert "resumed from" not in rank_log(theirs)
