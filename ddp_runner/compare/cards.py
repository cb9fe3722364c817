"""What a report says about one run: how to repeat it, how it went, its last values, its curves."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from ddp_runner.compare.curves import curves
from ddp_runner.compare.run import Run, is_finite
from ddp_runner.compare.speedup import REST
from ddp_runner.compare.table import Table, digits, percent, setting_text, text_of, values_table
from ddp_runner.files import LOADER, open_file
from ddp_runner.metric_names import LINE_FIELDS, StepPart, headlines
from ddp_runner.tracking.run_dir import RunDir

MAX_CLASSES = 30  # of a confusion matrix that a reader can follow
MAX_TRACEBACK = 4_000  # bytes; its end says what went wrong
MAX_OVERRIDES = 8_000  # bytes; a command that is cut would be another one
MAX_RECORDS = 500  # lines of task=check or task=collectives
# Fields of run.json that have a place of their own, or that mean nothing to a reader.
ELSEWHERE = {
    *("status", "error", "metrics", "sessions", "started_at", "startup_s", "wall_s", "versions"),
    *("finished_at", "confusion_matrix", "warnings", "checks", "collectives", "not_in_backend"),
    *("directions", "launches", "tags", "notes", "host", "stopped_early", "own_groups"),
    *("loaded", "sweep"),
}
RECORDS = {
    "checks": "Checks",
    "collectives": "Collectives",
    "not_in_backend": "Not in this backend",
}


@dataclass(frozen=True)
class Card:
    """A run and how the report refers to it."""

    run: Run
    number: str  # 3 for the only run of the third row, 3.2 for its second, s1 for one in no row
    label: str = ""  # its setting in a few words; empty: it is in no row
    anchor: str = ""  # the id of its details in the page; empty: it has none

    @property
    def name(self) -> str:
        """Its folder without the folders above."""
        return self.run.folder.resolve().name or str(self.run.folder)

    @property
    def title(self) -> str:
        """Its number and name."""
        return f"{self.number} {self.name}"


def details(card: Card, *, num_points: int, has_config: bool) -> dict[str, Any]:
    """Return what the template shows of a run, whatever its files hold; what is empty is left out.

    Args:
        card: The run; one that cannot be compared has what could be read of it.
        num_points: Most points of a curve.
        has_config: Whether to list the whole config.
    """
    run, record = card.run, card.run.record
    last = _last_values(run)
    tables = (_records_table(title, _list(record.get(name))) for name, title in RECORDS.items())
    overrides = _overrides(run.folder)
    words = repeating_command(record, overrides) if overrides is not None else None
    stopped = record.get("stopped_early")
    stops = [f"stopped early: {text_of(stopped)}"] if stopped else []
    return {
        "card": card,
        "status": text_of(record.get("status") or "unknown"),
        "reason": text_of(run.reason or ""),  # why it did not complete, or cannot be compared
        "headline": [(name, digits(last[name])) for name in headlines(last)[:4]],
        "tags": [text_of(tag) for tag in _list(record.get("tags"))],
        "notes": text_of(record.get("notes") or ""),
        "remarks": [*map(text_of, _list(record.get("warnings"))), *stops, *run.notes],
        "command": shlex.join(words or ()),  # that repeats it
        # Of its last command, which does not repeat it.
        "last_keys": "" if words else "\n".join(overrides or ()),
        "times": _times(run),
        "facts": [*_facts(record)],
        "last_values": _values(run, last),
        "curves": curves(run, num_points=num_points),
        "parts": [*_parts(run)],
        "confusion": _confusion(record.get("confusion_matrix")),
        "records": [table for table in tables if table is not None],
        "config": [(key, setting_text(value)) for key, value in run.config.items() if has_config],
        "traceback": _end_of(RunDir(run.folder).failure, run.folder, MAX_TRACEBACK),
    }


def date_text(seconds: Any) -> str:
    """Return a time since the epoch as a date in UTC, which means the same to every reader."""
    if not is_finite(seconds) or not 0 <= seconds < 253_402_300_800:  # the year 10000
        return text_of(seconds)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted names."""
    if not isinstance(value, Mapping):
        return {name: value}
    items = (flat(item, f"{name}.{key}" if name else str(key)) for key, item in value.items())
    return {key: leaf for found in items for key, leaf in found.items()}


def _duration_text(seconds: float) -> str:
    """Return a duration as a reader would say it: 12.3 s, 4 min 10 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if seconds < 120:
        return f"{digits(seconds)} s"
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"


def _list(value: Any) -> list[Any]:
    return value[:MAX_RECORDS] if isinstance(value, list) else []


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every field of run.json that has no place of its own, and the versions."""
    for key, value in record.items():
        if key not in ELSEWHERE and value not in (None, "", [], {}):
            is_time = key.endswith("_s") and is_finite(value) and not isinstance(value, bool)
            name = key.replace("num_", "number of ").replace("_", " ")
            yield name, _duration_text(value) if is_time else text_of(value)
    if versions := record.get("versions"):
        yield "versions", text_of(versions)


