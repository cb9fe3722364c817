"""Watches the jobs of a sweep in Slurm's queue, and notes how each ends. Torch-free."""

import math
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from ddp_runner.errors import UserError, counted
from ddp_runner.host.processes import answering, handled_signals
from ddp_runner.host.streams import print_line
from ddp_runner.job import EXIT_COMPLETED, Outcome, Status
from ddp_runner.launch.launcher import print_error
from ddp_runner.launch.stop_requests import ONE_REQUEST_S
from ddp_runner.sweep.jobs import JobBatch, ended_jobs, failure
from ddp_runner.sweep.slurm.queue import cancel, job_standing, note_end, queued_states
from ddp_runner.tracking.alive import Standing
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
        names: in the queue, of each job that is there or whose end nobody has noted.
        folder: of the sweep.
        signals: that this process receives meanwhile.
    """

    def __init__(
        self, batch: JobBatch, names: Mapping[str, str], *, folder: Path, signals: Signals
    ) -> None:
        self._batch, self._left, self._signals = batch, dict(names), signals
        self._folder, self._num_failed = folder, 0
        self._outcomes = {k: v for k, v in ended_jobs(batch).items() if k not in names}
        self._ended_at: dict[str, float] = {}  # when each job was first seen to have ended
        self._received: int | None = None  # the first signal
        self._received_at = 0.0  # the last one that counts
        self._deadline = math.inf  # for leaving the jobs that are left
        self._is_cancelling = False
        self._is_silent = False  # whether Slurm did not answer

    def run(self) -> dict[str, Outcome]:
        """Wait for the jobs, and note how each ends; return it, last a signal that ended this.

        The first Ctrl-C leaves the jobs alone unless a second one cancels them; what fails
        meanwhile is for the next command to note. Another signal leaves them at once, and so does
        any once they are being cancelled.
        """
        if self._left:
            jobs = counted(len(self._left), "job")
            folder = shlex.quote(str(shown_path(self._folder)))
            _say(f"waits for {jobs}: python -m ddp_runner.status {folder} shows how they are")
        poll_at = 0.0
        while self._left and (now := time.monotonic()) < self._deadline:
            is_leaving = self._received is not None and not self._is_cancelling
            if not is_leaving and now >= poll_at:
                self._poll()
                poll_at = now + poll_interval(time.monotonic() - now)
                continue
            until = self._deadline if is_leaving else min(poll_at, self._deadline)
            with suppress(Empty):
                self._react(self._signals.get(timeout=max(0.0, until - time.monotonic())))
        if self._received is not None:
            self._outcomes["signal"] = Outcome(Status.PREEMPTED, 128 + self._received)
        return self._outcomes

    def _react(self, signum: int) -> None:
        now, jobs = time.monotonic(), counted(len(self._left), "job")
        if self._received is None:
            self._received, self._received_at, self._deadline = signum, now, now
            what = f"{signal.Signals(signum).name}: leaving {jobs} to Slurm"
            if signum == signal.SIGINT and not self._is_cancelling:
                self._deadline = now + SECOND_CHANCE_S
                what += f"; Ctrl-C again within {SECOND_CHANCE_S:.0f} s cancels them (scancel)"
            _say(f"{what}; the same command finds them again")
        elif now <= self._received_at + ONE_REQUEST_S:
            return
        elif signum == signal.SIGINT and not self._is_cancelling:
            self._received_at = now
            self._cancel(f"cancelling {jobs}; Ctrl-C again to leave at once")
        else:
            self._deadline = now

    def _cancel(self, sentence: str) -> None:
        _say(sentence)
        self._is_cancelling, self._deadline = True, time.monotonic() + CANCEL_S
        if (fault := cancel(self._left.values())) is not None:
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
        self._is_silent, before, now = False, self._num_failed, time.monotonic()
        for job_id, name in list(self._left.items()):
            run_dir, state = self._batch.jobs[job_id].run_dir.path, states.get(name)
            found = job_standing(run_dir, name=name, state=state, sweep=self._folder)
            if found.status in (Status.QUEUED, Status.RUNNING):
                self._ended_at.pop(job_id, None)
                continue
            is_recorded = found.record.get("status") == found.status
            if is_recorded or now >= self._ended_at.setdefault(job_id, now) + SETTLE_S:
                self._note(job_id, found)
        has_failed = self._num_failed > before
        is_over = has_failed and self._batch.is_over(self._num_failed)
        if self._left and is_over and not self._is_cancelling:
            self._cancel(f"enough jobs have failed: cancelling {len(self._left)} more")

    def _note(self, job_id: str, found: Standing) -> None:
        del self._left[job_id]
        one = self._batch.jobs[job_id]
        run_dir = one.run_dir.path
        try:
            note_end(run_dir, found)
        except UserError as error:
            print_error(str(error))
        _say(f"{one.job.title}  {found.status}")
        if found.status == Status.COMPLETED:
            self._outcomes[job_id] = Outcome(Status.COMPLETED, EXIT_COMPLETED, run_dir)
        elif found.status != Status.PREEMPTED:
            self._num_failed += 1
            self._outcomes[job_id] = failure(found, run_dir)
            print_error(found.sentence or f"{run_dir.name} has failed")
        elif not self._is_cancelling:
            code = 128 + signal.SIGTERM
            self._outcomes[job_id] = Outcome(Status.PREEMPTED, code, run_dir)


def _say(sentence: str) -> None:
    print_line(sentence, stream=sys.stdout)
