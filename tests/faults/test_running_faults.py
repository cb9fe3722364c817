"""The rows about a run that goes on: ranks, launchers and streams that are hit, and the answers."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest
from commands import (
    Started,
    background,
    ended,
    last_step,
    metrics,
    numbers,
    record,
    run_command,
    run_dirs,
    steps,
    wait_for,
)
from injection import (
    At,
    Call,
    Fault,
    exit_with,
    fill_memory,
    hang,
    interrupt,
    join_group,
    kill_tree,
    lose_stdout,
    note,
    prepared,
    raise_error,
    send,
    send_launcher,
    slow,
    system_exit,
    together,
    wait_until,
    write_pid,
)
from trainings import (
    EQUAL,
    NUM_STEPS,
    RUN,
    TOY,
    assert_all_whole,
    assert_resumes,
    assert_same_run,
    assert_went_on,
    error_line,
    place,
    trained,
    wait_for_nobody,
)

from ddp_runner.host.hardware import own_groups
from ddp_runner.launch.signals import ONE_REQUEST_S

MIDDLE = 11  # a step in the midst of the training, and of an epoch
PATIENCE = 6  # how much longer than promised an end may take on a busy machine
KILL, STOP = (partial(send, one) for one in (signal.SIGKILL, signal.SIGSTOP))
KILLED = "was killed by SIGKILL, by another process or by the kernel's out-of-memory killer"
TIMEOUT_S = 5
AT_ONCE_S = 5.0  # from the end of a rank to that of all
LATE = (
    f"did not reach the collective in which the others waited for backend.timeout_s ({TIMEOUT_S} s)"
)

HANGING_SAVE = Fault(hang, Call(5, within=3))
# Fault: what happens, the time within which all ranks are gone, and the sentence.
TIMED: dict[str, tuple[Fault, float, str]] = {
    "raises": (
        Fault(raise_error, At(1, MIDDLE)),
        AT_ONCE_S,
        "rank 1 raised ZeroDivisionError: the step is cursed; see RUN/logs/failure.txt",
    ),
    "ends by os._exit": (
        Fault(partial(exit_with, 7), At(1, MIDDLE)),
        AT_ONCE_S,
        "rank 1 ended with exit code 7, without an exception",
    ),
    "ends by os._exit as if all were well": (
        Fault(partial(exit_with, 0), At(1, MIDDLE)),
        AT_ONCE_S,
        "rank 1 ended with exit code 0 before the run was over",
    ),
    "ends by sys.exit": (
        Fault(partial(system_exit, "enough"), At(1, MIDDLE)),
        AT_ONCE_S,
        "rank 1 raised SystemExit: enough; see RUN/logs/failure.txt",
    ),
    "raises KeyboardInterrupt": (
        Fault(interrupt, At(1, MIDDLE)),
        AT_ONCE_S,
        "rank 1 raised KeyboardInterrupt",
    ),
    "stopped": (
        Fault(STOP, At(1, MIDDLE)),
        TIMEOUT_S + 10.0,
        f"rank 1 {LATE}; no stack could be read: the process may be suspended; see RUN/logs",
    ),
    "hangs": (
        Fault(hang, At(1, MIDDLE)),
        TIMEOUT_S + 10.0,
        f"rank 1 {LATE}; it was at File ",
    ),
    "hangs before its first step": (
        Fault(hang, At(1, 1)),
        TIMEOUT_S + 10.0,
        f"rank 1 {LATE}; it was at File ",
    ),
    "hangs in an evaluation": (
        Fault(hang, At(1, 2, of="evaluation")),
        TIMEOUT_S + 10.0,
        f"rank 1 {LATE}; it was at File ",
    ),
    "stopped in a save": (
        Fault(STOP, Call(5, within=3)),
        TIMEOUT_S + 10.0,
        f"rank 0 {LATE}; no stack could be read: the process may be suspended; see RUN/logs",
    ),
    "hangs in a save": (
        HANGING_SAVE,
        TIMEOUT_S + 13.0,
        f"rank 0 {LATE}; it was at File ",
    ),
}


class Hit:
    """A training that a fault has hit, and when its ranks were gone."""

    def __init__(self, folder: Path, fault: Fault) -> None:
        self.folder, self._fault = folder, fault
        self.seconds = 0.0

    def started(self) -> "Iterator[Started]":
        """Return a block in which the training runs."""
        # Ten times as long is one that hangs let write.
        shutdown = ["launch.shutdown_timeout_s=0.3"] if self._fault == HANGING_SAVE else []
        told = [Fault(partial(write_pid, f"rank-{rank}"), At(rank, 1)) for rank in (0, 1)]
        mark = Fault(partial(note, "hit"), self._fault.where)
        return background(
            *TOY,
            f"backend.timeout_s={TIMEOUT_S}",
            *shutdown,
            folder=self.folder,
            prepare=prepared(*told, mark, self._fault),
        )

    def is_over(self) -> bool:
        """Return whether all ranks are gone; take the time once they are."""
        if self.seconds == 0 and (self.folder / "hit").exists():
            paths = [self.folder / f"rank-{rank}" for rank in (0, 1)]
            pids = [int(path.read_text()) for path in paths if path.exists()]
            if not any(map(psutil.pid_exists, pids)):
                self.seconds = time.time() - (self.folder / "hit").stat().st_mtime
        return self.seconds > 0


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Hit]]:
    """All trainings of TIMED, side by side, since they wait most of their time."""
    base = tmp_path_factory.mktemp("timed")
    hits = {name: Hit(base / name.replace(" ", "-"), row[0]) for name, row in TIMED.items()}
    with ExitStack() as stack:
        processes = [stack.enter_context(hit.started()) for hit in hits.values()]
        longest = max(limit_s for _, limit_s, _ in TIMED.values())
        wait_for(
            lambda: not [hit for hit in hits.values() if not hit.is_over()],
            timeout_s=PATIENCE * longest,
        )
        for process, hit in zip(processes, hits.values(), strict=True):
            ended(process, hit.folder)
            wait_for_nobody(process)
    return hits


@pytest.mark.parametrize("name", TIMED)
def test_a_rank_that_raises_ends_or_is_late_is_named_in_time(
    timed: dict[str, Hit], name: str
) -> None:
    """All ranks are gone by then, those that are stopped too, and what was saved is whole."""
    hit, (fault, limit_s, sentence) = timed[name], TIMED[name]
    print(f"{name}: all ranks were gone after {hit.seconds:.1f} s; promised are {limit_s:g} s")
    assert hit.seconds < PATIENCE * limit_s
    run_dir = hit.folder / RUN
    first, *rest = (hit.folder / "stderr").read_text().strip().splitlines()
    assert first.startswith("error: " + sentence.replace("RUN", str(run_dir)))
    assert first.endswith(", then go on with resume=RUN")
    fields = record(run_dir)
    assert fields["status"] == "failed"
    kind = "crash" if limit_s == AT_ONCE_S else "late"
    assert (fields["error"]["rank"], fields["error"]["kind"]) == (int(sentence[5]), kind)
    failure = run_dir / "logs" / "failure.txt"
    assert failure.exists() == (fault.what is not STOP and "ended with" not in sentence)
    if failure.exists():
        assert str(failure) in first
        assert [line for line in failure.read_text().splitlines() if line] == rest
    if fault.where != At(1, 1):
        assert_all_whole(hit.folder)


# What is hit, the exit code of the launcher, and what run.json says of it.
KILLED_AT_ONCE: dict[str, tuple[tuple[Fault, ...], int, str]] = {
    "a rank": ((Fault(KILL, At(1, MIDDLE)),), 1, "failed"),
    "the launcher": (
        (Fault(partial(send_launcher, signal.SIGKILL), At(0, MIDDLE)),),
        -signal.SIGKILL,
        "running",  # nobody is left who could say otherwise
    ),
    "the launcher beside a stopped rank": (
        (
            Fault(STOP, At(1, MIDDLE)),
            Fault(partial(slow, 0.3), At(0, MIDDLE)),
            Fault(partial(send_launcher, signal.SIGKILL), At(0, MIDDLE)),
        ),
        -signal.SIGKILL,
        "running",
    ),
    "the whole tree": ((Fault(kill_tree, At(0, MIDDLE)),), -signal.SIGKILL, "running"),
}


@pytest.mark.parametrize("name", KILLED_AT_ONCE)
def test_a_run_of_which_something_was_killed_resumes(
    tmp_path: Path, undisturbed: Path, name: str
) -> None:
    """SIGKILL: no process survives, each checkpoint is whole, and the end is the undisturbed."""
    faults, exit_code, status = KILLED_AT_ONCE[name]
    end = trained(tmp_path, *faults)
    assert end.exit_code == exit_code
    assert record(tmp_path / RUN)["status"] == status
    if exit_code == 1:
        where = f"see {end.run_dir / 'logs'}, then go on with resume=RUN"
        assert error_line(end) == f"rank 1 {KILLED}; {where}"
        assert record(end.run_dir)["error"]["sentence"] == f"rank 1 {KILLED}"
    else:
        assert end.stderr == ""
    assert_all_whole(tmp_path)
    assert_resumes(tmp_path, undisturbed)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group with little memory, where this process may make one."""
    for parent in own_groups("memory"):
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
    pytest.skip("only a memory limit makes the kernel kill for memory, and none may be set here")