def _times(run: Run) -> Table:
    sessions = run.sessions or [run.record]
    columns = {
        "session": [*range(1, len(sessions) + 1)],
        "started": [date_text(one.get("started_at")) for one in sessions],
        "start-up": [one.get("startup_s") for one in sessions],
        "whole": [one.get("wall_s") for one in sessions],
    }
    return values_table("Sessions", columns, show=dict.fromkeys(columns, _duration_text))


def _last_values(run: Run) -> dict[str, float]:
    """Return the last finite value of each metric; a run that did not end has them in its lines."""
    found = {
        name: value
        for line in run.lines
        for name, value in line.items()
        if value is not None and name not in LINE_FIELDS
    }
    metrics = run.record.get("metrics")
    items = metrics.items() if isinstance(metrics, dict) else ()
    return found | {str(name): float(value) for name, value in items if is_finite(value)}


def _values(run: Run, last: Mapping[str, float]) -> Table | None:
    """Return the last, lowest and highest value of each metric, and the result of a speed."""
    names = [*dict.fromkeys((*headlines(last), *sorted(last)))]
    logged = {name: run.values(name) for name in names}
    columns: dict[str, Sequence[Any]] = {
        "metric": names,
        "last": [last[name] for name in names],
        "lowest": [min(logged[name], default=None) for name in names],
        "highest": [max(logged[name], default=None) for name in names],
    }
    speeds = [run.result(name) if name.startswith("perf/") else None for name in names]
    if any(speed is not None for speed in speeds):
        columns["without warm-up"] = speeds
    return values_table("Metrics", columns) if names else None


def _records_table(name: str, records: Sequence[Any]) -> Table | None:
    """Return the table of mappings that have about the same fields; None if there is nothing."""
    lines = [flat(record) for record in records if isinstance(record, Mapping)]
    titles = dict.fromkeys(title for line in lines for title in line)
    columns = {title: [line.get(title) for line in lines] for title in titles}
    return values_table(name, columns) if titles else None


def _parts(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the parts of a step, the longest scale first, with the rest of its time."""
    measured = {part.value: run.result(part.metric) for part in StepPart}
    parts = {name: ms for name, ms in measured.items() if ms}
    whole = run.result("perf/step_time_ms")
    if not parts or not whole:
        return
    parts[REST] = max(0.0, whole - sum(parts.values()))
    total = sum(parts.values())
    for name, ms in parts.items():
        width = round(100 * ms / total, 1)  # of its bar, in percent
        yield {"name": name, "ms": digits(ms), "share": percent(ms / total), "width": width}


def _confusion(counts: Any) -> list[list[tuple[int, int]]]:
    """Return the rows of an evaluation's counts, each with its shade from 0 to 9.

    There are none if there are no counts, or too many.
    """
    size = len(counts) if isinstance(counts, list) else 0
    is_square = 0 < size <= MAX_CLASSES and all(
        isinstance(row, list) and len(row) == size and all(isinstance(n, int) for n in row)
        for row in counts
    )
    return [
        [(count, min(9, max(0, 10 * count // (sum(row) or 1)))) for count in row]
        for row in (counts if is_square else ())
    ]


def _overrides(folder: Path) -> list[str] | None:
    """Return the overrides of a run's last command; None if they cannot be read."""
    text = _end_of(RunDir(folder).overrides, folder, MAX_OVERRIDES)
    try:
        overrides = yaml.load(text, Loader=LOADER) if len(text) < MAX_OVERRIDES else None
    except Exception:  # PyYAML raises errors of any type
        return None
    if not isinstance(overrides, list) or not all(isinstance(one, str) for one in overrides):
        return None
    return overrides


def _end_of(path: Path, folder: Path, num_bytes: int) -> str:
    """Return the end of a text in a run folder; empty if there is none.

    A link could lead the report, which is passed on, to any file of this machine.
    """
    try:
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            return ""
        with open_file(path) as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read(num_bytes).decode(errors="replace")
    except OSError:
        return ""


def repeating_command(record: Mapping[str, Any], overrides: Sequence[str]) -> list[str] | None:
    """Return the words of the command that repeats a run; None if no known command does.

    A resumed run has only the overrides of its last command, so not the keys it began with.

    Args:
        record: The fields of run.json, unchecked.
        overrides: What the run folder keeps of its last command.
    """
    groups = record.get("own_groups")
    if not isinstance(groups, list) or not all(
        isinstance(one, str) and one.startswith(("--config-dir=", "hydra.searchpath="))
        for one in groups
    ):
        return None
    if any(one.lstrip("+").startswith("resume=") for one in overrides):
        return None
    return ["python", "-m", "ddp_runner", *groups, *overrides]
