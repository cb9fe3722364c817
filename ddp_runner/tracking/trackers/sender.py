"""Rank 0's side of the trackers: starts a process for each, and waits for it at the end, briefly.

A thread would not do: while it imports MLflow, a loop of small steps runs at a fiftieth of its
speed, since both need Python's global lock. Torch-free.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ddp_runner.errors import UserError, printable
from ddp_runner.host.streams import print_line
from ddp_runner.job import Job, Status
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import add_warning
from ddp_runner.tracking.trackers.follow import LAST_S
from ddp_runner.tracking.trackers.follower import Request, files_to_keep

WAIT_S = 10.0  # at the end, unless its YAML has another wait_s
LEAST_RATE = 2 * 2**20  # bytes per second, of a model on its way to a server that answers
MOST_S = 240.0  # the other ranks wait for rank 0
FAILED_S = 2.0  # the error of a run that has failed is named after that
STOPPED_SHARE = 0.5  # of launch.shutdown_timeout_s, after which the launcher kills the ranks
LIMIT_S = 1.0  # for what a killed process leaves
MOST_CHARACTERS = 300  # of an error: MLflow's quote whole requests
LOGGER = logging.getLogger("ddp_runner")


class TrackerProcess:
    """The process of one tracker. Nothing that happens to it reaches the run.

    Args:
        request: what it is to do.
        wait_s: seconds that ``wait`` gives it, beside the time for large files.
        hide: removes secrets from a text.
    """

    def __init__(
        self, request: Request, *, wait_s: float, hide: Callable[[str], str] = str
    ) -> None:
        self._name, self._run_dir = request.name, RunDir(Path(request.folder))
        self._wait_s, self._hide = wait_s, hide
        self._has_warned, self._is_asked, self._is_complete = False, False, False
        self._warning = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = _start(request)
        except OSError as error:
            self._warn(f"cannot be started ({error.strerror}); the run goes on without it")
            return
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask_to_end(self, status: str) -> None:
        """Tell it how the run has ended; run.json is complete."""
        self._is_asked = True
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended
                self._process.stdin.write(f"{status}\n")
                self._process.stdin.close()

    def wait(self, status: str, *, since: float, most_s: float) -> None:
        """Wait for its end, and kill it after that: what is missing is in the run folder.

        If the run has failed, it is left to end by itself, within ``LAST_S``.

        Args:
            status: with which the run has ended.
            since: time.monotonic() when the trackers were asked to end.
            most_s: seconds from then on, whatever its own wait_s.
        """
        if self._process is None:
            return
        num_bytes = sum(path.stat().st_size for path in files_to_keep(self._run_dir, status))
        limit_s = min(most_s, self._wait_s + num_bytes / LEAST_RATE)
        try:
            self._process.wait(max(0.0, since + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = f"had not ended {limit_s:.0f} s after the run"
            if status == Status.FAILED:
                self._warn(f"{late}, and gets {LAST_S:.0f} s more")
                return
            self._warn(f"{late}, and was stopped")
        with suppress(OSError):  # a service that the client has started may be left
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it is in uninterruptible sleep
            self._process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)  # a process that left its group may hold the pipe
        if not self._is_complete:
            self._warn("has ended before it had all of the run; resume=RUN trackers=… sends it")

    def _read(self) -> None:
        """Take its reports until it ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as reports:
            for line in filter(lambda text: text.endswith("\n"), reports):  # else it was killed
                report = json.loads(line)
                if "error" not in report:
                    self._is_complete = True
                    continue
                LOGGER.info(f"trackers.{self._name}: {self._shown(report['traceback'])}")
                reason = self._shown(report["error"])  # whole: half a secret would stay
                if len(reason) > MOST_CHARACTERS:
                    reason = reason[:MOST_CHARACTERS] + " …"
                self._warn(
                    f"failed ({reason}); the run goes on, and what is missing there is tried again "
                    "until it works"
                )
        if not self._is_asked:
            self._warn("has ended by itself; the run goes on without it")

    def _shown(self, text: str) -> str:
        """Return a server's text as it may be shown: no secret, nothing that steers a terminal.

        A client may have changed an address, so its password goes wherever it comes from.
        """
        text = re.sub(r"://[^/\s]+@", "://…@", self._hide(text))
        return "\n".join(map(printable, text.splitlines()))

    def _warn(self, text: str) -> None:
        """Warn once: on the terminal, in the log and in run.json."""
        with self._warning:
            if self._has_warned:
                return
            self._has_warned = True
        sentence = f"trackers.{self._name} {text}"
        LOGGER.warning(sentence)
        print_line(f"warning: {sentence}", stream=sys.stdout)
        with suppress(UserError):  # a full disk, which the run itself reports
            add_warning(self._run_dir, sentence)


def start_trackers(
    job: Job, run_dir: RunDir, *, resume_step: int | None, clock: float
) -> list[TrackerProcess]:
    """Start the processes of a job's trackers; rank 0 only.

    Args:
        job: with the config.
        run_dir: the run's folder, whose frozen config and run.json are complete.
        resume_step: the step of the checkpoint that the run goes on from; None: it begins anew.
        clock: the time.time() of the run's second 0.
    """
    return [
        TrackerProcess(
            Request(
                parent=os.getpid(),
                name=name,
                settings={key: one for key, one in settings.items() if key != "wait_s"},
                allowed=job.config.allowed_targets,
                folder=str(run_dir.path.absolute()),
                sweep=run_dir.path.absolute().parent.name if job.title else None,
                resume_step=resume_step,
                clock=clock,
            ),
            wait_s=settings.get("wait_s", WAIT_S),
            hide=job.secrets.hide,
        )
        for name, settings in job.config.trackers.items()
    ]


def end_trackers(
    trackers: Sequence[TrackerProcess], status: str, *, shutdown_timeout_s: float
) -> None:
    """Tell the trackers how the run has ended, and wait for all of them at the same time.

    Args:
        trackers: of the run.
        status: with which it has ended.
        shutdown_timeout_s: of the config's section ``launch``.
    """
    since, most_s = time.monotonic(), MOST_S
    if status == Status.FAILED:
        most_s = FAILED_S
    elif status == Status.PREEMPTED:
        most_s = min(MOST_S, STOPPED_SHARE * shutdown_timeout_s)
    for tracker in trackers:
        tracker.ask_to_end(status)
    for tracker in trackers:
        tracker.wait(status, since=since, most_s=most_s)


def _start(request: Request) -> subprocess.Popen[str]:
    """Start the process of a tracker, and send it the request.

    Raises:
        OSError: the system cannot start it.
    """
    # It imports what rank 0 can import. -P: a folder wandb in the current one is no package.
    places = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ddp_runner.tracking.trackers.follow"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": places, "CUDA_VISIBLE_DEVICES": ""},
        process_group=0,  # Ctrl-C on a terminal is for the run, which then ends it
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already: the reader says so
        process.stdin.write(json.dumps(asdict(request)) + "\n")
        process.stdin.flush()
    return process
