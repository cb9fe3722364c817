"""Reads the files of a run, and sends new metrics to a tracker. Torch-free."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_runner.config.instantiate import make
from ddp_runner.files import locked, read_or_none, read_yaml, replace_file
from ddp_runner.job import Status
from ddp_runner.metric_names import LINE_FIELDS
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record
from ddp_runner.tracking.trackers.tracker import MetricLine, TrackedRun, Tracker

BLOCK_BYTES = 2**16  # bytes of metrics.jsonl per call


@dataclass
class SentMetrics:
    """trackers/NAME.json: the metrics that the tracker has."""

    id: str | None = None  # the tracker's id of the run
    config_hash: str | None = None  # config of the last session
    sent: dict[str, int] | None = None  # last step by metric


class Follower:
    """Sends a run to its tracker, each metric of each step once, over all sessions.

    A killed run repeats the steps after its checkpoint with the same results, so these are not sent
    again unless the config has changed. The session must have restored its state before.
    """

    def __init__(
        self, run_dir: RunDir, name: str, *, settings: Mapping[str, Any], allowed: Sequence[str]
    ) -> None:
        self._run_dir, self._name, self._settings = run_dir, name, settings
        self._allowed, self._progress_file = allowed, run_dir.trackers / f"{name}.json"
        self._progress, self._earlier = SentMetrics(), dict[str, int]()
        self._loaded: Mapping[str, Any] = {}  # see ``RunFields``
        self._tracker: Tracker | None = None
        self._has_begun, self._offset = False, 0

    @contextmanager
    def locked(self, *, wait_s: float = math.inf) -> Iterator[None]:
        """Lock the run for this tracker and process during the block.

        Raises:
            TimeoutError: another process holds the lock.
            OSError: the folder cannot be used.
        """
        self._run_dir.trackers.mkdir(exist_ok=True)
        with locked(self._run_dir.trackers / f".{self._name}.lock", wait_s=wait_s):
            self._progress = read_or_none(_read_progress, self._progress_file) or SentMetrics()
            yield

    def catch_up(self) -> None:
        """Send new metrics. After an error, the next call repeats them."""
        record = read_run_record(self._run_dir)
        if record["loaded"] != self._loaded:
            self._begin_lines(record)
        if self._tracker is None:  # late, since its imports take seconds
            key = f"trackers.{self._name}"
            self._tracker = make(key, self._settings, kind=Tracker, allowed=self._allowed)
        if not self._has_begun:
            run = tracked_run(self._run_dir, earlier_id=self._progress.id)
            earlier_id, self._progress.id = self._progress.id, str(self._tracker.begin(run))
            self._has_begun = True
            if self._progress.id != earlier_id:  # a new run on the server: send everything
                self._earlier, self._progress.sent = {}, None
            self._save()
        while block := self._next_block():
            parsed = [self._parse(json.loads(text)) for text in block]
            lines = [line for line in parsed if line.metrics]
            if lines:
                self._tracker.log(lines)
            self._offset += sum(map(len, block))
            self._progress.sent = (self._progress.sent or {}) | {
                name: line.step for line in lines for name in line.metrics
            }
            self._save()

    def end(self, status: str) -> None:
        """Send the remaining metrics, and end the run."""
        self.catch_up()
        assert self._tracker is not None
        metrics = read_run_record(self._run_dir).get("metrics") or {}
        self._tracker.end(status, metrics=metrics, files=files_to_keep(self._run_dir, status))

    def _begin_lines(self, record: Mapping[str, Any]) -> None:
        """Start again at the first line: the run has cut the file at its checkpoint."""
        progress, self._loaded, self._offset = self._progress, record["loaded"], 0
        self._earlier = dict(progress.sent or {})  # last step already sent, by metric
        if progress.config_hash != record.get("config_hash"):
            resume_step = self._loaded["resume_step"]
            kept = -1 if resume_step is None else resume_step
            self._earlier = {name: min(step, kept) for name, step in self._earlier.items()}
        progress.config_hash = record.get("config_hash")

    def _next_block(self) -> list[bytes]:
        """Return the next whole lines; [] at the end of the file, or if the run has cut it."""
        with self._run_dir.metrics.open("rb") as file:
            file.seek(self._offset)
            lines = (file.read(BLOCK_BYTES) + file.readline()).splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        # Check last: a restarted run records the cut before it writes a line.
        is_cut = lines and read_run_record(self._run_dir)["loaded"] != self._loaded
        return [] if is_cut else lines

    def _parse(self, line: Mapping[str, Any]) -> MetricLine:
        step = line["step"]
        return MetricLine(
            step=step,
            epoch=line["epoch"],
            time=self._loaded["clock"] + line["time_s"],
            metrics={
                name: math.nan if value is None else float(value)
                for name, value in line.items()
                if name not in LINE_FIELDS and step > self._earlier.get(name, -math.inf)
            },
        )

    def _save(self) -> None:
        replace_file(self._progress_file, json.dumps(asdict(self._progress)) + "\n")


def tracked_run(run_dir: RunDir, *, earlier_id: str | None) -> TrackedRun:
    """Return the facts of a run for a tracker."""
    record, folder = read_run_record(run_dir), run_dir.path.absolute()
    sweep, versions = record.get("sweep"), record.get("versions") or {}
    return TrackedRun(
        folder=folder,
        name=folder.name if sweep else f"{folder.parent.name}/{folder.name}",
        sweep=sweep,
        config=read_yaml(run_dir.config),
        tags=tuple(record.get("tags") or ()),
        notes=record.get("notes"),
        versions={name: version for name, version in versions.items() if version is not None},
        git_revision=record.get("git_revision"),
        started_at=record["started_at"],
        earlier_id=earlier_id,
    )


def files_to_keep(run_dir: RunDir, status: str) -> list[Path]:
    """Return the files that a tracker keeps: the large ones only of a completed run."""
    files = [run_dir.config]
    if status != Status.FAILED:  # the run.json of a killed run may say "running"
        files.insert(0, run_dir.record)
    if status == Status.COMPLETED:
        files += [run_dir.export, *sorted(run_dir.images.rglob("*.png"))]
    return [path for path in files if path.exists()]


def _read_progress(path: Path) -> SentMetrics:
    return SentMetrics(**json.loads(path.read_bytes()))
