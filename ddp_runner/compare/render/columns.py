"""The columns of a comparison, from which each format takes what it shows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.parity import promises_parity
from ddp_runner.compare.rows import BUSY, SUPERLINEAR, ComparisonRow
from ddp_runner.compare.settings import title_of
from ddp_runner.metric_names import headlines


@dataclass(frozen=True)
class Column:
    """One column."""

    key: str  # name in CSV, with the unit
    title: str  # name in text and Markdown
    cell: Callable[[ComparisonRow], Any]  # a Stat, a number, a text; None if a row has nothing
    number: Callable[[float], str]  # format of its numbers
    is_brief: bool = True  # also shown in text and Markdown


def digits(value: float) -> str:
    """Return a number with four significant digits."""
    size = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.3e}" if size < -5 else f"{value:,.{max(0, min(6, 3 - size))}f}"


def cut(text: str, size: int) -> str:
    """Return the beginning of a text: a value in a run folder may have megabytes."""
    return text if len(text) <= size else f"{text[:size]}…"


percent, times = "{:.0%}".format, "{:.2f}x".format


def columns(comparison: Comparison) -> list[Column]:
    """Return the columns in which at least one row has something."""
    return [
        column
        for column in _columns(comparison)
        if any(column.cell(row) is not None for row in comparison.rows)
    ]


def legends(comparison: Comparison) -> dict[str, str]:
    """Return what a reader must know about columns, by their keys."""
    texts = {
        "seeds": "fewer seeds than runs mean that some runs are repetitions",
        "samples_per_s": "median of a run's perf/samples_per_s without its first line, the warm-up",
        "remark": f"superlinear means an efficiency above {SUPERLINEAR:.0%}, from a busy machine "
        f"or cache effects; busy machine means that other work used more than {BUSY:.0%} of the "
        "cores' time during a run (load in run.json)",
        "time_to_target_s": "from the first step (start-up excluded) to the first line that "
        "reached it; (2 of 3) means that one run never did",
        "peak_memory_gib": "peak memory of the rank that needed most (rank 0's in a loop of your "
        "own): of its GPU if it has one, else of its process, in RAM",
        "comm_share": "its share of the step time; not known of modes whose ranks wait for each "
        "other within the forward and backward, as fsdp and tp",
        "skew_ms": "of each step, how long half of the ranks or more waited for the rank that they "
        "waited for most",
        "mfu": "model FLOP utilisation: the operations of the forward and backward, relative to "
        "what the run's ranks reach in large matrix products",
        "startup_s": "from the command, or from the job's turn in a sweep, to the end of the first "
        "step; for a resumed run, of its first session",
        "parity": "the losses compared with the reference's, at equal steps, with the same seed "
        f"and global batch; ok: equal to {comparison.tolerance:g} of the loss; rounding grows: a "
        "difference that began as rounding grew slowly to this size, as in any training; breaks: "
        "from this step on, rounding does not explain the difference",
    }
    for kind, same in (("strong", "global batch"), ("weak", "batch per rank")):
        bases = _bases(comparison, kind)
        base = bases[0] if len(bases) == 1 else "the setting under against"
        texts |= {
            f"{kind}_speedup": f"samples/s relative to {base}, with the same {same}",
            f"{kind}_efficiency": "the speedup divided by the ratio of devices "
            "(on a CPU, of ranks)",
            f"{kind}_predicted": "the speedup from the baseline's computing and the all-reduce "
            "that task=collectives measured, without overlap",
        }
    return texts


def _columns(comparison: Comparison) -> Iterator[Column]:
    rows = comparison.rows
    for key in comparison.keys:
        title = " = ".join(map(title_of, (key, *comparison.copies.get(key, ()))))
        yield Column(key, title, _value("setting", key), str)
    if "seed" in comparison.keys:
        yield Column("run", "run", lambda row: str(row.runs[0].folder), str)
    else:
        has_repetitions = any(_num_seeds(row) < len(row.runs) for row in rows)
        yield Column("runs", "runs", lambda row: len(row.runs), str)
        yield Column("seeds", "seeds", _num_seeds, str, is_brief=has_repetitions)
    if "num_devices" not in comparison.keys:
        yield Column("num_devices", "devices", lambda row: row.num_devices, str, is_brief=False)
    asked = [one.metric for one in (comparison.best, comparison.target) if one]
    names = sorted({name for row in rows for name in row.metrics})
    first = [one for one in dict.fromkeys([*asked, *headlines(names)]) if one in names]
    for name in first:
        yield Column(name, name, _value("metrics", name), digits)
    yield Column("samples_per_s", "samples/s", lambda row: row.samples_per_s, digits)
    for kind in ("strong", "weak"):
        yield from _scaling(kind, has_several_bases=len(_bases(comparison, kind)) > 1)
    yield Column("remark", "remark", lambda row: row.speed_remark, str)
    if target := comparison.target:
        title = f"s to {target.metric}={target.value:g}"
        yield Column("time_to_target_s", title, lambda row: row.time_to_target_s, digits)
    for name in (one for one in names if one not in first):
        yield Column(name, name, _value("metrics", name), digits, is_brief=False)
    yield Column("peak_memory_gib", "memory GiB", lambda row: row.peak_memory_gib, digits)
    yield Column("comm_share", "communication", lambda row: row.comm_share, percent)
    yield Column("skew_ms", "skew ms", lambda row: row.skew_ms, digits)
    yield Column("mfu", "MFU", lambda row: row.mfu, percent)
    yield Column("startup_s", "start-up s", lambda row: row.startup_s, digits)
    yield Column("wall_s", "wall s", lambda row: row.wall_s, digits, is_brief=False)
    yield Column("sessions", "sessions", lambda row: row.num_sessions, digits, is_brief=False)
    yield Column("step_time_ms", "step ms", lambda row: row.step_time_ms, digits, is_brief=False)
    for name in dict.fromkeys(name for row in rows for name in row.step_parts_ms):
        cell = _value("step_parts_ms", name)
        yield Column(f"{name}_ms", f"{name} ms", cell, digits, is_brief=False)
    references = {parity.reference.folder for parity in comparison.parity}
    yield Column("parity", "parity", lambda row: _verdict(row, references), str)


def _value(field: str, key: str) -> Callable[[ComparisonRow], Any]:
    """Return a cell: the value of a key in a field that holds a mapping."""
    return lambda row: getattr(row, field).get(key)


def _num_seeds(row: ComparisonRow) -> int:
    return len({repr(run.seed) for run in row.runs})


def _bases(comparison: Comparison, kind: str) -> list[str]:
    return sorted({row.scalings[kind].base for row in comparison.rows if kind in row.scalings})


def _scaling(kind: str, *, has_several_bases: bool) -> Iterator[Column]:
    """Yield the columns of strong or weak scaling."""

    def fact(field: str, name: str) -> Callable[[ComparisonRow], Any]:
        return lambda row: getattr(getattr(row, field).get(kind), name, None)

    yield Column(f"{kind}_speedup", f"{kind} speedup", fact("scalings", "speedup"), times)
    yield Column(f"{kind}_efficiency", "efficiency", fact("scalings", "efficiency"), percent)
    yield Column(f"{kind}_predicted", "predicted", fact("predicted", "speedup"), times)
    yield Column(f"{kind}_against", "against", fact("scalings", "base"), str, has_several_bases)


def _verdict(row: ComparisonRow, references: set[Path]) -> str | None:
    """Return the worst verdict of a row's runs; None if they have none."""
    if row.parity:  # the earliest break, else the largest difference
        worst = min(
            row.parity,
            key=lambda parity: (parity.first_break is None, parity.first_break or -parity.largest),
        )
        return worst.verdict
    if references & {run.folder for run in row.runs}:
        return "reference"
    is_promised = not references or all(promises_parity(run) for run in row.runs)
    return None if is_promised else "not promised"
