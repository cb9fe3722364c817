"""The part of a report about a single run: its command, times, last values and curves."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ddp_runner.compare.recorded_run import RecordedRun
from ddp_runner.compare.speedup import PARTS, REST
from ddp_runner.compare.table import (
    Table,
    date_text,
    digits,
    percent,
    setting_text,
    text_of,
    time_text,
    values_table,
)
from ddp_runner.config.identity import leaves
from ddp_runner.files import open_file, read_or_none, read_yaml
from ddp_runner.metric_names import LINE_FIELDS, headlines
from ddp_runner.tracking.run_dir import RunDir

SIZE = 10_000  # width and height of a chart, in units of its path
MAX_DOTTED = 40  # points of a curve with marks
LOG_FROM = 50  # highest divided by lowest value; from here the scale is logarithmic

Point = tuple[float, float]  # step and value; nan: the value is not finite


@dataclass(frozen=True)
class Curve:
    """A curve that fills its chart."""

    name: str
    path: str  # data of an SVG path, in a square of SIZE from the top left
    dots: str  # data of a path that marks the points; empty if they are many
    first: float  # step
    last: float
    low: float
    high: float
    is_log: bool


def curves(run: RecordedRun, *, num_points: int) -> list[Curve]:
    """Return a curve for each metric that changed, with about `num_points` points at most."""
    logged = dict.fromkeys(name for line in run.lines for name in line if name not in LINE_FIELDS)
    names = dict.fromkeys([*headlines(logged), *logged])
    return [_curve(run, name, num_points) for name in names if len({*run.values(name)}) > 1]


def thinned(points: Sequence[Point], num_points: int) -> list[Point]:
    """Return the lowest, the highest and a missing point of each stretch, to keep all spikes."""
    size = math.ceil(2 * len(points) / num_points)
    if size <= 2:
        return list(points)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        gaps = [point for point in stretch if math.isnan(point[1])]
        finite = sorted(set(stretch) - set(gaps), key=itemgetter(1, 0))
        kept += sorted({*finite[:1], *finite[-1:], *gaps[:1]}, key=itemgetter(0))
    return kept


def _curve(run: RecordedRun, name: str, num_points: int) -> Curve:
    logged = [(line["step"] or 0.0, line[name]) for line in run.lines if name in line]
    points = [(step, math.nan if value is None else value) for step, value in logged]
    values = run.values(name)
    low, high, first, last = min(values), max(values), points[0][0], points[-1][0]
    is_log = low > 0 and high / low >= LOG_FROM
    bottom, top = (math.log(low), math.log(high)) if is_log else (low, high)

    def position(step: float, value: float) -> str:
        across = (step - first) / ((last - first) or 1)
        up = ((math.log(value) if is_log else value) - bottom) / (top - bottom)
        return f"{round(SIZE * across)},{round(SIZE * (1 - up))}"

    shown = thinned(points, num_points)
    stretches = groupby(shown, key=lambda point: math.isnan(point[1]))
    parts = [[position(*point) for point in part] for is_gap, part in stretches if not is_gap]
    path = "".join(f"M{' '.join(part)}" for part in parts)
    # A line without length and with round ends is a dot that scaling does not deform.
    dots = "".join(f"M{point}h0" for part in parts for point in part)
    dots = dots if len(shown) <= MAX_DOTTED else ""
    return Curve(name, path, dots, first, last, low, high, is_log)


MAX_CLASSES = 30  # in a readable confusion matrix
MAX_TRACEBACK = 4_000  # bytes at its end
MAX_RECORDS = 500  # lines of task=check or task=collectives
# Fields of run.json that are tables.
RECORDS = ("checks", "collectives", "not_in_backend", "planned_collectives")
# Fields of run.json that are shown elsewhere, or mean nothing to a reader.
ELSEWHERE = {
    *("status", "error", "metrics", "sessions", "started_at", "startup_s", "wall_s", "versions"),
    *("finished_at", "confusion_matrix", "warnings", "directions", "launches", "tags", "notes"),
    *("host", "stopped_early", "own_groups", "loaded", "sweep", *RECORDS),
}


@dataclass(frozen=True)
class Card:
    """A run with its number, label and link in the report."""

    run: RecordedRun
    number: str  # 3: the only run of row 3; 3.2: the second run of row 3; s1: a run without a row
    label: str = ""  # the setting in a few words; empty without a row
    anchor: str = ""  # id of the details in the page; empty: no details

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.run.folder.resolve().name or str(self.run.folder)

    @property
    def title(self) -> str:
        """Number and name."""
        return f"{self.number} {self.name}"


def details(card: Card, *, is_single: bool) -> dict[str, Any]:
    """Return the values for the template's details of a run; its files may hold anything.

    If the page is about only this run, list the whole config, too.
    """
    run, record = card.run, card.run.record
    # A run that did not end has metrics only in its lines.
    logged = ((name, value) for line in run.lines for name, value in line.items())
    last = {name: value for name, value in logged if value is not None}
    last = {name: value for name, value in last.items() if name not in LINE_FIELDS} | run.final
    beside = _times(run), _parts(run), _confusion(record.get("confusion_matrix"))
    records = (_records_table(name, _list(record.get(name))) for name in RECORDS)
    overrides = _overrides(run.folder) if record else None  # without a record it may be a link
    words = repeating_command(record, overrides) if overrides is not None else None
    stopped = text_of(record.get("stopped_early") or "")
    remarks = [*map(text_of, _list(record.get("warnings"))), *run.notes]
    return {
        "card": card,
        "status": text_of(record.get("status") or "unknown"),
        "reason": text_of(run.reason or ""),  # why it did not complete, or cannot be compared
        "headline": [(name, digits(last[name])) for name in headlines(last)[:4]],
        "tags": [text_of(tag) for tag in _list(record.get("tags"))],
        "notes": text_of(record.get("notes") or ""),
        "remarks": [*remarks, *([f"stopped early: {stopped}"] if stopped else [])],
        "command": shlex.join(words) if words else "\n".join(overrides or ()),
        "is_whole": words is not None,  # else these are the keys of the last command
        "beside": [table for table in beside if table is not None],
        "facts": [*_facts(record)],
        "last_values": _values(run, last),
        "curves": curves(run, num_points=300 if is_single else 60),
        "records": [table for table in records if table is not None],
        "config": [(key, setting_text(value)) for key, value in run.config.items() if is_single],
        "traceback": read_or_none(_end_of, RunDir(run.folder).failure) if record else None,
    }


def _list(value: Any) -> list[Any]:
    return value[:MAX_RECORDS] if isinstance(value, list) else []


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of run.json that are not shown elsewhere, and the versions."""
    for key, value in record.items():
        if key not in ELSEWHERE and value not in (None, "", [], {}):
            yield key.replace("num_", "number of ").replace("_", " "), text_of(value)
    yield "versions", text_of(record.get("versions"))


