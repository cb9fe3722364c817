"""Watches the jobs of a sweep in Slurm's queue, and notes how each ends. Torch-free.

Slurm's accounting is not needed: squeue says whether a job is there, and its run.json how it ended.
"""

import math
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from ddp_runner.errors import UserError, counted
from ddp_runner.host.processes import answering, handled_signals
from ddp_runner.host.streams import print_line
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, EXIT_USER_ERROR, Failure, Outcome, Status
from ddp_runner.launch.launcher import print_error
from ddp_runner.launch.stop_requests import ONE_REQUEST_S
from ddp_runner.sweep.jobs import Batch, ended
from ddp_runner.sweep.slurm.commands import cancel, queued_states
from ddp_runner.sweep.slurm.jobs import JobState, job_state, note_end
from ddp_runner.tracking.start_block import shown_path

POLL_S, MOST_POLL_S = 5.0, 60.0  # from one look at the queue and the jobs to the next
POLL_SHARE = 0.1  # of the time that looking may take, on a slow cluster or with thousands of jobs
SETTLE_S = 15.0  # from the end of a job to the last change of its run.json, on a slow file system
SECOND_CHANCE_S = 5.0  # from the first Ctrl-C to leaving the jobs alone
CANCEL_S = 120.0  # from scancel to leaving the jobs that have not ended
Signals = SimpleQueue[int]


def poll_interval(took_s: float) -> float:
    """Return the seconds from one look at all jobs to the next, by how long the look took."""
    return max(POLL_S, min(took_s / POLL_SHARE, MOST_POLL_S))


@contextmanager
def kept_signals() -> Iterator[Signals]:
    """Give a queue that the stop signals are put into, in place of what they did before."""
    signals = Signals()
    with answering(handled_signals(), lambda signum, _: signals.put(signum)):
        yield signals


class Watch:
    """Watches the jobs of one batch.

    Args:
        batch: all its jobs.
        numbers: of Slurm, for each job that is in its queue or has left it unnoticed.
        signals: that this process receives meanwhile.
    """

    def __init__(self, batch: Batch, numbers: Mapping[str, str], signals: Signals) -> None:
        self._batch, self._numbers, self._signals = batch, dict(numbers), signals
        self._folder = next(iter(batch.jobs.values())).sweep.absolute()
        self._num_failed = 0
        found = {one: ended(batch, job) for one, job in batch.jobs.items() if one not in numbers}
        self._outcomes = {one: outcome for one, outcome in found.items() if outcome is not None}
        self._ended_at: dict[str, float] = {}
        self._received: int | None = None  # the first signal
        self._received_at = 0.0  # the last one that counts, by time.monotonic()
        self._deadline: float | None = None  # for leaving the jobs that are left
        self._is_cancelling = False
        self._is_silent = False  # whether Slurm did not answer

    def run(self) -> dict[str, Outcome]:
        """Wait for the jobs, and note how each ends; return it, last a signal that ended this.

        The first Ctrl-C leaves the jobs alone unless a second one cancels them; what fails
        meanwhile is for the next command to note. Another signal leaves them at once, and so does
        any once they are being cancelled.
        """
        poll_at, folder = -math.inf, shlex.quote(str(shown_path(self._folder)))
        if self._numbers:
            jobs = counted(len(self._numbers), "job")
            self._say(f"waits for {jobs}: python -m ddp_runner.status {folder} shows how they are")
        while self._numbers and not self._is_over():
            is_leaving = self._received is not None and not self._is_cancelling
            if not is_leaving and (began_at := time.monotonic()) >= poll_at:
                self._poll()
                poll_at = began_at + poll_interval(time.monotonic() - began_at)
                continue
            until = min(math.inf if is_leaving else poll_at, self._deadline or math.inf)
            with suppress(Empty):
                self._react(self._signals.get(timeout=max(0.0, until - time.monotonic())))
        if self._received is not None:
            self._outcomes["signal"] = Outcome(Status.PREEMPTED, 128 + self._received)
        return self._outcomes

    def _is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _react(self, signum: int) -> None:
        now = time.monotonic()
        jobs = counted(len(self._numbers), "job")
        go_on = f"{jobs} {'goes' if len(self._numbers) == 1 else 'go'} on"
        if self._is_cancelling:
            go_on = f"{jobs} cancelled"
        if self._received is None:
            self._received, self._received_at = signum, now
            word = signal.Signals(signum).name
            if signum == signal.SIGINT and not self._is_cancelling:
                self._say(
                    f"{word}: {go_on}; Ctrl-C again within {SECOND_CHANCE_S:.0f} s "
                    "cancels them (scancel); started again, the same command finds its jobs"
                )
                self._deadline = now + SECOND_CHANCE_S
            else:
                self._say(f"{word}: {go_on}; the same command finds its jobs")
                self._deadline = now
        elif now > self._received_at + ONE_REQUEST_S:
            if self._is_cancelling or signum != signal.SIGINT:
                self._deadline = now
            else:
                self._cancel(f"cancelling {jobs}; Ctrl-C again to leave at once")
                self._received_at = now

    def _cancel(self, sentence: str) -> None:
        self._say(sentence)
        self._is_cancelling, self._deadline = True, time.monotonic() + CANCEL_S
        if (fault := cancel(self._numbers.values())) is not None:
            print_error(fault)

    def _poll(self) -> None:
        """Ask Slurm, and note what has changed."""
        try:
            states = queued_states()
        except UserError as error:
            if not self._is_silent:
                print_error(f"{error}; its jobs go on, and this command keeps asking")
            self._is_silent = True
            return
        self._is_silent, before = False, self._num_failed
        for job_id, number in list(self._numbers.items()):
            run_dir, state = self._batch.jobs[job_id].run_dir.path, states.get(number)
            found = job_state(run_dir, number=number, state=state, folder=self._folder)
            ended_at = self._ended_at.setdefault(job_id, time.monotonic())
            if found.status in (Status.QUEUED, Status.RUNNING):
                del self._ended_at[job_id]
            elif found.is_final or time.monotonic() >= ended_at + SETTLE_S:
                self._note(job_id, found)
        is_left = bool(self._numbers) and not self._is_cancelling
        has_failed = self._num_failed > before
        if is_left and has_failed and self._batch.is_over(self._num_failed):
            self._cancel(f"enough jobs have failed: cancelling {len(self._numbers)} more")

    def _note(self, job_id: str, found: JobState) -> None:
        del self._numbers[job_id]
        one = self._batch.jobs[job_id]
        try:
            note_end(one.run_dir.path, found)
        except UserError as error:
            print_error(str(error))
        self._say(f"{one.job.title}  {found.status}")
        code = EXIT_COMPLETED
        if found.status == Status.FAILED:
            self._num_failed += 1
            code = EXIT_USER_ERROR if found.kind == "user" else EXIT_FAILED
            if found.sentence:
                print_error(found.sentence)
        elif found.status == Status.PREEMPTED:
            code = 128 + signal.SIGTERM
        if found.status == Status.PREEMPTED and self._is_cancelling:
            return
        failure = None
        if found.kind is not None:
            failure = Failure(rank=0, kind=found.kind, sentence=found.sentence or "")
        self._outcomes[job_id] = Outcome(found.status, code, one.run_dir.path, failure)

    def _say(self, sentence: str) -> None:
        print_line(sentence, stream=sys.stdout)
