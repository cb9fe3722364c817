"""Who failed first, from hand-made files and exit codes, as ranks leave them."""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from configs import resolved

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.launch.blame import Ends, first_failure
from ddp_runner.parallelism.single import Single
from ddp_runner.rank.session import Session, note_restart
from ddp_runner.scratch import Failure, Scratch
from ddp_runner.tracking.run_dir import RunDir

CLOSED = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234. GLHF!")
TIMED_OUT = RuntimeError("[gloo] Timed out waiting 5000ms for recv operation to complete")
TIMED_OUT_BEFORE = RuntimeError("Application timeout caused pair closure")  # in the step's vote
TIMED_OUT_EARLY = dist.DistStoreError("wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1")
LATE = "did not reach the collective in which the others waited for backend.timeout_s (5 s)"
BETWEEN_S = 10**9  # ns


@pytest.fixture(scope="module")
def config() -> Config:
    """A resolved config with a known time-out."""
    return resolved("model=toy", "backend.timeout_s=5")[0]


def fail(scratch: Path, rank: int, error: BaseException) -> None:
    """Let a rank write down its failure."""
    Scratch(scratch).record_failure(error, rank=rank, attempt=0)


def stand(scratch: Path, rank: int, where: str, *, after_failure_of: int | None = None) -> None:
    """Let a rank say where it stands; long after another's failure where that is given."""
    path = scratch / f"stack-0-{rank}.txt"
    path.write_text(f'  File "{where}", line 7, in forward\n')
    if after_failure_of is not None:
        at = (scratch / f"failure-0-{after_failure_of}.json").stat().st_mtime_ns + BETWEEN_S
        os.utime(path, ns=(at, at))


def blamed(scratch: Path, config: Config, exit_codes: dict[int, int], **more: bool) -> Failure:
    """Return who is blamed in a group of three."""
    ends = Ends(ranks=range(3), exit_codes=exit_codes, **more)
    return first_failure(ends, Scratch(scratch), config, attempt=0)


@pytest.mark.parametrize(
    ("exit_code", "sentence"),
    [
        (7, "rank 1 ended with exit code 7, without an exception: by os._exit, or by a library"),
        (0, "rank 1 ended with exit code 0 before the run was over, without an exception"),
        (-signal.SIGKILL, "rank 1 was killed by SIGKILL, by another process or by the kernel"),
        (-signal.SIGABRT, "rank 1 was killed by SIGABRT"),
        (-40, "rank 1 was killed by signal 40"),
    ],
)
def test_a_rank_that_died_without_a_word_comes_before_its_peers_complaints(
    tmp_path: Path, config: Config, exit_code: int, sentence: str
) -> None:
    """Whichever of the two is noticed first."""
    fail(tmp_path, 0, CLOSED)
    for exit_codes in ({1: exit_code}, {0: 1, 1: exit_code}):
        failure = blamed(tmp_path, config, exit_codes)
        assert failure.rank == 1
        assert failure.sentence.startswith(sentence)


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        ZeroDivisionError("x"),
        ValueError(str(CLOSED)),  # words alone make no lost peer
    ],
)
def test_an_error_of_its_own_comes_before_the_loss_of_a_peer(
    tmp_path: Path, config: Config, error: BaseException
) -> None:
    """Also where the peers failed earlier, since what they lost is reported later."""
    fail(tmp_path, 0, CLOSED)
    fail(tmp_path, 2, error)
    failure = blamed(tmp_path, config, {0: 1})
    assert (failure.rank, failure.kind) == (2, "crash")
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    assert failure.sentence == f"rank 2 raised {what}"


@pytest.mark.parametrize("error", [TIMED_OUT, TIMED_OUT_BEFORE, TIMED_OUT_EARLY])
def test_a_rank_that_stood_still_is_late(
    tmp_path: Path, config: Config, error: RuntimeError
) -> None:
    """The others timed out or lost the connection; one that fails later came too late."""
    fail(tmp_path, 0, error)
    fail(tmp_path, 1, CLOSED)
    stand(tmp_path, 1, "waits.py", after_failure_of=1)
    stand(tmp_path, 2, "sleeps.py")
    failure = blamed(tmp_path, config, {0: 1})
    assert (failure.rank, failure.kind) == (2, "late")
    assert failure.sentence == f'rank 2 {LATE}; it was at File "sleeps.py", line 7, in forward'


def test_of_two_errors_of_their_own_the_earlier_is_reported(tmp_path: Path, config: Config) -> None:
    """Not that of the lower rank."""
    fail(tmp_path, 2, ZeroDivisionError("first"))
    fail(tmp_path, 0, ZeroDivisionError("second"))
    assert blamed(tmp_path, config, {0: 1, 2: 1}).sentence.endswith("first")


def test_what_an_earlier_attempt_failed_of_is_not_reported_again(
    tmp_path: Path, config: Config
) -> None:
    """Its files lie beside those of this one, and are older."""
    fail(tmp_path, 1, ZeroDivisionError("of attempt 0"))
    Scratch(tmp_path).record_failure(ZeroDivisionError("of attempt 1"), rank=2, attempt=1)
    ends = Ends(ranks=range(3), exit_codes={2: 1})
    failure = first_failure(ends, Scratch(tmp_path), config, attempt=1)
    assert failure.sentence == "rank 2 raised ZeroDivisionError: of attempt 1"


def test_what_torch_says_of_a_peer_makes_no_cause_whatever_its_words(tmp_path: Path) -> None:
    """By the class of the error; the sentence holds its first line alone."""
    error = dist.DistBackendError("nobody came\nException raised from wait at Socket.cpp:7")
    failure = Scratch(tmp_path).record_failure(error, rank=1, attempt=0)
    assert (failure.kind, failure.sentence) == (
        "peer",
        "rank 1 raised DistBackendError: nobody came",
    )


