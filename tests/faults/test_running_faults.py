"""Faults while a run trains: of its ranks, its launcher and its streams."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from commands import (
    CommandResult,
    background,
    error_line,
    run_command,
    wait_for,
    wait_for_end,
    wait_until_gone,
)
from injection import (
    At,
    Call,
    Fault,
    append_byte,
    call_all,
    hang,
    inject,
    kill_tree,
    lose_stdout,
    raise_error,
    send_launcher,
    send_signal,
    wait_until,
)
from run_folders import (
    checkpoint_steps,
    last_step,
    metrics,
    rank_log,
    record,
    reproducible_metrics,
    run_dirs,
)
from tiers import first_of, named, selected
from trainings import (
    EQUAL,
    NUM_STEPS,
    RUN,
    TOY,
    assert_checkpoints_whole,
    assert_continued,
    assert_resumes,
    assert_same_run,
    run_training,
    shared_outputs,
)

from ddp_runner.host.hardware import own_cgroups
from ddp_runner.launch.stop_requests import ONE_REQUEST_S

MIDDLE = 11  # a step in the middle of the training, and of an epoch
KILL = partial(send_signal, signal.SIGKILL)
STOP = partial(send_signal, signal.SIGSTOP)
KILLED = "was killed by SIGKILL, by another process or by the kernel's out-of-memory killer"
TIMEOUT_S = 5
NEVER_S = 36_000  # a rank that fails must end the others without this timeout
LATE = (
    f"did not reach the collective in which the others waited for backend.timeout_s ({TIMEOUT_S} s)"
)


def interrupt() -> NoReturn:
    """Raise KeyboardInterrupt in this rank only."""
    raise KeyboardInterrupt


def fill_memory() -> NoReturn:
    """Allocate memory until the kernel kills this process."""
    held = []
    while True:
        held.append(b"x" * (1 << 24))


def join_group(folder: str) -> None:
    """Move this process, and all that it starts later, into a control group."""
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))


HANGING_SAVE = Fault(hang, Call(5, within=3))
# The fault, backend.timeout_s, and the sentence.
FAILURES: dict[str, tuple[Fault, int, str]] = {
    "raises": (
        Fault(raise_error, At(1, MIDDLE)),
        NEVER_S,
        "rank 1 raised ZeroDivisionError: an injected error; see RUN/logs/failure.txt",
    ),
    "ends by os._exit": (
        Fault(partial(os._exit, 7), At(1, MIDDLE)),
        NEVER_S,
        "rank 1 ended with exit code 7, without an exception",
    ),
    "ends by os._exit with code 0": (
        Fault(partial(os._exit, 0), At(1, MIDDLE)),
        NEVER_S,
        "rank 1 ended with exit code 0 before the run was over",
    ),
    "ends by sys.exit": (
        Fault(partial(sys.exit, "enough"), At(1, MIDDLE)),
        NEVER_S,
        "rank 1 raised SystemExit: enough; see RUN/logs/failure.txt",
    ),
    "raises KeyboardInterrupt": (
        Fault(interrupt, At(1, MIDDLE)),
        NEVER_S,
        "rank 1 raised KeyboardInterrupt",
    ),
    "suspended": (
        Fault(STOP, At(1, MIDDLE)),
        TIMEOUT_S,
        f"rank 1 {LATE}; no stack could be read: the process may be suspended; see RUN/logs",
    ),
    "hangs": (Fault(hang, At(1, MIDDLE)), TIMEOUT_S, f"rank 1 {LATE}; it was at File "),
    "hangs before its first step": (
        Fault(hang, At(1, 1)),
        TIMEOUT_S,
        f"rank 1 {LATE}; it was at File ",
    ),
    "hangs in an evaluation": (
        Fault(hang, At(1, 2, of="evaluation")),
        TIMEOUT_S,
        f"rank 1 {LATE}; it was at File ",
    ),
    "suspended at the end": (
        Fault(STOP, At(1, 1, of="end")),
        TIMEOUT_S,
        "rank 1 is suspended, and has not ended within backend.timeout_s (5 s) of the others; see "
        "RUN/logs",
    ),
    "suspended in a save": (
        Fault(STOP, Call(5, within=3)),
        TIMEOUT_S,
        f"rank 0 {LATE}; no stack could be read: the process may be suspended; see RUN/logs",
    ),
    "hangs in a save": (HANGING_SAVE, TIMEOUT_S, f"rank 0 {LATE}; it was at File "),
}


@pytest.fixture(scope="module")
def failed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, CommandResult]:
    """Return the trainings of FAILURES, side by side because they mostly wait."""
    base = tmp_path_factory.mktemp("failures")
    names = [name for name in selected(request, "name") if name in FAILURES]
    folders = {name: base / name.replace(" ", "-") for name in names}
    with ExitStack() as stack:
        processes = {}
        for name in names:
            fault, timeout_s, _ = FAILURES[name]
            # A rank that hangs in a save gets ten times as long.
            shutdown = ["launch.shutdown_timeout_s=0.3"] if fault == HANGING_SAVE else []
            processes[name] = stack.enter_context(
                background(
                    *TOY,
                    f"backend.timeout_s={timeout_s}",
                    *shutdown,
                    folder=folders[name],
                    prepare=inject(fault),
                )
            )
        ends = {name: wait_for_end(process, folders[name]) for name, process in processes.items()}
        for process in processes.values():
            wait_until_gone(process)
    return ends


@pytest.mark.parametrize("name", named(FAILURES, quick=("raises",)))
def test_a_failed_or_late_rank_is_named_and_ends_the_run(
    failed: dict[str, CommandResult], name: str
) -> None:
    """All ranks are gone, even suspended ones, and the saved checkpoints are whole."""
    end, (fault, timeout_s, sentence) = failed[name], FAILURES[name]
    assert end.exit_code == 1
    run_dir = end.folder / RUN
    first, *rest = end.stderr.strip().splitlines()
    assert first.startswith("error: " + sentence.replace("RUN", str(run_dir)))
    assert f", then continue with resume={run_dir}" in first
    fields = record(run_dir)
    assert fields["status"] == "failed"
    kind = "crash" if timeout_s == NEVER_S else "late"
    assert (fields["error"]["rank"], fields["error"]["kind"]) == (int(sentence[5]), kind)
    failure = run_dir / "logs" / "failure.txt"
    assert failure.exists() == (fault.what is not STOP and "ended with" not in sentence)
    if failure.exists():
        assert str(failure) in first
        assert [line for line in failure.read_text().splitlines() if line] == rest
    if fault.where != At(1, 1):
        assert_checkpoints_whole(end.folder)


# The faults, the launcher's exit code, and the status in run.json.
KILLS: dict[str, tuple[tuple[Fault, ...], int, str]] = {
    "a rank": ((Fault(KILL, At(1, MIDDLE)),), 1, "failed"),
    "the launcher": (
        (
            Fault(partial(send_launcher, signal.SIGKILL), At(0, MIDDLE)),
            Fault(
                partial(time.sleep, 600), At(0, MIDDLE)
            ),  # the few steps left would be done first
        ),
        -signal.SIGKILL,
        "running",  # nothing is left to correct it
    ),
    "the launcher beside a suspended rank": (
        (
            Fault(STOP, At(1, MIDDLE)),
            Fault(partial(time.sleep, 0.3), At(0, MIDDLE)),
            Fault(partial(send_launcher, signal.SIGKILL), At(0, MIDDLE)),
        ),
        -signal.SIGKILL,
        "running",
    ),
    "the whole tree": ((Fault(kill_tree, At(0, MIDDLE)),), -signal.SIGKILL, "running"),
}


@pytest.mark.parametrize("name", first_of(KILLS))
def test_a_run_resumes_after_sigkill(tmp_path: Path, uninterrupted: Path, name: str) -> None:
    """No process survives, each checkpoint is whole, and the end equals the uninterrupted run."""
    faults, exit_code, status = KILLS[name]
    end = run_training(tmp_path, *faults)
    assert end.exit_code == exit_code
    assert record(tmp_path / RUN)["status"] == status
    if exit_code == 1:
        advice = f"see {end.run_dir / 'logs'}, then continue with resume={end.run_dir}"
        assert error_line(end, exit_code=1).startswith(f"rank 1 {KILLED}; {advice}")
        assert record(end.run_dir)["error"]["sentence"] == f"rank 1 {KILLED}"
    else:
        assert end.stderr == ""
    assert_checkpoints_whole(tmp_path)
    assert_resumes(tmp_path, uninterrupted)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """Give a control group with little memory; skip the test where none can be made."""
    for parent in own_cgroups("memory"):
        group = parent / f"ddp_runner-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            limit = group / "memory.limit_in_bytes"  # version 1
            limit = limit if limit.exists() else group / "memory.max"
            if limit.exists():
                limit.write_text(str(1 << 30))
                yield group
                return
        finally:
            remove_group(group)
    pytest.skip("needs a memory limit, and no control group is writable: run as root")


def remove_group(group: Path) -> None:
    """Remove a control group once it is empty."""
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.mark.full
def test_a_rank_killed_for_memory_is_named(tmp_path: Path, memory_group: Path) -> None:
    """The kernel's counter distinguishes it from any other SIGKILL."""
    fault = Fault(fill_memory, At(1, MIDDLE))
    prepare = partial(call_all, partial(join_group, str(memory_group)), inject(fault))
    with background(*TOY, folder=tmp_path, prepare=prepare) as process:
        end = wait_for_end(process, tmp_path)
        wait_until_gone(process)
    assert error_line(end, exit_code=1).startswith(
        "rank 1 was killed by SIGKILL: likely out of memory, as the kernel reports; use a smaller "
        "batch.per_rank; see "
    )
    assert_checkpoints_whole(tmp_path)


