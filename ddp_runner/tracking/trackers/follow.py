"""The process of one tracker: it follows the files of a run, and hands them to the tracker.

``sender`` starts it and tells it by stdin which run to follow, and how the run has ended. It reads
metrics.jsonl instead of a queue: nothing is lost while a server is away, and nothing piles up in
rank 0. What it reports are lines of JSON on stdout. Torch-free.
"""

import fcntl
import json
import math
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ddp_runner.config.instantiate import make
from ddp_runner.errors import UserError, typed
from ddp_runner.files import replace_file
from ddp_runner.host.processes import ignore_stop_signals
from ddp_runner.job import Status
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record
from ddp_runner.tracking.trackers.tracker import MetricLine, TrackedRun, Tracker

POLL_S = 1.0  # between two looks at metrics.jsonl
MOST_PAUSE_S = 60.0  # before a call that has failed is repeated; the first time after POLL_S
MOST_METRICS = 1000  # of one call, unless a single line has more: what MLflow takes in one request
MOST_CHARACTERS = 300  # of an error: MLflow's quote whole requests
LAST_S = 30.0  # for the end of a run whose rank 0 is gone
NO_METRICS = {"step", "epoch", "time_s"}
NICENESS = 5  # importing a client takes seconds of a core


@dataclass(frozen=True)
class Request:
    """What rank 0 sends: the tracker, and the run to follow."""

    name: str
    settings: Mapping[str, Any]  # its _target_ and keys, secrets included
    allowed: Sequence[str]  # packages of the user's own
    folder: str
    sweep: str | None
    resume_step: int | None  # None: the run begins anew
    clock: float  # the time.time() of the run's second 0


@dataclass
class Progress:
    """What the tracker has of the run: trackers/NAME.json."""

    id: str | None = None
    config_hash: str | None = None  # of the last session
    sent: dict[str, int] | None = None  # the last step of each metric
    clock: float | None = None  # of the last session
    is_complete: bool = False  # the run has ended, and all is there


