"""Starts the process of each tracker of a run, and waits briefly for it at the end. Torch-free.

Our launcher does this, or rank 0 under another launcher. A thread would hold Python's global lock:
while it imports MLflow, a loop of small steps runs at a fiftieth of its speed.
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

from ddp_runner.host.processes import STOP_SIGNALS, TRACKER, children, end_descendants
from ddp_runner.host.streams import print_line
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, Job, Status
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import intact_record, read_run_record
from ddp_runner.tracking.trackers.follower import files_to_keep

ORDER = "DDP_RUNNER_TRACKER"  # environment variable: other users can read command lines
WAIT_S = 10.0  # time to send the rest after the run, unless the YAML sets wait_s
LEAST_RATE = 2 * 2**20  # bytes per second for the upload of the model
MOST_S = 240.0  # longest wait: under another launcher, the other ranks wait for rank 0
FAILED_S = 2.0  # wait after a failed run
LAST_S = 10.0  # extra time for a tracker on its own: after FAILED_S, or once its parent is gone
STOPPED_SHARE = 0.5  # share of launch.shutdown_timeout_s for the trackers of a preempted run
LIMIT_S = 1.0  # time for a killed process to end
EXIT_REPORTED = 3  # exit code of a tracker that has printed why it lacks part of the run


@dataclass(frozen=True)
class Order:
    """What a tracker's process needs to follow a run."""

    parent: int  # id of the process that waits for the tracker
    started_at: float  # start of the session
    settings: Mapping[str, Any]  # the tracker's _target_ and keys, secrets included
    allowed: Sequence[str]  # the user's packages
    secrets: Mapping[str, str] = field(default_factory=dict)  # see ``Secrets.values``
    prefix: str = ""  # start of each line on the terminal


@contextmanager
def followed(job: Job, run_dir: RunDir) -> Iterator[None]:
    """Start the job's trackers, and wait for them after the block. They never fail the run."""
    names = [] if job.config.task == "check" else list(job.config.trackers)  # check has no metrics
    trackers = {name: process for name in names if (process := _start(job, run_dir, name))}
    try:
        yield
    finally:
        if trackers:
            _end(trackers, job, run_dir)


def is_loaded(run_dir: RunDir, *, started_at: float) -> bool:
    """Return whether a session has restored its state, so that metrics.jsonl belongs to it."""
    loaded = intact_record(run_dir).get("loaded", {})  # the run itself reports damage
    return bool(loaded.get("started_at") == started_at)


def _start(job: Job, run_dir: RunDir, name: str) -> subprocess.Popen[bytes] | None:
    settings = job.config.trackers[name]
    order = Order(
        parent=os.getpid(),
        started_at=job.started_at,
        settings={key: value for key, value in settings.items() if key != "wait_s"},
        allowed=job.config.allowed_targets,
        secrets=job.secrets.values,
        prefix=job.line_prefix,
    )
    # Import from where the ranks do. -P: W&B's folder "wandb" here must not hide its package.
    environ = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",
        ORDER: json.dumps(asdict(order)),
    }
    # The process inherits blocked signals, and unblocks them once it ignores them.
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        run_dir.logs.mkdir(exist_ok=True)
        with _log_of(run_dir, name).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", TRACKER, str(run_dir.path.absolute()), name],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **environ},
                process_group=0,  # Ctrl-C on the terminal reaches the run only
            )
    except OSError as error:  # no memory for a process, or a full disk
        reason = f"cannot be started ({error.strerror}); the run continues without it"
        _warn(run_dir, name, reason)
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


def _log_of(run_dir: RunDir, name: str) -> Path:
    return run_dir.logs / f"tracker-{name}.log"


def _warn(run_dir: RunDir, name: str, text: str) -> None:
    """Warn on the terminal and in the tracker's log."""
    sentence = f"trackers.{name} {text}"
    print_line(f"warning: {sentence}", stream=sys.stdout)
    with suppress(OSError), _log_of(run_dir, name).open("a", encoding="utf-8") as log:  # full disk
        log.write(f"{sentence}\n")


def _end(trackers: Mapping[str, subprocess.Popen[bytes]], job: Job, run_dir: RunDir) -> None:
    """Wait for all trackers at once, and kill the late ones. After a failed run they end alone."""
    run_ended, own_children = time.monotonic(), children()
    has_loaded = is_loaded(run_dir, started_at=job.started_at)
    status = read_run_record(run_dir).get("status") if has_loaded else None
    stopped_s = min(MOST_S, STOPPED_SHARE * job.config.launch.shutdown_timeout_s)
    limits_s = {None: 0.0, Status.COMPLETED: MOST_S, Status.PREEMPTED: stopped_s}
    for name, process in trackers.items():
        wait_s = job.config.trackers[name].get("wait_s", WAIT_S)
        num_bytes = sum(path.stat().st_size for path in files_to_keep(run_dir, str(status)))
        limit_s = min(limits_s.get(status, FAILED_S), wait_s + num_bytes / LEAST_RATE)
        reason = "ended before it had all of the run"
        code = _exit_code(process, max(0.0, run_ended + limit_s - time.monotonic()))
        if code is None:
            late = f"had not ended {limit_s:.0f} s after the run"
            if status not in limits_s:
                _warn(run_dir, name, f"{late}, and gets {LAST_S:.0f} s more")
                continue
            code, reason = EXIT_FAILED, f"{late}, and was stopped"
        with suppress(ProcessLookupError):  # usually none is left; a client may leave a service
            os.killpg(process.pid, signal.SIGKILL)
        _exit_code(process, LIMIT_S)
        if has_loaded and code not in (EXIT_COMPLETED, EXIT_REPORTED):
            _warn(run_dir, name, f"{reason}; python -m {TRACKER} RUN {name} sends the rest")
    end_descendants(own_children, spares_trackers=False)  # processes in sessions of their own


def _exit_code(process: subprocess.Popen[bytes], wait_s: float) -> int | None:
    """Return the exit code; None if the process still runs after `wait_s` seconds."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(wait_s)
    return None