def remove_group(group: Path) -> None:
    """Remove a control group once it is empty."""
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_rank_that_the_kernel_killed_for_memory_is_named(
    tmp_path: Path, memory_group: Path
) -> None:
    """The kernel's own counter tells it from any other SIGKILL."""
    fault = Fault(fill_memory, At(1, MIDDLE))
    prepare = partial(together, partial(join_group, str(memory_group)), prepared(fault))
    with background(*TOY, folder=tmp_path, prepare=prepare) as process:
        end = ended(process, tmp_path)
        wait_for_nobody(process)
    assert end.exit_code == 1
    assert error_line(end).startswith(
        "rank 1 was killed by SIGKILL: likely out of memory, as the kernel reports; use a smaller "
        "batch.per_rank; see "
    )
    assert_all_whole(tmp_path)


def stop_asked(signum: int, where: At | Call) -> tuple[Fault, ...]:
    """Return faults that send the launcher a signal, and go on once it has asked for a stop."""
    said = partial(wait_until, "stdout", "again to end at once")
    return Fault(partial(send_launcher, signum), where), Fault(said, where)


@pytest.mark.parametrize("name", ["SIGQUIT", "SIGUSR2"])
def test_a_run_that_a_signal_stopped_resumes(tmp_path: Path, undisturbed: Path, name: str) -> None:
    """A checkpoint of its last step, 128 + the number, and no step is lost or taken twice."""
    signum = signal.Signals[name]
    end = trained(tmp_path, *stop_asked(signum, At(0, MIDDLE)))
    assert (end.exit_code, end.stderr) == (128 + signum, "")
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]) == ("preempted", None)
    assert MIDDLE <= steps(end.run_dir)[-1] == fields["step"] < NUM_STEPS
    assert_resumes(tmp_path, undisturbed, same_steps=False)


