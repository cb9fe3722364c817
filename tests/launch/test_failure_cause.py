"""The first failure of a run is found from the ranks' messages and exit codes."""

import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from configs import resolved

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Failure, Job
from ddp_runner.launch.failure_cause import FailedAttempt
from ddp_runner.launch.rank_process import failure_of
from ddp_runner.parallelism.single import Single
from ddp_runner.rank.session import Session, report_start
from ddp_runner.tracking.run_dir import RunDir

CLOSED = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234. GLHF!")
TIMED_OUT = RuntimeError("[gloo] Timed out waiting 5000ms for recv operation to complete")
TIMED_OUT_BEFORE = RuntimeError("Application timeout caused pair closure")  # in the step's vote
TIMED_OUT_EARLY = dist.DistStoreError("wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1")
LATE = "did not reach the collective in which the others waited for backend.timeout_s (5 s)"
BETWEEN_NS = 10**9


class Group:
    """What the ranks of one attempt have sent."""

    def __init__(self) -> None:
        self.failures: dict[int, Failure] = {}
        self.stacks: dict[int, tuple[int, str]] = {}

    def fail(self, rank: int, error: BaseException) -> None:
        """Let a rank fail."""
        self.failures[rank] = failure_of(error, rank=rank)

    def stand(self, rank: int, *places: str, after_failure_of: int | None = None) -> None:
        """Let a rank send its stack; with `after_failure_of`, long after that rank failed."""
        text = "    call()\n".join(f'  File "{place}", line 7, in forward\n' for place in places)
        if after_failure_of is None:
            self.stacks[rank] = time.time_ns(), text
        else:
            self.stacks[rank] = self.failures[after_failure_of].time_ns + BETWEEN_NS, text

    def blamed(
        self, config: Config, exit_codes: dict[int, int], *, size: int = 3, **more: bool
    ) -> Failure:
        """Return the failure that is reported."""
        attempt = FailedAttempt(config, range(size), exit_codes, self.failures, self.stacks, **more)
        return attempt.first_failure()


@pytest.fixture
def group() -> Group:
    """Return a group whose ranks have sent nothing yet."""
    return Group()


@pytest.fixture(scope="module")
def config() -> Config:
    """Return a resolved config with a known time-out."""
    return resolved("model=toy", "backend.timeout_s=5")[0]


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
    group: Group, config: Config, exit_code: int, sentence: str
) -> None:
    """It does not matter which of the two is noticed first."""
    group.fail(0, CLOSED)
    for exit_codes in ({1: exit_code}, {0: 1, 1: exit_code}):
        failure = group.blamed(config, exit_codes)
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
    group: Group, config: Config, error: BaseException
) -> None:
    """A peer may even fail earlier: it may lose the rank before the rank reports."""
    group.fail(0, CLOSED)
    group.fail(2, error)
    failure = group.blamed(config, {0: 1})
    assert (failure.rank, failure.kind) == (2, "crash")
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    assert failure.sentence == f"rank 2 raised {what}"


@pytest.mark.parametrize("error", [TIMED_OUT, TIMED_OUT_BEFORE, TIMED_OUT_EARLY])
def test_a_rank_that_stood_still_is_late(group: Group, config: Config, error: RuntimeError) -> None:
    """The others timed out or lost the connection; one that fails later came too late."""
    group.fail(0, error)
    group.fail(1, CLOSED)
    group.stand(1, "waits.py", after_failure_of=1)
    group.stand(2, "sleeps.py")
    failure = group.blamed(config, {0: 1})
    assert (failure.rank, failure.kind) == (2, "late")
    assert failure.sentence == f'rank 2 {LATE}; it was at File "sleeps.py", line 7, in forward'


def test_of_two_errors_of_their_own_the_earlier_is_reported(group: Group, config: Config) -> None:
    """It need not be that of the lower rank."""
    group.fail(2, ZeroDivisionError("first"))
    group.fail(0, ZeroDivisionError("second"))
    assert group.blamed(config, {0: 1, 2: 1}).sentence.endswith("first")


def test_what_torch_says_of_a_peer_makes_no_cause_whatever_its_words() -> None:
    """The class of the error decides; the sentence has only its first line."""
    error = dist.DistBackendError("nobody came\nException raised from wait at Socket.cpp:7")
    failure = failure_of(error, rank=1)
    assert (failure.kind, failure.sentence) == (
        "peer",
        "rank 1 raised DistBackendError: nobody came",
    )