def request_stop(signum: int, where: At | Call) -> tuple[Fault, ...]:
    """Return faults that send the launcher a signal, and wait until it has requested a stop."""
    requested = partial(wait_until, "stdout", "again to end at once")
    return Fault(partial(send_launcher, signum), where), Fault(requested, where)


@pytest.mark.full
@pytest.mark.parametrize("name", ["SIGUSR2", pytest.param("SIGQUIT", marks=pytest.mark.slow)])
def test_a_run_stopped_by_a_signal_resumes(tmp_path: Path, uninterrupted: Path, name: str) -> None:
    """It saves its last step and exits with 128 + the signal; no step is lost or taken twice."""
    signum = signal.Signals[name]
    end = run_training(tmp_path, *request_stop(signum, At(0, MIDDLE)))
    assert (end.exit_code, end.stderr) == (128 + signum, "")
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]) == ("preempted", None)
    assert MIDDLE <= checkpoint_steps(end.run_dir)[-1] == fields["step"] < NUM_STEPS
    assert_resumes(tmp_path, uninterrupted, same_steps=False)


@pytest.mark.full
def test_a_second_sigterm_ends_the_run_at_once(tmp_path: Path, uninterrupted: Path) -> None:
    """The first waits for a step that a suspended rank never ends; the second does not wait."""
    faults = (Fault(STOP, At(1, MIDDLE)), *request_stop(signal.SIGTERM, At(0, MIDDLE)))
    with background(
        *TOY, "launch.shutdown_timeout_s=3600", folder=tmp_path, prepare=inject(*faults)
    ) as process:
        wait_for(lambda: "again to end at once" in (tmp_path / "stdout").read_text())
        time.sleep(2 * ONE_REQUEST_S)  # an earlier signal would be the same request
        assert process.poll() is None
        process.terminate()
        end = wait_for_end(process, tmp_path)
        wait_until_gone(process)
    assert (end.exit_code, end.stderr) == (143, "")
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]["sentence"]) == (
        "preempted",
        "ended without a checkpoint",
    )
    assert_checkpoints_whole(tmp_path)
    assert_resumes(tmp_path, uninterrupted)