def _times(run: RecordedRun) -> Table:
    sessions = run.sessions or [run.record]
    columns = {
        "session": [*range(1, len(sessions) + 1)],
        "started": [date_text(session.get("started_at")) for session in sessions],
        "start-up": [session.get("startup_s") for session in sessions],
        "whole": [session.get("wall_s") for session in sessions],
    }
    return values_table("Sessions", columns, show=dict.fromkeys(columns, time_text))


def _values(run: RecordedRun, last: Mapping[str, float]) -> Table:
    """Return the last, lowest and highest value of each metric, and medians of speeds."""
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
    return values_table("Metrics", columns)


def _records_table(name: str, records: Sequence[Any]) -> Table | None:
    """Return a table of mappings; None if there are no mappings."""
    lines = [dict(leaves(record)) for record in records if isinstance(record, Mapping)]
    titles = dict.fromkeys(title for line in lines for title in line)
    columns = {title: [line.get(title) for line in lines] for title in titles}
    return values_table(name.replace("_", " ").capitalize(), columns) if titles else None


def _parts(run: RecordedRun) -> Table | None:
    """Return the parts of a step and the rest of its time; None if they were not measured."""
    parts = {name: ms for metric, name in PARTS.items() if (ms := run.result(metric))}
    whole = run.result("perf/step_time_ms")
    if not parts or not whole:
        return None
    parts[REST] = max(0.0, whole - sum(parts.values()))
    columns: dict[str, Sequence[Any]] = {
        "part": [*parts],
        "ms": [*parts.values()],
        "share": [ms / sum(parts.values()) for ms in parts.values()],
    }
    name = "Parts of a step, median without the warm-up"
    return values_table(name, columns, show={"ms": digits, "share": percent})


def _confusion(counts: Any) -> Table | None:
    """Return the confusion matrix; None if there is none, or it has too many classes."""
    if not isinstance(counts, list) or not 0 < len(counts) <= MAX_CLASSES:
        return None
    if any(not isinstance(row, list) or len(row) != len(counts) for row in counts):
        return None
    columns: dict[str, Sequence[Any]] = {"class": range(len(counts))}
    columns |= {str(name): column for name, column in enumerate(zip(*counts, strict=True))}
    name = "Confusion matrix of the last evaluation: true classes in rows, predicted in columns"
    return values_table(name, columns)


def _overrides(folder: Path) -> list[str] | None:
    """Return the overrides of a run's last command; None if they cannot be read."""
    overrides = read_or_none(read_yaml, RunDir(folder).overrides)
    is_valid = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
    return overrides if is_valid else None


def _end_of(path: Path) -> str:
    with open_file(path) as file:
        file.seek(max(0, file.seek(0, 2) - MAX_TRACEBACK))
        return file.read(MAX_TRACEBACK).decode(errors="replace")


def repeating_command(record: Mapping[str, Any], overrides: Sequence[str]) -> list[str] | None:
    """Return the command that repeats a run; None if the `overrides` of its last one do not."""
    groups = record.get("own_groups")
    if not isinstance(groups, list) or not all(
        isinstance(text, str) and text.startswith(("--config-dir=", "hydra.searchpath="))
        for text in groups
    ):
        return None
    # The overrides of a resumed run's first command are not kept.
    if any(text.lstrip("+").startswith("resume=") for text in overrides):
        return None
    return ["python", "-m", "ddp_runner", *groups, *overrides]
