"""Reads the files of a run, and sends its tracker what is new. Torch-free."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_runner.config.instantiate import make
from ddp_runner.files import locked, read_yaml, replace_file
from ddp_runner.job import Status
from ddp_runner.metric_names import LINE_FIELDS
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record
from ddp_runner.tracking.trackers.tracker import MetricLine, TrackedRun, Tracker

BLOCK_BYTES = 2**16  # of metrics.jsonl, sent in one call


@dataclass
class SentMetrics:
    """What the tracker has of the run: trackers/NAME.json."""

    id: str | None = None
    config_hash: str | None = None  # of the last session
    sent: dict[str, int] | None = None  # the last step of each metric


class Follower:
    """Hands a run to its tracker, each metric of each step once, over all its sessions.

    A killed run repeats the steps after its checkpoint. It computes the same numbers again, so they
    are not sent again, unless the config has changed.

    Args:
        run_dir: of the run, whose state has been restored.
        name: of the tracker.
        settings: its _target_ and keys.
        allowed: packages of the user's own.
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
        """Let no other process send this run to this tracker while the block lasts.

        Raises:
            TimeoutError: another still does.
            OSError: the folder cannot be used.
        """
        self._run_dir.trackers.mkdir(exist_ok=True)
        with locked(self._run_dir.trackers / f".{self._name}.lock", wait_s=wait_s):
            self._progress = _read_progress(self._progress_file)
            yield

    def catch_up(self) -> None:
        """Send what is new. After an error the next call sends it again."""
        record = read_run_record(self._run_dir)
        if record["loaded"] != self._loaded:
            self._begin_lines(record)
        if self._tracker is None:  # its imports take seconds
            key = f"trackers.{self._name}"
            self._tracker = make(key, self._settings, kind=Tracker, allowed=self._allowed)
        if not self._has_begun:
            run = tracked_run(self._run_dir, earlier_id=self._progress.id)
            earlier_id, self._progress.id = self._progress.id, str(self._tracker.begin(run))
            self._has_begun = True
            if self._progress.id != earlier_id:  # another place, which has nothing of the run yet
                self._earlier, self._progress.sent = {}, None
            self._save()
        while block := self._next_block():
            read = [self._read(json.loads(text)) for text in block]
            lines = [line for line in read if line.metrics]
            if lines:
                self._tracker.log(lines)
            self._offset += sum(map(len, block))
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

    def _begin_lines(self, record: Mapping[str, Any]) -> None:
        """Begin with the first line again: the run has cut the file at a checkpoint since."""
        progress, self._loaded, self._offset = self._progress, record["loaded"], 0
        self._earlier = dict(progress.sent or {})  # lines up to this step are not new, by metric
        if progress.config_hash != record.get("config_hash"):
            step = self._loaded["resume_step"]
            kept = -1 if step is None else step
            self._earlier = {name: min(step, kept) for name, step in self._earlier.items()}
        progress.config_hash = record.get("config_hash")

    def _next_block(self) -> list[bytes]:
        """Return the next whole lines; none at the end of the file, and if it has been cut."""
        with self._run_dir.metrics.open("rb") as file:
            file.seek(self._offset)
            lines = (file.read(BLOCK_BYTES) + file.readline()).splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        # Looked at last: a restarted run notes that it has cut the file before it writes a line.
        is_cut = lines and read_run_record(self._run_dir)["loaded"] != self._loaded
        return [] if is_cut else lines

    def _read(self, line: Mapping[str, Any]) -> MetricLine:
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
    """Return what a tracker gets of a run, from its folder."""
    record, folder = read_run_record(run_dir), run_dir.path.absolute()
    sweep, versions = record.get("sweep"), record.get("versions") or {}
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

    Not run.json of one that has failed: nobody may have been left to write how it ended.
    """
    files = [run_dir.config]
    if status != Status.FAILED:
        files.insert(0, run_dir.record)
    if status == Status.COMPLETED:
        files += [run_dir.export, *sorted(run_dir.images.rglob("*.png"))]
    return [path for path in files if path.exists()]


def _read_progress(path: Path) -> SentMetrics:
    """Return what an earlier session has sent; nothing if its file is missing or damaged."""
    try:
        return SentMetrics(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return SentMetrics()