@pytest.mark.full
@pytest.mark.parametrize("step", [NUM_STEPS, NUM_STEPS - 1])
def test_a_stop_in_the_last_step_loses_no_evaluation(
    tmp_path: Path, uninterrupted: Path, step: int
) -> None:
    """The run or its resume evaluates and completes; the run never ends without an evaluation."""
    end = run_training(tmp_path, *request_stop(signal.SIGTERM, At(0, step)))
    assert end.stderr == ""
    if step < NUM_STEPS and end.exit_code == 143:
        assert record(end.run_dir)["status"] == "preempted"
        assert run_command(f"resume={RUN}", folder=tmp_path).exit_code == 0
    else:
        assert end.exit_code == 0
    assert_same_run(end.run_dir, uninterrupted, same_steps=False)
    assert any("eval/loss" in line and line["step"] == NUM_STEPS for line in metrics(end.run_dir))


@pytest.mark.full
@pytest.mark.parametrize("slots", [(), ("sweep.parallel_jobs=2",)])
def test_a_stop_in_the_last_step_of_a_job_ends_its_sweep(
    tmp_path: Path, slots: tuple[str, ...]
) -> None:
    """The job is complete, and the next one does not start; the same command runs it."""
    sweep = (*TOY[:-1], "-m", "seed=1,2,3", "hydra.sweep.dir=sweep", *slots)
    prepare = inject(*request_stop(signal.SIGTERM, At(0, NUM_STEPS)))
    with background(*sweep, folder=tmp_path, prepare=prepare) as process:
        end = wait_for_end(process, tmp_path)
        wait_until_gone(process)
    assert (end.exit_code, end.stderr) == (143, "")
    assert "the same command continues this sweep" in end.stdout
    assert record(tmp_path / "sweep" / "seed=1")["status"] == "completed"
    assert not (tmp_path / "sweep" / "seed=3" / "run.json").exists()
    assert run_command(*sweep, folder=tmp_path).exit_code == 0
    assert [record(path)["status"] for path in run_dirs(tmp_path / "sweep")] == ["completed"] * 3


FREEZE = partial(Call, rank=None, half=True, during="freeze")


