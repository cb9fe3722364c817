"""Rank 0's side of the trackers: starts a process for each, and waits for it at the end, briefly.

A thread would not do: while it imports MLflow, a loop of small steps runs at a fiftieth of its
speed, since both need Python's global lock. Torch-free.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ddp_runner.errors import UserError
from ddp_runner.host.streams import print_line
from ddp_runner.job import Job
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record, write_run_record
from ddp_runner.tracking.trackers.follower import Request, files_to_keep

READY_S = 60.0  # at most, for its imports: a run may be shorter than they are
WAIT_S = 10.0  # at the end, unless its YAML has another wait_s
LEAST_RATE = 2 * 2**20  # bytes per second, of a model on its way to a server that answers
MOST_S = 240.0  # for all: the other ranks wait for rank 0
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
        self._has_warned, self._is_asked = False, False
        self._ready = threading.Event()
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

    def wait(self, status: str) -> None:
        """Wait for its end, and kill it after that: what is missing is in the run folder."""
        if self._process is None:
            return
        num_bytes = sum(path.stat().st_size for path in files_to_keep(self._run_dir, status))
        limit_s = min(MOST_S, self._wait_s + num_bytes / LEAST_RATE)
        self._ready.wait(READY_S)
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._warn(f"had not ended {limit_s:.0f} s after the run, and was stopped")
        with suppress(OSError):  # a service that the client has started may be left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        """Take its reports until it ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as reports:
            for line in filter(lambda text: text.endswith("\n"), reports):  # else it was killed
                report = json.loads(line)
                if "error" in report:
                    LOGGER.info(f"trackers.{self._name}: {report['traceback']}")
                    self._warn(
                        f"failed ({report['error']}); the run goes on, and what is missing there "
                        "is sent once it works again"
                    )
                self._ready.set()
        self._ready.set()
        if not self._is_asked:
            self._warn("has ended by itself; the run goes on without it")

    def _warn(self, text: str) -> None:
        """Warn once: on the terminal, in the log and in run.json."""
        if self._has_warned:
            return
        self._has_warned = True
        sentence = self._hide(f"trackers.{self._name} {text}")
        LOGGER.warning(sentence)
        print_line(f"warning: {sentence}", stream=sys.stdout)
        with suppress(UserError):  # a full disk, which the run itself reports
            known = read_run_record(self._run_dir).get("warnings") or []
            write_run_record(self._run_dir, warnings=[*known, sentence])


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


def end_trackers(trackers: Sequence[TrackerProcess], status: str) -> None:
    """Tell the trackers how the run has ended, and wait for all of them at the same time."""
    for tracker in trackers:
        tracker.ask_to_end(status)
    for tracker in trackers:
        tracker.wait(status)


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
