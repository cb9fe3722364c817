"""What a report says about one run: how to repeat it, how it went, its last values, its curves."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ddp_runner.compare.recorded_run import RecordedRun
from ddp_runner.compare.speedup import REST
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
from ddp_runner.files import open_file, read_yaml
from ddp_runner.metric_names import LINE_FIELDS, StepPart, headlines
from ddp_runner.tracking.run_dir import RunDir

SIZE = 10_000  # of a chart, in the units of its path: readings have four digits
MAX_DOTTED = 40  # points of a curve that are marked
LOG_FROM = 50  # highest divided by lowest value from which a logarithmic scale shows more

Point = tuple[float, float]  # step and value; nan: the value is not finite


@dataclass(frozen=True)
class Curve:
    """A curve, as wide and as high as its values reach."""

    name: str
    path: str  # the data of an SVG path, in a square of SIZE from the top left
    dots: str  # the same for its points; empty if they are many
    first: float  # step
    last: float
    low: float
    high: float
    is_log: bool


def curves(run: RecordedRun, *, num_points: int) -> list[Curve]:
    """Return a curve for each metric that changed; each has about `num_points` points at most."""
    logged = dict.fromkeys(name for line in run.lines for name in line)
    names = dict.fromkeys([*headlines(logged), *logged])
    made = (_curve(run, name, num_points) for name in names if name not in LINE_FIELDS)
    return [curve for curve in made if curve is not None]


def thinned(points: Sequence[Point], num_points: int) -> list[Point]:
    """Return the lowest, the highest and a missing point of each stretch: no spike is lost."""
    size = math.ceil(2 * len(points) / num_points)
    if size <= 2:
        return list(points)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        known = [point for point in stretch if not math.isnan(point[1])]
        ends = {min(known, key=itemgetter(1)), max(known, key=itemgetter(1))} if known else set()
        gaps = [point for point in stretch if math.isnan(point[1])]
        kept += sorted((*ends, *gaps[:1]), key=itemgetter(0))
    return kept


def _curve(run: RecordedRun, name: str, num_points: int) -> Curve | None:
    found = [(line["step"] or 0.0, line[name]) for line in run.lines if name in line]
    points = [(step, math.nan if value is None else value) for step, value in found]
    values = run.values(name)
    if len(values) < 2 or min(values) == max(values):
        return None
    low, high, first, last = min(values), max(values), points[0][0], points[-1][0]
    is_log = low > 0 and high / low >= LOG_FROM
    bottom, top = (math.log(low), math.log(high)) if is_log else (low, high)

    def place(step: float, value: float) -> str:
        across = (step - first) / ((last - first) or 1)
        up = ((math.log(value) if is_log else value) - bottom) / ((top - bottom) or 1)
        return f"{round(SIZE * across)},{round(SIZE * (1 - up))}"

    shown = thinned(points, num_points)
    stretches = groupby(shown, key=lambda point: math.isnan(point[1]))
    parts = [[place(*point) for point in part] for is_gap, part in stretches if not is_gap]
    path = "".join(f"M{' '.join(part)}" for part in parts)
    # A line without length has round ends: a dot that no scaling deforms.
    dots = "".join(f"M{one}h0" for part in parts for one in part)
    dots = dots if len(shown) <= MAX_DOTTED else ""
    return Curve(name, path, dots, first, last, low, high, is_log)


MAX_CLASSES = 30  # of a confusion matrix that a reader can follow
MAX_TRACEBACK = 4_000  # bytes; its end says what went wrong
MAX_RECORDS = 500  # lines of task=check or task=collectives
RECORDS = ("checks", "collectives", "not_in_backend")  # fields that are tables
# Fields of run.json that have a place of their own, or that mean nothing to a reader.
ELSEWHERE = {
    *("status", "error", "metrics", "sessions", "started_at", "startup_s", "wall_s", "versions"),
    *("finished_at", "confusion_matrix", "warnings", "directions", "launches", "tags", "notes"),
    *("host", "stopped_early", "own_groups", "loaded", "sweep", *RECORDS),
}


@dataclass(frozen=True)
class Card:
    """A run and how the report refers to it."""

    run: RecordedRun
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


def details(card: Card, *, is_single: bool) -> dict[str, Any]:
    """Return what the template shows of a run, whatever its files hold; what is empty is left out.

    Args:
        card: The run; one that cannot be compared has what could be read of it.
        is_single: Whether the page is about this run only: then list the whole config, too.
    """
    run, record = card.run, card.run.record
    # A run that did not end has no metrics but those of its lines.
    logged = ((name, value) for line in run.lines for name, value in line.items())
    last = {name: value for name, value in logged if value is not None}
    last = {name: value for name, value in last.items() if name not in LINE_FIELDS} | run.final
    beside = _times(run), _parts(run), _confusion(record.get("confusion_matrix"))
    records = (_records_table(name, _list(record.get(name))) for name in RECORDS)
    overrides = _overrides(run.folder) if record else None  # else it may be a link
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
        "command": shlex.join(words or ()),  # that repeats it
        # Of its last command, which does not repeat it.
        "last_keys": "" if words else "\n".join(overrides or ()),
        "beside": [table for table in beside if table is not None],
        "facts": [*_facts(record)],
        "last_values": _values(run, last),
        "curves": curves(run, num_points=300 if is_single else 60),
        "records": [table for table in records if table is not None],
        "config": [(key, setting_text(value)) for key, value in run.config.items() if is_single],
        "traceback": _traceback(run.folder) if record else "",
    }


def _list(value: Any) -> list[Any]:
    return value[:MAX_RECORDS] if isinstance(value, list) else []


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every field of run.json that has no place of its own, and the versions."""
    for key, value in record.items():
        if key not in ELSEWHERE and value not in (None, "", [], {}):
            yield key.replace("num_", "number of ").replace("_", " "), text_of(value)
    yield "versions", text_of(record.get("versions"))


