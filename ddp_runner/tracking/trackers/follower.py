"""One session of a run and its tracker: reads the run's files, sends what is new. Torch-free."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_runner.config.instantiate import make
from ddp_runner.files import read_yaml, replace_file
from ddp_runner.job import Status
from ddp_runner.metric_names import LINE_FIELDS
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record
from ddp_runner.tracking.trackers.tracker import MetricLine, TrackedRun, Tracker

MOST_METRICS = 1000  # of one call, unless a line alone has more: what MLflow takes in one request


@dataclass(frozen=True)
class Request:
    """What rank 0 sends: the tracker, and the run to follow."""

    parent: int  # rank 0's process
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
            earlier_id, self._progress.id = self._progress.id, str(self._tracker.begin(run))
            self._has_begun = True
            if self._progress.id != earlier_id:  # another place, which has nothing of the run yet
                self._earlier, self._progress.sent = {}, None
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
                if name not in LINE_FIELDS and step > self._earlier.get(name, -math.inf)
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
        config=read_yaml(run_dir.config),
        tags=tuple(record.get("tags") or ()),
        notes=record.get("notes"),
        versions={name: one for name, one in versions.items() if one is not None},
        git_revision=record.get("git_revision"),
        started_at=record["started_at"],
        earlier_id=earlier_id,
    )


def files_to_keep(run_dir: RunDir, status: str) -> list[Path]:
    """Return the files that a tracker keeps with a run: the large ones once it has completed.

    Not run.json of one that has failed: the launcher writes why, after rank 0 has ended.
    """
    files = [run_dir.config]
    if status != Status.FAILED:
        files.insert(0, run_dir.record)
    if status == Status.COMPLETED:
        files += [run_dir.export, *sorted(run_dir.images.rglob("*.png"))]
    return [path for path in files if path.exists()]


def _read_progress(path: Path) -> Progress:
    """Return what an earlier session has sent; nothing if its file is missing or damaged."""
    try:
        progress = Progress(**json.loads(path.read_bytes()))
        progress.sent = {name: int(step) for name, step in (progress.sent or {}).items()}
        progress.clock = None if progress.clock is None else float(progress.clock)
    except (OSError, ValueError, TypeError, AttributeError):
        return Progress()
    return progress
