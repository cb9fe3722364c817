"""Real restarts by torchrun, by several launchers and by a scheduler: each in its own folder."""

import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
from commands import (
    TORCHRUN,
    Ended,
    background,
    ended,
    record,
    run_command,
    run_dirs,
    steps,
    wait_for,
)
from injection import At, Fault, prepared, wait_until
from trainings import EQUAL, assert_went_on, place


def ranks_of(pid: int) -> dict[int, psutil.Process]:
    """Return the ranks that a launcher has started, each with its log open."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        try:
            names = {Path(file.path).name for file in process.open_files()}
        except psutil.NoSuchProcess:
            continue
        for name in names:
            if name.startswith("rank-") and name.endswith(".log"):
                found[int(name.removeprefix("rank-").removesuffix(".log"))] = process
    return found


def test_torchrun_restarts_a_run_in_its_own_folder_while_an_equal_one_lives(
    tmp_path: Path,
) -> None:
    """A rank is killed; the run goes on where it stood, and the other one is left alone."""
    command = ("-m", "ddp_runner", *EQUAL)
    alone = (*TORCHRUN[:2], "--nproc-per-node=1")
    with ExitStack() as stack:
        other = stack.enter_context(
            background(*command, folder=place(tmp_path, "other"), program=alone)
        )
        (theirs,) = wait_for(lambda: run_dirs(tmp_path))
        stopped = wait_for(lambda: ranks_of(other.pid))[0]
        stopped.suspend()  # so it lives for as long as the one that loses a rank
        killed = stack.enter_context(
            background(
                *command,
                folder=place(tmp_path, "killed"),
                program=(*TORCHRUN, "--max-restarts=2"),
            )
        )
        ours = wait_for(lambda: set(run_dirs(tmp_path)) - {theirs}).pop()
        wait_for(lambda: steps(ours) and 1 in ranks_of(killed.pid))
        ranks_of(killed.pid)[1].kill()
        assert ended(killed, tmp_path / "killed").exit_code == 0
        stopped.resume()
        assert ended(other, tmp_path / "other").exit_code == 0
    assert set(run_dirs(tmp_path)) == {ours, theirs}
    assert_went_on(ours)
    assert record(theirs)["status"] == "completed"
    assert "resumed from" not in (theirs / "logs" / "rank-0.log").read_text()

    again = run_command(*command, f"hydra.run.dir={ours}", folder=tmp_path, program=alone)
    assert again.exit_code != 0
    assert f"error: {ours} already holds a run; give another folder" in again.stderr
    assert record(ours)["status"] == "completed"


def two_launchers(folder: Path, *overrides: str, loses_a_rank: bool = False) -> list[Ended]:
    """Run the launchers of two machines, both on this one, to their ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = (
        "launch.nnodes=2",
        "launch.nproc_per_node=1",
        "launch.max_restarts=2",
        f"launch.rdzv_endpoint={endpoint}",
        *overrides,
    )
    places = [place(folder, name) for name in ("first", "second")]
    with ExitStack() as stack:
        processes = [stack.enter_context(background(*command, folder=one)) for one in places]
        if loses_a_rank:
            wait_for(lambda: any(steps(run) for run in run_dirs(folder)))

            def last_rank() -> psutil.Process | None:
                found = [ranks_of(process.pid).get(1) for process in processes]
                return next(filter(None, found), None)

            wait_for(last_rank).kill()
        return [ended(process, one) for process, one in zip(processes, places, strict=True)]


def test_a_lost_rank_of_another_machine_does_not_begin_the_run_anew(tmp_path: Path) -> None:
    """Two machines go on in one folder from the last checkpoint; `resume` works on both as well."""
    ends = two_launchers(tmp_path, *EQUAL, loses_a_rank=True)
    assert [end.exit_code for end in ends] == [0, 0]
    (run_dir,) = run_dirs(tmp_path)
    assert_went_on(run_dir)
    ends = two_launchers(tmp_path, f"resume={run_dir}", "train.max_steps=440")
    assert [end.exit_code for end in ends] == [0, 0]
    assert run_dirs(tmp_path) == [run_dir]
    assert_went_on(run_dir, num_steps=440)


def srun(
    folder: Path,
    *overrides: str,
    job: int,
    step: int = 0,
    stops: Callable[[], object] | None = None,
    prepare: Callable[[], None] | None = None,
) -> list[int]:
    """Run two tasks as a srun step has them; return their exit codes.

    Args:
        folder: where outputs/ is.
        overrides: the command line.
        job: the number of the job.
        step: its number in the job.
        stops: preempt them once this is true.
        prepare: of each of them; see ``background``.
    """
    environ = {
        **{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_NODEID": "0"},
        **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"},
        "SLURM_STEP_NODELIST": "here",
    }
    with ExitStack() as stack:
        places = [place(folder, f"task-{job}-{rank}") for rank in range(2)]
        processes = [
            stack.enter_context(
                background(
                    *overrides,
                    folder=one,
                    prepare=prepare,
                    environ={**environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                )
            )
            for rank, one in enumerate(places)
        ]
        if stops is not None:
            wait_for(stops)
            for process in processes:
                process.send_signal(signal.SIGTERM)
        ends = zip(processes, places, strict=True)
        return [ended(process, one).exit_code for process, one in ends]


def test_a_job_that_is_queued_again_goes_on_with_resume_auto_beside_an_equal_one(
    tmp_path: Path,
) -> None:
    """Preempted under srun and started by another step: the same folder, no step twice.

    An equal job runs all the while: neither takes the other's folder.
    """
    command, go = (*EQUAL, "resume=auto"), tmp_path / "go"
    held = prepared(Fault(partial(wait_until, str(go)), At(0, 60)))
    with ThreadPoolExecutor(1) as pool:
        equal = pool.submit(srun, tmp_path, *command, job=8, prepare=held)
        try:
            (theirs,) = wait_for(lambda: run_dirs(tmp_path))

            def ours() -> list[Path]:
                return [run for run in run_dirs(tmp_path) if run != theirs]

            saved = srun(tmp_path, *command, job=7, stops=lambda: any(map(steps, ours())))
            assert saved == [143, 143]
            (run_dir,) = ours()
            assert record(run_dir)["status"] == "preempted"
            assert srun(tmp_path, *command, job=7, step=5) == [0, 0]
            assert not equal.done()
        finally:
            go.touch()
        assert equal.result() == [0, 0]
    assert ours() == [run_dir]
    assert_went_on(run_dir)
    assert (record(theirs)["status"], record(theirs)["step"]) == ("completed", 400)
    assert "resumed from" not in (theirs / "logs" / "rank-0.log").read_text()
