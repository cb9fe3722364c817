"""Starts the command of each tracker of a run, and waits for it at the end, briefly. Torch-free.

Whoever claimed the run does so: our launcher, or rank 0 under another one. A thread of rank 0 would
not do: while it imports MLflow, a loop of small steps runs at a fiftieth of its speed, since both
need Python's global lock.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddp_runner.errors import UserError
from ddp_runner.host.processes import STOP_SIGNALS, TRACKER, children, end_descendants
from ddp_runner.host.streams import print_line
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, Job, Status
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record
from ddp_runner.tracking.trackers.follower import files_to_keep

ORDER = "DDP_RUNNER_TRACKER"  # a variable: other users see a process's arguments
WAIT_S = 10.0  # at the end, unless its YAML has another wait_s
LEAST_RATE = 2 * 2**20  # bytes per second, of a model on its way to a server that answers
MOST_S = 240.0  # under another launcher, the other ranks wait for rank 0
FAILED_S = 2.0  # for a run that has failed
LAST_S = 10.0  # beyond these, or once the process is gone that started the tracker
STOPPED_SHARE = 0.5  # of launch.shutdown_timeout_s, for a run that was asked to stop
LIMIT_S = 1.0  # for a killed process to be gone
EXIT_REPORTED = 3  # of a tracker that lacks a part of the run, and has said why


@dataclass(frozen=True)
class Order:
    """What a run tells the command that follows it."""

    parent: int  # the process that waits for it
    started_at: float  # of the session
    settings: Mapping[str, Any]  # the tracker's _target_ and keys, secrets included
    allowed: Sequence[str]  # packages of the user's own
    secrets: Mapping[str, str] = field(default_factory=dict)  # see ``Secrets.values``
    prefix: str = ""  # of its line on the terminal


@contextmanager
def followed(job: Job, run_dir: RunDir) -> Iterator[None]:
    """Let the job's trackers follow its run, and wait for them after the block.

    Whatever happens to them, the run goes on.
    """
    config = job.config
    names = [] if config.task == "check" else list(config.trackers)  # it has no metrics
    trackers = [one for name in names if (one := _start(job, run_dir, name))]
    try:
        yield
    finally:
        if trackers:
            _end(trackers, job, run_dir)


@dataclass(frozen=True)
class _Tracker:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def warn(self, text: str) -> None:
        """Warn on the terminal and in its log."""
        sentence = f"trackers.{self.name} {text}"
        with suppress(OSError), self.log.open("a", encoding="utf-8") as log:
            log.write(f"{sentence}\n")
        _print_warning(sentence)


def is_loaded(run_dir: RunDir, *, started_at: float) -> bool:
    """Return whether a session has restored its state: from then on metrics.jsonl is its own."""
    with suppress(UserError):  # run.json is damaged, which the run itself reports
        loaded = read_run_record(run_dir, missing_ok=True).get("loaded", {})
        return bool(loaded.get("started_at") == started_at)
    return False


def _start(job: Job, run_dir: RunDir, name: str) -> _Tracker | None:
    settings = job.config.trackers[name]
    order = Order(
        parent=os.getpid(),
        started_at=job.started_at,
        settings={key: one for key, one in settings.items() if key != "wait_s"},
        allowed=job.config.allowed_targets,
        secrets=job.secrets.values,
        prefix=job.line_prefix,
    )
    # It imports what the ranks can import. -P: a folder wandb in the current one is no package.
    places = os.pathsep.join(filter(None, sys.path))
    environ = {"PYTHONPATH": places, "CUDA_VISIBLE_DEVICES": "", ORDER: json.dumps(asdict(order))}
    path = run_dir.logs / f"tracker-{name}.log"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until it ignores them
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", TRACKER, str(run_dir.path.absolute()), name],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **environ},
                process_group=0,  # Ctrl-C on a terminal is for the run, which then ends it
            )
            return _Tracker(name, process, path)
    except OSError as error:
        reason = f"cannot be started ({error.strerror}); the run goes on without it"
        _print_warning(f"trackers.{name} {reason}")
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(trackers: Sequence[_Tracker], job: Job, run_dir: RunDir) -> None:
    """Wait for all trackers at the same time, and end those that take too long.

    What is missing is in the run folder. If the run has failed, they end by themselves.
    """
    since, own = time.monotonic(), children()
    has_begun = is_loaded(run_dir, started_at=job.started_at)
    status = read_run_record(run_dir).get("status") if has_begun else None
    stopped_s = min(MOST_S, STOPPED_SHARE * job.config.launch.shutdown_timeout_s)
    known = {None: 0.0, Status.COMPLETED: MOST_S, Status.PREEMPTED: stopped_s}
    most_s, is_failed = known.get(status, FAILED_S), status not in known
    for one in trackers:
        wait_s = job.config.trackers[one.name].get("wait_s", WAIT_S)
        num_bytes = sum(path.stat().st_size for path in files_to_keep(run_dir, str(status)))
        limit_s = min(most_s, wait_s + num_bytes / LEAST_RATE)
        lacks = "has ended before it had all of the run"
        try:
            code = one.process.wait(max(0.0, since + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = f"had not ended {limit_s:.0f} s after the run"
            if is_failed:
                one.warn(f"{late}, and gets {LAST_S:.0f} s more")
                continue
            code, lacks = EXIT_FAILED, f"{late}, and was stopped"
        with suppress(OSError):  # a service that the client has started may be left
            os.killpg(one.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it is in uninterruptible sleep
            one.process.wait(LIMIT_S)
        if has_begun and code not in (EXIT_COMPLETED, EXIT_REPORTED):
            one.warn(f"{lacks}; python -m {TRACKER} RUN {one.name} sends it")
    end_descendants(own, spares_trackers=False)  # what one has left, in a session of its own


def _print_warning(sentence: str) -> None:
    print_line(f"warning: {sentence}", stream=sys.stdout)