def test_of_several_late_ranks_the_lowest_is_reported_with_the_innermost_line(
    group: Group, config: Config
) -> None:
    """It does not matter which of them answered first."""
    group.fail(0, TIMED_OUT)
    for rank in (10, 2, 3):
        group.stand(rank, "outer.py", f"rank_{rank}.py")
    failure = group.blamed(config, {0: 1}, size=11)
    assert (failure.rank, failure.kind) == (2, "late")
    assert failure.sentence.endswith('it was at File "rank_2.py", line 7, in forward')


def test_a_stopped_rank_is_late_without_a_stack(group: Group, config: Config) -> None:
    """A stopped process takes no signal, so it prints nothing."""
    group.fail(0, TIMED_OUT)
    group.fail(2, CLOSED)
    failure = group.blamed(config, {0: 1})
    assert (failure.rank, failure.kind) == (1, "late")
    assert failure.sentence.endswith("no stack could be read: the process may be suspended")


@pytest.mark.parametrize("stands", [True, False])
def test_nccl_aborts_those_that_wait_and_not_the_late_one(
    group: Group, config: Config, stands: bool
) -> None:
    """A SIGABRT without a report is from NCCL's watchdog; rank 2 is late, asleep or stopped."""
    config.backend.name = "nccl"
    try:
        if stands:
            group.stand(0, "waited.py")  # and was aborted after that
            group.stand(2, "sleeps.py")
        failure = group.blamed(config, {0: -signal.SIGABRT, 1: -signal.SIGABRT})
        assert (failure.rank, failure.kind) == (2, "late")
        assert failure.sentence.startswith(f"rank 2 {LATE}")
        # All aborted: nobody is left who could have been late.
        everybody = dict.fromkeys(range(3), -signal.SIGABRT)
        if not stands:
            assert group.blamed(config, everybody).sentence == "rank 0 was killed by SIGABRT"
    finally:
        config.backend.name = "gloo"


def test_a_kill_for_memory_says_what_to_change(group: Group, config: Config) -> None:
    """The kernel has counted a kill, which is a SIGKILL and no other signal."""
    killed, aborted = (
        group.blamed(config, {1: -signum}, out_of_memory=True).sentence
        for signum in (signal.SIGKILL, signal.SIGABRT)
    )
    assert killed == (
        "rank 1 was killed by SIGKILL: likely out of memory, as the kernel reports; use a smaller "
        "batch.per_rank"
    )
    assert aborted == "rank 1 was killed by SIGABRT"


def test_the_fork_server_takes_its_ranks_with_it(group: Group, config: Config) -> None:
    """Their exit codes are then unknown, so rank 0 stands for all."""
    failure = group.blamed(config, {2: 255, 0: 255, 1: 255}, server_is_gone=True)
    assert "the fork server was killed" in failure.sentence
    assert failure.rank == 0


def test_peers_that_complain_alone_are_believed(group: Group, config: Config) -> None:
    """On several machines, the cause may be on another machine."""
    for rank in range(3):
        group.fail(rank, CLOSED)
    failure = group.blamed(config, {0: 1, 1: 1})
    assert (failure.rank, failure.kind) == (0, "peer")


@pytest.mark.parametrize(
    ("steps", "first"),
    [
        ((0, 0, 0, 0), 0),
        ((7, 3, 3, 3), 0),
        ((0, 0, 0, 5, 9, 9, 9), 3),
        ((0, 3, None, 3, 3), 0),  # the ranks of one attempt never began
    ],
)
def test_three_restarts_at_one_step_are_the_last_and_the_first_cause_is_named(
    tmp_path: Path, config: Config, steps: tuple[int | None, ...], first: int
) -> None:
    """A worker group that gets further each time continues, however often it restarts."""
    logged: list[str] = []
    earlier: list[tuple[int | None, str]] = []
    mode = Single("single")

    def start(attempt: int) -> None:
        env = DistEnv(0, 0, 1, 1, restart_count=attempt)
        job = Job(config=config, started_at=0.0, provenance={}, earlier=tuple(earlier))
        devices = (torch.device("cpu"),)
        session = Session(job, env, mode, devices, RunDir(tmp_path), logged.append)
        if (step := steps[attempt]) is not None:
            report_start(session, step=step)

    last = len(steps) - 1
    for attempt in range(last):
        start(attempt)
        earlier.append((steps[attempt], f"cause {attempt}"))
    message = rf"no progress beyond step {steps[-1]}, .* failed because cause {first};"
    with pytest.raises(UserError, match=message):
        start(last)
    allowed = config.launch.max_restarts
    assert logged == [
        f"restart {one} of {allowed}: cause {one - 1}"
        for one in range(1, last + 1)
        if steps[one] is not None
    ]
