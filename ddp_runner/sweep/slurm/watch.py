"""Watches the jobs of a sweep in Slurm's queue, and notes their ends. Torch-free."""

import math
import shlex
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from ddp_runner.errors import UserError, counted
from ddp_runner.host.streams import print_line
from ddp_runner.job import COMPLETED, Outcome, Status
from ddp_runner.launch.launcher import print_error
from ddp_runner.launch.stop_requests import ONE_REQUEST_S
from ddp_runner.sweep.jobs import JobBatch, failed_outcome
from ddp_runner.sweep.slurm.queue import cancel, job_standing, note_end, queued_states
from ddp_runner.tracking.alive import DAMAGED, Standing
from ddp_runner.tracking.start_block import shown_path

MIN_POLL_S, MAX_POLL_S = 5.0, 60.0  # time from one poll of the queue and the jobs to the next
POLL_SHARE = 0.1  # limit on the share of time spent in polls: a cluster may be slow
SETTLE_S = 15.0  # time from a job's end until its run.json is visible here, on a slow file system
SECOND_CHANCE_S = 5.0  # time for a second Ctrl-C, which cancels the jobs
CANCEL_S = 120.0  # time that cancelled jobs have to end before the command leaves them
Signals = SimpleQueue[int]


def poll_interval(took_s: float) -> float:
    """Return the seconds from one poll to the next, by the duration of a poll."""
    return max(MIN_POLL_S, min(took_s / POLL_SHARE, MAX_POLL_S))


class Watch:
    """Watches a batch; `names` has the name in Slurm of each job whose end is not noted, by id."""

    def __init__(
        self, batch: JobBatch, names: Mapping[str, str], *, folder: Path, signals: Signals
    ) -> None:
        self._batch, self._waiting, self._signals = batch, dict(names), signals
        self._folder, self._num_failed = folder, 0
        self._outcomes = {k: v for k, v in batch.outcomes().items() if k not in names}
        self._ended_at: dict[str, float] = {}  # time at which each job was first seen ended
        self._received: int | None = None  # the first signal
        self._received_at = 0.0  # time of the last signal that was answered
        self._deadline = math.inf  # time at which this command leaves the waiting jobs
        self._is_cancelling = False
        self._is_unanswered = False  # Slurm did not answer the last poll

    def run(self) -> dict[str, Outcome]:
        """Wait for the jobs; return their outcomes, then that of a signal that ended the wait.

        The first Ctrl-C leaves the jobs running, unless a second cancels them. The next command
        notes what fails between the two. Any other signal leaves the jobs at once, and so does
        Ctrl-C while they are being cancelled.
        """
        if self._waiting:
            jobs = counted(len(self._waiting), "job")
            folder = shlex.quote(str(shown_path(self._folder)))
            print_line(f"waiting for {jobs}; see them with  python -m ddp_runner.status {folder}")
        poll_at = 0.0
        while self._waiting and (now := time.monotonic()) < self._deadline:
            is_leaving = self._received is not None and not self._is_cancelling
            if not is_leaving and now >= poll_at:
                self._poll()
                poll_at = now + poll_interval(time.monotonic() - now)
                continue
            until = self._deadline if is_leaving else min(poll_at, self._deadline)
            with suppress(Empty):
                self._answer(self._signals.get(timeout=max(0.0, until - time.monotonic())))
        if self._received is not None:
            self._outcomes["signal"] = Outcome.stopped(self._received)
        return self._outcomes

    def _answer(self, signum: int) -> None:
        now, jobs = time.monotonic(), counted(len(self._waiting), "job")
        if self._received is None:
            self._received, self._received_at, self._deadline = signum, now, now
            line = f"{signal.Signals(signum).name}: leaving {jobs} to Slurm"
            if signum == signal.SIGINT and not self._is_cancelling:
                self._deadline = now + SECOND_CHANCE_S
                line += f"; Ctrl-C again within {SECOND_CHANCE_S:.0f} s cancels them (scancel)"
            print_line(f"{line}; the same command finds them again")
        elif now <= self._received_at + ONE_REQUEST_S:
            return
        elif signum == signal.SIGINT and not self._is_cancelling:
            self._received_at = now
            self._cancel(f"cancelling {jobs}; Ctrl-C again to leave at once")
        else:
            self._deadline = now

    def _cancel(self, line: str) -> None:
        print_line(line)
        self._is_cancelling, self._deadline = True, time.monotonic() + CANCEL_S
        cancel(self._waiting.values())

    def _poll(self) -> None:
        """Ask Slurm for the states, and note the ends of jobs."""
        try:
            states = queued_states()
        except UserError as error:  # a restart of the controller takes minutes
            if not self._is_unanswered:
                print_error(f"{error}; its jobs continue, and this command keeps asking")
            self._is_unanswered = True
            return
        self._is_unanswered, before, now = False, self._num_failed, time.monotonic()
        for job_id, name in list(self._waiting.items()):
            run_dir, state = self._batch.jobs[job_id].run_dir.path, states.get(name)
            current = job_standing(run_dir, name=name, state=state, sweep=self._folder)
            if current.status in (Status.QUEUED, Status.RUNNING):
                self._ended_at.pop(job_id, None)
                continue
            is_recorded = current.record.get("status") == current.status
            if is_recorded or now >= self._ended_at.setdefault(job_id, now) + SETTLE_S:
                self._note(job_id, current)
        has_failed = self._num_failed > before
        is_over = has_failed and self._batch.must_stop(self._num_failed)
        if self._waiting and is_over and not self._is_cancelling:
            self._cancel(f"enough jobs have failed: cancelling {len(self._waiting)} more")

    def _note(self, job_id: str, ended: Standing) -> None:
        del self._waiting[job_id]
        job = self._batch.jobs[job_id]
        run_dir = job.run_dir.path
        if ended.status != DAMAGED:  # else keep the folder for the user to repair
            note_end(run_dir, ended)
        print_line(f"{job.job.title}  {ended.status}")
        if ended.status == Status.COMPLETED:
            self._outcomes[job_id] = COMPLETED
        elif ended.status != Status.PREEMPTED:
            self._num_failed += 1
            self._outcomes[job_id] = failed_outcome(ended)
            print_error(ended.sentence or f"{run_dir.name} has failed")
        elif not self._is_cancelling:
            self._outcomes[job_id] = Outcome.stopped(signal.SIGTERM)