def test_a_rank_ends_whether_or_not_its_scratch_folder_is_there(tmp_path: Path) -> None:
    """A cleaner of temporary files may take it: it is made anew, and where it cannot be, not."""
    Scratch(tmp_path / "gone").record_failure(ZeroDivisionError(), rank=1, attempt=0)
    assert (tmp_path / "gone" / "failure-0-1.json").exists()
    (tmp_path / "file").touch()
    failure = Scratch(tmp_path / "file").record_failure(ZeroDivisionError(), rank=1, attempt=0)
    assert failure.sentence == "rank 1 raised ZeroDivisionError"
    Scratch(tmp_path / "file").record_stack(rank=1, attempt=0)


def test_of_several_late_ranks_the_lowest_is_reported_with_the_innermost_line(
    tmp_path: Path, config: Config
) -> None:
    """By its number, not by the name of its file."""
    fail(tmp_path, 0, TIMED_OUT)
    for rank in (10, 2, 3):
        stand(tmp_path, rank, f"rank_{rank}.py")
    path = tmp_path / "stack-0-2.txt"
    path.write_text('  File "outer.py", line 1, in run\n    call()\n' + path.read_text())
    failure = first_failure(
        Ends(ranks=range(11), exit_codes={0: 1}), Scratch(tmp_path), config, attempt=0
    )
    assert (failure.rank, failure.kind) == (2, "late")
    assert failure.sentence.endswith('it was at File "rank_2.py", line 7, in forward')


def test_a_stopped_rank_is_late_without_a_stack(tmp_path: Path, config: Config) -> None:
    """It could take no signal, and so printed nothing at all."""
    fail(tmp_path, 0, TIMED_OUT)
    fail(tmp_path, 2, CLOSED)
    failure = blamed(tmp_path, config, {0: 1})
    assert (failure.rank, failure.kind) == (1, "late")
    assert failure.sentence.endswith("no stack could be read: the process may be suspended")


@pytest.mark.parametrize("stands", [True, False])
def test_nccl_aborts_those_that_wait_and_not_the_late_one(
    tmp_path: Path, config: Config, stands: bool
) -> None:
    """SIGABRT without a word is its watchdog's; rank 2 is late, asleep or stopped."""
    config.backend.name = "nccl"
    try:
        if stands:
            stand(tmp_path, 0, "waited.py")  # and was aborted after that
            stand(tmp_path, 2, "sleeps.py")
        failure = blamed(tmp_path, config, {0: -signal.SIGABRT, 1: -signal.SIGABRT})
        assert (failure.rank, failure.kind) == (2, "late")
        assert failure.sentence.startswith(f"rank 2 {LATE}")
        # All aborted: nobody is left who could have been late.
        everybody = dict.fromkeys(range(3), -signal.SIGABRT)
        if not stands:
            assert blamed(tmp_path, config, everybody).sentence == "rank 0 was killed by SIGABRT"
    finally:
        config.backend.name = "gloo"


def test_a_kill_for_memory_says_what_to_change(tmp_path: Path, config: Config) -> None:
    """Where the kernel has counted one meanwhile; another signal is not of its making."""
    killed, aborted = (
        blamed(tmp_path, config, {1: -signum}, out_of_memory=True).sentence
        for signum in (signal.SIGKILL, signal.SIGABRT)
    )
    assert killed == (
        "rank 1 was killed by SIGKILL: likely out of memory, as the kernel reports; use a smaller "
        "batch.per_rank"
    )
    assert aborted == "rank 1 was killed by SIGABRT"


def test_the_fork_server_takes_its_ranks_with_it(tmp_path: Path, config: Config) -> None:
    """Their exit codes are unknown then, and no rank is to blame."""
    failure = blamed(tmp_path, config, {0: 255, 1: 255, 2: 255}, server_is_gone=True)
    assert "the process that the ranks are forked from was killed" in failure.sentence


def test_peers_that_complain_alone_are_believed(tmp_path: Path, config: Config) -> None:
    """Of several machines the cause may be on another one."""
    for rank in range(3):
        fail(tmp_path, rank, CLOSED)
    failure = blamed(tmp_path, config, {0: 1, 1: 1})
    assert (failure.rank, failure.kind) == (0, "peer")


@pytest.mark.parametrize(
    ("steps", "first"), [((0, 0, 0, 0), 0), ((7, 3, 3, 3), 0), ((0, 0, 0, 5, 9, 9, 9), 3)]
)
def test_three_restarts_at_one_step_are_the_last_and_the_first_cause_is_named(
    tmp_path: Path, config: Config, steps: tuple[int, ...], first: int
) -> None:
    """A worker group that gets further each time goes on, however often it is restarted."""
    logged: list[str] = []
    job = Job(config=config, started_at=0.0, code={}, scratch=Scratch(tmp_path))
    mode = Single("single")

    def start(attempt: int) -> None:
        env = DistEnv(0, 0, 1, 1, restart_count=attempt)
        session = Session(job, env, mode, (), RunDir(tmp_path), logged.append)
        note_restart(session, step=steps[attempt])

    last = len(steps) - 1
    for attempt in range(last):
        start(attempt)
        failure = Failure(rank=0, kind="crash", sentence=f"cause {attempt}")
        Scratch(tmp_path).record_cause(failure, attempt=attempt)
    message = rf"no progress beyond step {steps[-1]}, .* of them: cause {first};"
    with pytest.raises(UserError, match=message):
        start(last)
    allowed = config.launch.max_restarts
    assert logged == [f"restart {one} of {allowed}: cause {one - 1}" for one in range(1, last + 1)]
