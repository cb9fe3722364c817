"""The columns of a comparison's table, from which each format takes what it shows."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.doubts import LEGEND, remark
from ddp_runner.compare.parity import promises_parity
from ddp_runner.compare.rows import Row
from ddp_runner.compare.settings import word
from ddp_runner.compare.stats import Stat
from ddp_runner.metric_names import HEADLINES

NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """A column: its cells are a Stat, a number, a word, or None where a row has nothing."""

    key: str  # in CSV; with the unit
    title: str  # in tables that people read
    cells: tuple[Any, ...]  # one for each row
    number: Callable[[float], str]  # how its numbers are written
    is_brief: bool = True  # shown in tables that people read, too
    legend: str = ""  # what is to be known about it


def columns(comparison: Comparison) -> list[Column]:
    """Return the columns in which any row has something."""
    return [one for one in _columns(comparison) if any(cell is not None for cell in one.cells)]


def digits(value: float) -> str:
    """Return a number with four digits that count."""
    size = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.3e}" if size < -5 else f"{value:,.{max(0, min(6, 3 - size))}f}"


def _columns(comparison: Comparison) -> Iterator[Column]:
    rows = comparison.rows

    def column(key: str, title: str, cell: Callable[[Row], Any], **options: Any) -> Column:
        cells = tuple(cell(row) for row in rows)
        return Column(key, title, cells, **{"number": digits, **options})

    for key in comparison.keys:
        yield column(key, word(key), partial(_setting, key), number=str)
    if "seed" in comparison.keys:
        yield column("run", "run", lambda row: str(row.runs[0].folder))
    else:
        yield column("runs", "runs", lambda row: len(row.runs), number=str)
        yield column(
            *("seeds", "seeds", lambda row: len({repr(run.seed) for run in row.runs})),
            number=str,
            is_brief=any(len({repr(one.seed) for one in row.runs}) < len(row.runs) for row in rows),
            legend="runs: those of a setting; with fewer seeds than runs, some are repetitions",
        )
    if "num_devices" not in comparison.keys:
        yield column(
            "num_devices", "devices", lambda row: row.num_devices, number=str, is_brief=False
        )
    yield column(
        *("samples_per_s", "samples/s", lambda row: row.samples_per_s),
        legend="samples/s: the median of a run's perf/samples_per_s without its first line, the "
        "warm-up",
    )
    for kind in ("strong", "weak"):
        yield from _scaling(kind, rows, column)
    yield column("remark", "remark", remark, legend=LEGEND)
    if comparison.target is not None:
        goal = f"{comparison.target.metric}={comparison.target.value:g}"
        yield column(
            *("time_to_target_s", f"s to {goal}", lambda row: row.time_to_target_s),
            legend=f"s to {goal}: from the first step, start-up left out, to the first line that "
            "reached it; with (2 of 3), the others never did",
        )
    asked = [comparison.best.metric] if comparison.best else []
    asked += [comparison.target.metric] if comparison.target else []
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    for name in sorted(names, key=lambda name: (name not in HEADLINES, name)):
        is_brief = name in HEADLINES or name in asked
        yield column(name, name, partial(_metric, name), is_brief=is_brief)
    yield column(
        *("peak_memory_gib", "memory GiB", lambda row: row.peak_memory_gib),
        legend="memory GiB: the most that rank 0 held; of its GPU where it has one, else RAM",
    )
    yield column(
        *("comm_share", "communication", lambda row: row.comm_share),
        number="{:.0%}".format,
        legend="communication: its part of the step time",
    )
    yield column(
        *("startup_s", "start-up s", lambda row: row.startup_s),
        legend="start-up s: from the command, or the job's turn in a sweep, to the end of the "
        "first step; of the first session, where a run was resumed",
    )
    yield column("wall_s", "wall s", lambda row: row.wall_s, is_brief=False)
    yield column("sessions", "sessions", lambda row: row.num_sessions, is_brief=False)
    yield column("step_time_ms", "step ms", lambda row: row.step_time_ms, is_brief=False)
    for name in dict.fromkeys(name for row in rows for name in row.step_parts_ms):
        yield column(f"{name}_ms", f"{name} ms", partial(_step_part, name), is_brief=False)
    references = {one.reference.folder for one in comparison.parity}
    yield column(
        *("parity", "parity", lambda row: _parity(row, references)),
        legend="parity: losses at equal steps, with one seed and one global batch, against the "
        f"reference's: ok is to {comparison.tolerance:g} of themselves; rounding grows: they began "
        "equal to rounding and parted little by little, as training makes any difference larger, "
        "by so much; breaks: more than rounding sets them apart, from that step on",
    )


def _scaling(kind: str, rows: Sequence[Row], column: Callable[..., Column]) -> Iterator[Column]:
    def of(row: Row, name: str) -> Any:
        scaling = getattr(row, kind)
        return None if scaling is None else getattr(scaling, name)

    bases = sorted({of(row, "base") for row in rows} - {None})
    equal = {"strong": "one global batch", "weak": "one batch per rank"}[kind]
    against = bases[0] if len(bases) == 1 else "the row named"
    yield column(
        *(f"{kind}_speedup", f"{kind} speedup", lambda row: of(row, "speedup")),
        number="{:.2f}x".format,
        legend=f"{kind} speedup: samples/s over that of {against}, with {equal}; efficiency: the "
        "speedup over the ratio of the devices (on a CPU, of the ranks)",
    )
    yield column(
        *(f"{kind}_efficiency", "efficiency", lambda row: of(row, "efficiency")),
        number="{:.0%}".format,
    )
    yield column(
        *(f"{kind}_predicted", "predicted", lambda row: _predicted(kind, row)),
        number="{:.2f}x".format,
        legend="predicted: the speedup with the baseline's computing and an all-reduce as "
        "task=collectives has measured it, none of it hidden",
    )
    is_brief = len(bases) > 1
    yield column(f"{kind}_against", "against", lambda row: of(row, "base"), is_brief=is_brief)


def _predicted(kind: str, row: Row) -> float | None:
    prediction = row.predicted.get(kind)
    return None if prediction is None else prediction.speedup


def _setting(key: str, row: Row) -> Any:
    return row.setting[key]


def _metric(name: str, row: Row) -> Stat | None:
    return row.metrics.get(name)


def _step_part(name: str, row: Row) -> float | None:
    return row.step_parts_ms.get(name)


def _parity(row: Row, references: set[Any]) -> str | None:
    breaks = [one for one in row.parity if one.first_break is not None]
    if breaks:
        return min(breaks, key=lambda one: one.first_break or 0).verdict
    if row.parity:
        return max(row.parity, key=lambda one: one.largest).verdict
    if references & {run.folder for run in row.runs}:
        return "reference"
    is_promised = not references or all(promises_parity(run) for run in row.runs)
    return None if is_promised else "not promised"