@pytest.mark.full
def test_a_kill_while_a_resume_freezes_its_config_leaves_a_run_that_resumes(
    tmp_path: Path, uninterrupted: Path
) -> None:
    """The same run is killed repeatedly: in the middle of a write, before a file is in place."""
    run_training(tmp_path, Fault(kill_tree, At(0, MIDDLE)))
    # Three files, each opened, written, synced and renamed, after their folder is created.
    for number in (1, 3, 5, 9, 11, 13):
        prepare = inject(Fault(kill_tree, FREEZE(number)))
        with background(f"resume={RUN}", folder=tmp_path, prepare=prepare) as process:
            assert wait_for_end(process, tmp_path).exit_code == -signal.SIGKILL
            wait_until_gone(process)
    assert_checkpoints_whole(tmp_path)
    assert_resumes(tmp_path, uninterrupted)


@pytest.mark.full
@pytest.mark.parametrize("number", [7, pytest.param(11, marks=pytest.mark.slow)])
def test_a_kill_while_a_new_run_freezes_its_config_leaves_no_run(
    tmp_path: Path, uninterrupted: Path, number: int
) -> None:
    """A resume reports that there is none, and the same command starts the run."""
    assert run_training(tmp_path, Fault(kill_tree, FREEZE(number))).exit_code == -signal.SIGKILL
    end = run_command(f"resume={RUN}", folder=tmp_path)
    assert error_line(end) == (
        f"resume={RUN} is not a run folder: {RUN}/.hydra/config.yaml does not exist; name the "
        "folder that holds run.json"
    )
    assert run_training(tmp_path).exit_code == 0
    assert_same_run(tmp_path / RUN, uninterrupted)


@pytest.mark.full
def test_a_restart_keeps_its_folder_beside_an_equal_run(tmp_path: Path) -> None:
    """Two equal commands under our own launcher: the restart continues in its own folder."""
    restarted = str(tmp_path / "restarted")
    faults = {
        "killed": (
            Fault(KILL, At(1, 60)),
            Fault(partial(append_byte, restarted), At(0, 1, attempt=1)),
        ),
        "other": (Fault(partial(wait_until, restarted), At(0, 60)),),
    }
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                background(
                    *EQUAL,
                    "launch.max_restarts=1",
                    folder=shared_outputs(tmp_path, name),
                    prepare=inject(*faults[name]),
                )
            )
            for name in faults
        }
        for name, process in processes.items():
            end = wait_for_end(process, tmp_path / name)
            assert (end.exit_code, end.stderr) == (0, "")
    runs = {record(run)["restarts"]: run for run in run_dirs(tmp_path)}
    assert sorted(runs) == [0, 1]
    assert_continued(runs[1])
    assert record(runs[0])["status"] == "completed"
    assert "resumed from" not in rank_log(runs[0])
    assert reproducible_metrics(runs[0]) == reproducible_metrics(runs[1])


@pytest.mark.full
def test_a_run_in_use_cannot_be_resumed_or_overwritten(tmp_path: Path, uninterrupted: Path) -> None:
    """The error names the process that holds it, and the run goes on undisturbed."""
    run_dir, go = tmp_path / "first" / RUN, tmp_path / "go"
    wait = Fault(partial(wait_until, str(go)), At(0, MIDDLE))
    with background(*TOY, folder=tmp_path / "first", prepare=inject(wait)) as process:
        wait_for(lambda: last_step(tmp_path) == MIDDLE - 1)
        for argument in (f"resume={run_dir}", f"hydra.run.dir={run_dir}"):
            end = run_command(*TOY[:-1], argument, folder=tmp_path / "second")
            assert error_line(end) == (
                f"{run_dir} is in use by process {process.pid} on {os.uname().nodename}; wait for "
                "it to end, or start a new run"
            )
        go.touch()
        assert wait_for_end(process, tmp_path / "first").exit_code == 0
    assert run_dirs(tmp_path) == [run_dir]
    assert_same_run(run_dir, uninterrupted)


@pytest.mark.full
@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("/dev/full", "stdout is lost (No space left on device): what it would have shown is in"),
        (None, "stdout was closed: what it would have shown is in logs/ only"),
    ],
    ids=["full", "closed"],
)
def test_a_run_without_stdout_continues_and_logs_it(
    tmp_path: Path, uninterrupted: Path, to: str | None, words: str
) -> None:
    """Its log has the reason, and all that stdout would have shown."""
    with background(*TOY, folder=tmp_path, prepare=partial(lose_stdout, to)) as process:
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stdout, end.stderr) == (0, "", "")
    log = rank_log(end.run_dir)
    assert log.count(words) == 1
    assert f"steps        {NUM_STEPS} in all" in log
    assert_same_run(end.run_dir, uninterrupted)