class Follower:
    """Hands a run to its tracker, each metric of each step once, over all its sessions.

    A killed run repeats the steps after its checkpoint. It computes the same numbers again, so they
    are not sent again, unless the config has changed.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._run_dir = request, RunDir(Path(request.folder))
        self._progress_file = self._run_dir.trackers / f"{request.name}.json"
        self._progress = _read_progress(self._progress_file)
        record = read_run_record(self._run_dir)
        # Lines up to this step are not new, by metric.
        self._earlier = dict(self._progress.sent or {})
        if self._progress.config_hash != record.get("config_hash"):
            kept = -1 if request.resume_step is None else request.resume_step
            self._earlier = {name: min(step, kept) for name, step in self._earlier.items()}
        # A line that may have arrived unanswered goes out with its old time: MLflow keeps one.
        self._earlier_clock = self._progress.clock or request.clock
        self._progress.clock = request.clock
        self._progress.config_hash, self._progress.is_complete = record.get("config_hash"), False
        self._tracker: Tracker | None = None
        self._has_begun, self._offset = False, 0

    def build(self) -> None:
        """Build the tracker: its imports take seconds."""
        request, key = self._request, f"trackers.{self._request.name}"
        self._tracker = make(key, request.settings, kind=Tracker, allowed=request.allowed)

    def catch_up(self) -> None:
        """Send what is new. After an error the next call sends it again."""
        if self._tracker is None:
            self.build()
        assert self._tracker is not None
        if not self._has_begun:
            run = tracked_run(
                self._run_dir, sweep=self._request.sweep, earlier_id=self._progress.id
            )
            self._progress.id = str(self._tracker.begin(run))
            self._has_begun = True
            self._save()
        while (found := self._next_lines()) is not None:
            lines, offset = found
            if lines:
                self._tracker.log(lines)
            self._offset = offset
            self._progress.sent = (self._progress.sent or {}) | {
                name: line.step for line in lines for name in line.metrics
            }
            self._save()

    def end(self, status: str) -> None:
        """Send what is left, and end the run."""
        self.catch_up()
        assert self._tracker is not None
        metrics = read_run_record(self._run_dir).get("metrics") or {}
        self._tracker.end(status, metrics=metrics, files=files_to_keep(self._run_dir, status))
        self._progress.is_complete = True
        self._save()

    def _next_lines(self) -> tuple[list[MetricLine], int] | None:
        """Return the next new lines, and where they end in the file; None at its end."""
        lines, offset, count = list[MetricLine](), self._offset, 0
        with self._run_dir.metrics.open("rb") as file:
            file.seek(offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                line = self._read(json.loads(text))
                count += len(line.metrics)
                if lines and count > MOST_METRICS:
                    break
                offset += len(text)
                if line.metrics:
                    lines.append(line)
        return None if offset == self._offset else (lines, offset)

    def _read(self, line: Mapping[str, Any]) -> MetricLine:
        step, resume_step = line["step"], self._request.resume_step
        is_earlier = resume_step is not None and step <= resume_step
        clock = self._earlier_clock if is_earlier else self._request.clock
        return MetricLine(
            step=step,
            epoch=line["epoch"],
            time=clock + line["time_s"],
            metrics={
                name: math.nan if value is None else float(value)
                for name, value in line.items()
                if name not in NO_METRICS and step > self._earlier.get(name, -math.inf)
            },
        )

    def _save(self) -> None:
        replace_file(self._progress_file, json.dumps(asdict(self._progress)) + "\n")


def tracked_run(run_dir: RunDir, *, sweep: str | None, earlier_id: str | None) -> TrackedRun:
    """Return what a tracker gets of a run, from its folder."""
    record, folder = read_run_record(run_dir), run_dir.path
    versions = record.get("versions") or {}
    return TrackedRun(
        folder=folder,
        name=folder.name if sweep else f"{folder.parent.name}/{folder.name}",
        sweep=sweep,
        config=yaml.safe_load(run_dir.config.read_text(encoding="utf-8")),
        tags=tuple(record.get("tags") or ()),
        notes=record.get("notes"),
        versions={name: one for name, one in versions.items() if one is not None},
        git_revision=record.get("git_revision"),
        started_at=record["started_at"],
        earlier_id=earlier_id,
    )


def files_to_keep(run_dir: RunDir, status: str) -> list[Path]:
    """Return the files that a tracker keeps with a run: the large ones once it has completed."""
    files = [run_dir.record, run_dir.config]
    if status == Status.COMPLETED:
        files += [run_dir.export, *sorted(run_dir.images.rglob("*.png"))]
    return [path for path in files if path.exists()]


def follow(
    follower: Follower, ended: "queue.Queue[str]", report: Callable[[Mapping[str, str]], None]
) -> bool:
    """Hand a run to its tracker until it has ended; return whether the tracker has all of it.

    Args:
        follower: of the run.
        ended: gets the status with which the run has ended.
        report: gets the first error, and that the tracker is ready.
    """
    pause_s, has_failed, is_ready = 0.0, False, False
    while True:
        status = _wait(ended, pause_s)
        try:
            if not is_ready:
                follower.build()
                is_ready = True
                report({"ready": ""})
            if status is not None:
                follower.end(status)
                return True
            follower.catch_up()
            pause_s = POLL_S
        except Exception as error:  # a tracker may raise what it likes
            if not has_failed:
                has_failed = True
                reason = str(error) if isinstance(error, UserError) else typed(error)
                if len(reason) > MOST_CHARACTERS:
                    reason = reason[:MOST_CHARACTERS] + " …"
                report({"error": reason, "traceback": traceback.format_exc()})
            if status is not None:
                return False
            pause_s = min(MOST_PAUSE_S, max(POLL_S, 2 * pause_s))


def _wait(ended: "queue.Queue[str]", pause_s: float) -> str | None:
    try:
        return ended.get(timeout=pause_s) if pause_s else ended.get_nowait()
    except queue.Empty:
        return None


def _read_progress(path: Path) -> Progress:
    """Return what an earlier session has sent; nothing if there was none, or its file is cut."""
    try:
        return Progress(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Progress()


def main() -> None:
    """Follow the run that stdin names."""
    ignore_stop_signals()  # the run decides when this process ends
    os.nice(NICENESS)
    # Clients print: of what they print, rank 0 shows nothing.
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    request = Request(**json.loads(sys.stdin.readline()))
    ended: queue.Queue[str] = queue.Queue()

    def report(content: Mapping[str, str]) -> None:
        print(json.dumps(content), file=reports, flush=True)

    def listen() -> None:
        status = sys.stdin.readline().strip()
        if not status:  # rank 0 is gone, and waits for nobody
            status = Status.FAILED.value
            limit = threading.Timer(LAST_S, os._exit, args=(1,))
            limit.daemon = True
            limit.start()
        ended.put(status)

    folder = RunDir(Path(request.folder)).trackers
    folder.mkdir(exist_ok=True)
    with (folder / f".{request.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # an earlier attempt's process may be about to end
        threading.Thread(target=listen, daemon=True).start()
        follow(Follower(request), ended, report)


if __name__ == "__main__":
    main()