def test_a_second_sigterm_ends_at_once(tmp_path: Path, undisturbed: Path) -> None:
    """The first waits for a step that a stopped rank never ends; the second waits for nothing."""
    faults = (Fault(STOP, At(1, MIDDLE)), *stop_asked(signal.SIGTERM, At(0, MIDDLE)))
    with background(
        *TOY, "launch.shutdown_timeout_s=3600", folder=tmp_path, prepare=prepared(*faults)
    ) as process:
        wait_for(lambda: "again to end at once" in (tmp_path / "stdout").read_text())
        time.sleep(2 * ONE_REQUEST_S)  # what comes at once is the same request
        assert process.poll() is None
        process.terminate()
        end = ended(process, tmp_path)
        wait_for_nobody(process)
    assert (end.exit_code, end.stderr) == (143, "")
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]["sentence"]) == (
        "preempted",
        "ended without a checkpoint",
    )
    assert_all_whole(tmp_path)
    assert_resumes(tmp_path, undisturbed)


@pytest.mark.parametrize("step", [NUM_STEPS, NUM_STEPS - 1])
def test_a_stop_in_the_very_last_step_loses_no_evaluation(
    tmp_path: Path, undisturbed: Path, step: int
) -> None:
    """Evaluated and completed, at once or by the resume; never left as good as done."""
    end = trained(tmp_path, *stop_asked(signal.SIGTERM, At(0, step)))
    assert end.stderr == ""
    if step < NUM_STEPS and end.exit_code == 143:
        assert record(end.run_dir)["status"] == "preempted"
        assert run_command(f"resume={RUN}", folder=tmp_path).exit_code == 0
    else:
        assert end.exit_code == 0
    assert_same_run(end.run_dir, undisturbed, same_steps=False)
    assert any("eval/loss" in line and line["step"] == NUM_STEPS for line in metrics(end.run_dir))


FREEZE = partial(Call, rank=None, half=True, during="freeze")


