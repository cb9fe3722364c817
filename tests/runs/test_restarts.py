"""Restarts by torchrun, by our own launchers and by a scheduler: each run keeps its folder."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest
from commands import (
    TORCHRUN,
    CommandResult,
    background,
    free_port,
    rank_processes,
    run_command,
    wait_for,
    wait_for_end,
)
from injection import At, Fault, inject, wait_until
from run_folders import checkpoint_steps, rank_log, record, run_dirs
from trainings import EQUAL, assert_continued, shared_outputs

pytestmark = pytest.mark.full


@pytest.mark.slow
def test_torchrun_restarts_a_run_in_its_own_folder_beside_an_equal_one(tmp_path: Path) -> None:
    """After a rank was killed, the run continues from a checkpoint; the other run is untouched."""
    command = ("-m", "ddp_runner", *EQUAL)
    alone = (*TORCHRUN[:2], "--nproc-per-node=1")
    with ExitStack() as stack:
        other = stack.enter_context(
            background(*command, folder=shared_outputs(tmp_path, "other"), program=alone)
        )
        (theirs,) = wait_for(lambda: run_dirs(tmp_path))
        suspended = wait_for(lambda: rank_processes(other.pid))[0]
        suspended.suspend()  # so that the run lasts as long as the run that loses a rank
        killed = stack.enter_context(
            background(
                *command,
                folder=shared_outputs(tmp_path, "killed"),
                program=(*TORCHRUN, "--max-restarts=2"),
            )
        )
        ours = wait_for(lambda: set(run_dirs(tmp_path)) - {theirs}).pop()
        wait_for(lambda: checkpoint_steps(ours) and 1 in rank_processes(killed.pid))
        rank_processes(killed.pid)[1].kill()
        assert wait_for_end(killed, tmp_path / "killed").exit_code == 0
        suspended.resume()
        assert wait_for_end(other, tmp_path / "other").exit_code == 0
    assert set(run_dirs(tmp_path)) == {ours, theirs}
    assert_continued(ours)
    assert record(theirs)["status"] == "completed"
    assert "resumed from" not in rank_log(theirs)

    of_torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    again = run_command(
        *EQUAL, f"hydra.run.dir={ours}", folder=tmp_path, environ=of_torchrun | meeting
    )
    assert again.exit_code != 0
    assert f"error: {ours} already holds a run; give another folder" in again.stderr
    assert record(ours)["status"] == "completed"


@pytest.mark.slow
def test_a_run_that_torchrun_stops_does_not_say_that_it_is_over(tmp_path: Path) -> None:
    """Only the agent knows whether it starts the ranks again."""
    command = ("-m", "ddp_runner", *EQUAL, "train.max_steps=1000000")
    program = (*TORCHRUN, "--max-restarts=3")
    with background(*command, folder=tmp_path, program=program) as process:
        (run,) = wait_for(lambda: run_dirs(tmp_path))
        wait_for(lambda: checkpoint_steps(run))
        process.send_signal(signal.SIGTERM)
        end = wait_for_end(process, tmp_path)
    assert record(run)["status"] == "preempted"
    assert "resume with: python" not in end.stdout
    assert (
        "resume, unless its launcher restarts it, with the same command and resume=" in end.stdout
    )


def two_launchers(folder: Path, *overrides: str, loses_a_rank: bool = False) -> list[CommandResult]:
    """Run the launchers of two simulated machines to their ends."""
    command = (
        "launch.nnodes=2",
        "launch.nproc_per_node=1",
        "launch.max_restarts=2",
        f"launch.rdzv_endpoint=127.0.0.1:{free_port()}",
        *overrides,
    )
    places = [shared_outputs(folder, name) for name in ("first", "second")]
    with ExitStack() as stack:
        processes = [stack.enter_context(background(*command, folder=place)) for place in places]
        if loses_a_rank:
            wait_for(lambda: any(checkpoint_steps(run) for run in run_dirs(folder)))

            def last_rank() -> psutil.Process | None:
                ranks = [rank_processes(process.pid).get(1) for process in processes]
                return next(filter(None, ranks), None)

            wait_for(last_rank).kill()
        return list(map(wait_for_end, processes, places))


@pytest.mark.slow
def test_two_machines_continue_a_run_in_its_folder_after_a_lost_rank(tmp_path: Path) -> None:
    """Both continue from the last checkpoint; `resume` works on two machines, too."""
    ends = two_launchers(tmp_path, *EQUAL, loses_a_rank=True)
    assert [end.exit_code for end in ends] == [0, 0]
    (run_dir,) = run_dirs(tmp_path)
    assert_continued(run_dir)
    ends = two_launchers(tmp_path, f"resume={run_dir}", "train.max_steps=440")
    assert [end.exit_code for end in ends] == [0, 0]
    assert run_dirs(tmp_path) == [run_dir]
    assert_continued(run_dir, num_steps=440)


def srun(
    folder: Path,
    *overrides: str,
    job: int,
    start: int = 0,
    preempt: Callable[[], object] | None = None,
    prepare: Callable[[], None] | None = None,
) -> list[int]:
    """Run two tasks as a step of srun does; return their exit codes.

    Args:
        folder: the parent of outputs/.
        overrides: the command line.
        job: the number of the job.
        start: how often Slurm has started the job before.
        preempt: send SIGTERM to the tasks once this is true.
        prepare: changes each task; see ``background``.
    """
    environ = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": str(5 * start),  # the script skips what is done
        "SLURM_RESTART_COUNT": str(start),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "here",
    }
    with ExitStack() as stack:
        places = [shared_outputs(folder, f"task-{job}-{rank}") for rank in range(2)]
        processes = [
            stack.enter_context(
                background(
                    *overrides,
                    folder=place,
                    prepare=prepare,
                    environ={**environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                )
            )
            for rank, place in enumerate(places)
        ]
        if preempt is not None:
            wait_for(preempt)
            for process in processes:
                process.send_signal(signal.SIGTERM)
        return [end.exit_code for end in map(wait_for_end, processes, places)]


@pytest.mark.slow
def test_a_requeued_job_continues_beside_an_equal_one(tmp_path: Path) -> None:
    """Preempted under srun and started by another step, it keeps its folder and repeats no step."""
    command, go = EQUAL, tmp_path / "go"
    held_back = inject(Fault(partial(wait_until, str(go)), At(0, 60)))
    with ThreadPoolExecutor(1) as pool:
        equal = pool.submit(srun, tmp_path, *command, job=8, prepare=held_back)
        try:
            (theirs,) = wait_for(lambda: run_dirs(tmp_path))

            def ours() -> list[Path]:
                return [run for run in run_dirs(tmp_path) if run != theirs]

            saved = srun(
                tmp_path, *command, job=7, preempt=lambda: any(map(checkpoint_steps, ours()))
            )
            assert saved == [143, 143]
            (run_dir,) = ours()
            assert record(run_dir)["status"] == "preempted"
            assert srun(tmp_path, *command, job=7, start=1) == [0, 0]
            assert not equal.done()
        finally:
            go.touch()
        assert equal.result() == [0, 0]
    assert ours() == [run_dir]
    assert_continued(run_dir)
    assert (record(theirs)["status"], record(theirs)["step"]) == ("completed", 400)
    assert "resumed from" not in rank_log(theirs)