def _times(run: RecordedRun) -> Table:
    sessions = run.sessions or [run.record]
    columns = {
        "session": [*range(1, len(sessions) + 1)],
        "started": [date_text(one.get("started_at")) for one in sessions],
        "start-up": [one.get("startup_s") for one in sessions],
        "whole": [one.get("wall_s") for one in sessions],
    }
    return values_table("Sessions", columns, show=dict.fromkeys(columns, time_text))


def _values(run: RecordedRun, last: Mapping[str, float]) -> Table:
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
    return values_table("Metrics", columns)


def _records_table(name: str, records: Sequence[Any]) -> Table | None:
    """Return the table of mappings that have about the same fields; None if there is none."""
    lines = [dict(leaves(record)) for record in records if isinstance(record, Mapping)]
    titles = dict.fromkeys(title for line in lines for title in line)
    columns = {title: [line.get(title) for line in lines] for title in titles}
    return values_table(name.replace("_", " ").capitalize(), columns) if titles else None


def _parts(run: RecordedRun) -> Table | None:
    """Return the parts of a step with the rest of its time; None if they were not measured."""
    measured = {part.value: run.result(part.metric) for part in StepPart}
    parts = {name: ms for name, ms in measured.items() if ms}
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
    """Return the counts of the last evaluation; None if there are none, or too many."""
    if not (isinstance(counts, list) and all(isinstance(row, list) for row in counts)):
        return None
    if not 0 < len(counts) <= MAX_CLASSES or any(len(row) != len(counts) for row in counts):
        return None
    columns: dict[str, Sequence[Any]] = {"class": range(len(counts))}
    columns |= {str(place): one for place, one in enumerate(zip(*counts, strict=True))}
    name = (
        "Confusion matrix of the last evaluation: true classes in rows, predicted ones in columns"
    )
    return values_table(name, columns)


def _overrides(folder: Path) -> list[str] | None:
    """Return the overrides of a run's last command; None if they cannot be read."""
    try:
        overrides = read_yaml(RunDir(folder).overrides)
    except Exception:  # PyYAML raises errors of any type
        return None
    is_valid = isinstance(overrides, list) and all(isinstance(one, str) for one in overrides)
    return overrides if is_valid else None


def _traceback(folder: Path) -> str:
    """Return the end of the traceback that ended a run; empty if there is none."""
    try:
        with open_file(RunDir(folder).failure) as file:
            file.seek(max(0, file.seek(0, 2) - MAX_TRACEBACK))
            return file.read(MAX_TRACEBACK).decode(errors="replace")
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