def test_a_launcher_killed_while_it_freezes_a_resumed_run_leaves_one_that_resumes(
    tmp_path: Path, undisturbed: Path
) -> None:
    """The same run again and again: amid a write, before a file is put in place."""
    trained(tmp_path, Fault(kill_tree, At(0, MIDDLE)))
    # Three files, each opened, written, synced and put in place, after their folder is made.
    for number in (1, 3, 5, 9, 11, 13):
        prepare = prepared(Fault(kill_tree, FREEZE(number)))
        with background(f"resume={RUN}", folder=tmp_path, prepare=prepare) as process:
            assert ended(process, tmp_path).exit_code == -signal.SIGKILL
            wait_for_nobody(process)
    assert_all_whole(tmp_path)
    assert_resumes(tmp_path, undisturbed)


@pytest.mark.parametrize("number", [7, 11])
def test_a_launcher_killed_while_it_freezes_a_new_run_leaves_none(
    tmp_path: Path, undisturbed: Path, number: int
) -> None:
    """There is nothing to resume yet, which is said; the same command may begin it again."""
    assert trained(tmp_path, Fault(kill_tree, FREEZE(number))).exit_code == -signal.SIGKILL
    end = run_command(f"resume={RUN}", folder=tmp_path)
    assert end.exit_code == 2
    assert error_line(end) == (
        f"resume={RUN} is not a run folder: {RUN}/.hydra/config.yaml does not exist; name the "
        "folder that holds run.json"
    )
    assert trained(tmp_path).exit_code == 0
    assert_same_run(tmp_path / RUN, undisturbed)


def test_two_equal_commands_at_once_of_which_one_is_restarted(tmp_path: Path) -> None:
    """Our own launchers: each keeps its folder, and the restart goes on in its own."""
    again = str(tmp_path / "again")
    faults = {
        "killed": (Fault(KILL, At(1, 60)), Fault(partial(note, again), At(0, 1, attempt=1))),
        "other": (Fault(partial(wait_until, again), At(0, 60)),),
    }
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                background(
                    *EQUAL,
                    "launch.max_restarts=1",
                    folder=place(tmp_path, name),
                    prepare=prepared(*faults[name]),
                )
            )
            for name in faults
        }
        for name, process in processes.items():
            end = ended(process, tmp_path / name)
            assert (end.exit_code, end.stderr) == (0, "")
    runs = {record(run)["restarts"]: run for run in run_dirs(tmp_path)}
    assert sorted(runs) == [0, 1]
    assert_went_on(runs[1])
    assert record(runs[0])["status"] == "completed"
    assert "resumed from" not in (runs[0] / "logs" / "rank-0.log").read_text()
    assert numbers(runs[0]) == numbers(runs[1])


def test_a_run_in_use_is_nobody_elses(tmp_path: Path, undisturbed: Path) -> None:
    """Whoever asks is told who holds it, and the run itself is not disturbed."""
    run_dir, go = tmp_path / "first" / RUN, tmp_path / "go"
    wait = Fault(partial(wait_until, str(go)), At(0, MIDDLE))
    with background(*TOY, folder=tmp_path / "first", prepare=prepared(wait)) as process:
        wait_for(lambda: last_step(tmp_path) == MIDDLE - 1)
        for argument in (f"resume={run_dir}", f"hydra.run.dir={run_dir}"):
            end = run_command(*TOY[:-1], argument, folder=tmp_path / "second")
            assert end.exit_code == 2
            assert error_line(end) == (
                f"{run_dir} is in use by process {process.pid} on {os.uname().nodename}; wait for "
                "it to end, or start a new run"
            )
        go.touch()
        assert ended(process, tmp_path / "first").exit_code == 0
    assert run_dirs(tmp_path) == [run_dir]
    assert_same_run(run_dir, undisturbed)


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("/dev/full", "stdout is lost (No space left on device): what it would have shown is in"),
        (None, "stdout was closed: what it would have shown is in logs/ only"),
    ],
    ids=["full", "closed"],
)
def test_a_run_without_stdout_goes_on_and_says_so(
    tmp_path: Path, undisturbed: Path, to: str | None, words: str
) -> None:
    """In its log, where all that it would have shown is as well."""
    with background(*TOY, folder=tmp_path, prepare=partial(lose_stdout, to)) as process:
        end = ended(process, tmp_path)
    assert (end.exit_code, end.stdout, end.stderr) == (0, "", "")
    log = (end.run_dir / "logs" / "rank-0.log").read_text()
    assert log.count(words) == 1
    assert f"steps        {NUM_STEPS} in all" in log
    assert_same_run(end.run_dir, undisturbed)
