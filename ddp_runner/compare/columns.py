"""The table of a comparison, which every format and the report print. It holds values, no text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddp_runner.compare.analysis import BUSY, SUPERLINEAR, Comparison, ComparisonRow
from ddp_runner.compare.parity import promises_parity
from ddp_runner.compare.settings import Setting, title_of
from ddp_runner.compare.speedup import parts_ms
from ddp_runner.compare.table import Column, Table, cut, digits, percent, setting_text, times
from ddp_runner.errors import counted
from ddp_runner.metric_names import best_end, headlines

MOST_FIRST_KEYS = 6  # before the metrics; more would push them off the screen
FACTS = ("sessions", "startup_s", "wall_s", "time_to_target_s")  # results that are no metrics
PERF = (
    *("perf/samples_per_s", "perf/peak_memory_gib", "perf/comm_share", "perf/skew_ms"),
    *("perf/mfu", "perf/step_time_ms"),
)


@lru_cache(maxsize=1)  # each format and the report print it
def results_table(comparison: Comparison) -> Table:
    """Return the table of a comparison with the columns in which at least one row has something.

    The settings and the metrics come first. Where many keys differ, a label stands for the
    settings, and the keys come after the metrics.
    """
    rows = [*comparison.rows, *comparison.ran_out]
    num_runs = sum(len(row.runs) for row in comparison.rows)
    same = ", ".join(f"{title_of(key)} {value}" for key, value in comparison.same.items())
    headline = f"{counted(num_runs, 'run')} compared" + (f"; all with {same}" if same else "")
    columns = (
        column
        for column in _columns(comparison, rows)
        if any(value is not None for value in column.values)
    )
    directions = {
        name: end for row in rows for run in row.runs for name, end in run.directions.items()
    }
    return Table(
        cut(headline),
        tuple(_marked(column, rows, directions) for column in columns),
        labels=tuple(str(place) for place in range(1, len(rows) + 1)),
        num_runs=tuple(len(row.runs) for row in rows),
    )


def _columns(comparison: Comparison, rows: Sequence[ComparisonRow]) -> Iterator[Column]:
    asked = {one.metric for one in (comparison.best, comparison.target) if one}
    parts = dict.fromkeys(part for row in rows for part in parts_ms(row.stats))
    perf = {*PERF, *(f"perf/{part}_ms" for part in parts)}

    def result(
        name: str,
        title: str = "",
        show: Callable[[Any], str] = digits,
        hint: str = "",
        *,
        is_brief: bool = True,
    ) -> Column:
        key = name.removeprefix("perf/") if name in perf else name
        values = [row.stats.get(name) for row in rows]
        return Column(key, title or name, values, show, hint, is_brief or name in asked)

    settings = [row.setting for row in rows]
    keys = [_key(key, comparison.copies.get(key, ()), settings) for key in comparison.keys]
    has_many_keys = len(keys) > MOST_FIRST_KEYS
    names = sorted({name for row in rows for name in row.stats} - perf.union(FACTS))
    first = [name for name in dict.fromkeys((*sorted(asked), *headlines(names))) if name in names]
    metrics = [result(name) for name in first]
    if has_many_keys:
        yield Column("setting", "setting", [row.label for row in rows])
    else:
        yield from keys
    if comparison.ran_out:
        yield Column("status", "status", [row.runs[0].ran_out or "completed" for row in rows])
    yield from metrics if has_many_keys else ()
    if "seed" in comparison.keys:
        yield Column("run", "run", [str(row.runs[0].folder) for row in rows])
    else:
        counts = [len(row.runs) for row in rows]
        seeds = [len({repr(run.seed) for run in row.runs}) for row in rows]
        hint = "fewer seeds than runs mean that some runs are repetitions"
        yield Column("runs", "runs", counts)
        yield Column("seeds", "seeds", seeds, hint=hint, is_brief=seeds != counts)
    yield from keys if has_many_keys else metrics
    if "num_devices" not in comparison.keys:
        devices = [row.runs[0].num_devices for row in rows]
        yield Column("num_devices", "devices", devices, is_brief=False)
    hint = "median of a run's perf/samples_per_s without its first line, the warm-up"
    yield result("perf/samples_per_s", "samples/s", digits, hint)
    for kind, same in (("strong", "global batch"), ("weak", "batch per rank")):
        yield from _scaling(kind, same, rows)
    hint = (
        f"superlinear means an efficiency above {SUPERLINEAR:.0%}, from a busy machine or cache "
        f"effects; busy machine means that other work used more than {BUSY:.0%} of the cores' time "
        "during a run (load in run.json)"
    )
    yield Column("remark", "remark", [row.speed_remark for row in rows], hint=hint)
    if target := comparison.target:
        hint = (
            "from the first step (start-up excluded) to the first line that reached it; (2 of 3) "
            "means that one run never did"
        )
        title = f"s to {target.metric}={target.value:g}"
        yield result("time_to_target_s", title, digits, hint)
    yield from (result(name, is_brief=False) for name in names if name not in first)
    hint = (
        "peak memory of the rank that needed most (rank 0's in a loop of your own): of its GPU if "
        "it has one, else of its process, in RAM"
    )
    yield result("perf/peak_memory_gib", "memory GiB", digits, hint)
    hint = (
        "its share of the step time; not known of modes whose ranks wait for each other within the "
        "forward and backward, as fsdp and tp"
    )
    yield result("perf/comm_share", "communication", percent, hint)
    hint = (
        "of each step, how long half of the ranks or more waited for the rank that they waited for "
        "most"
    )
    yield result("perf/skew_ms", "skew ms", digits, hint)
    hint = (
        "model FLOP utilisation: the operations of the forward and backward, relative to what the "
        "run's ranks reach in large matrix products"
    )
    yield result("perf/mfu", "MFU", percent, hint)
    hint = (
        "from the command, or from the job's turn in a sweep, to the end of the first step; for a "
        "resumed run, of its first session"
    )
    yield result("startup_s", "start-up s", digits, hint)
    yield result("wall_s", "wall s", is_brief=False)
    yield result("sessions", "sessions", is_brief=False)
    yield result("perf/step_time_ms", "step ms", is_brief=False)
    yield from (result(f"perf/{part}_ms", f"{part} ms", is_brief=False) for part in parts)
    hint = (
        "the losses compared with the reference's, at equal steps, with the same seed and global "
        f"batch; ok: equal to {comparison.tolerance:g} of the loss; rounding grows: a difference "
        "that began as rounding grew slowly to this size, as in any training; breaks: from this "
        "step on, rounding does not explain the difference"
    )
    references = {parity.reference.folder for parity in comparison.parity}
    yield Column("parity", "parity", [_verdict(row, references) for row in rows], hint=hint)


def _key(key: str, copies: Sequence[str], settings: Sequence[Setting]) -> Column:
    title = " = ".join(map(title_of, (key, *copies)))
    return Column(key, title, [one.get(key) for one in settings], setting_text, is_key=True)


def _scaling(kind: str, same: str, rows: Sequence[ComparisonRow]) -> Iterator[Column]:
    """Yield the columns of strong or weak scaling, at a constant batch of this kind."""
    scalings = [row.scalings.get(kind) for row in rows]
    bases = sorted({one.base for one in scalings if one})
    base = bases[0] if len(bases) == 1 else "the setting under against"
    hint = f"samples/s relative to {base}, with the same {same}"
    speedups = [one and one.speedup for one in scalings]
    yield Column(f"{kind}_speedup", f"{kind} speedup", speedups, times, hint)
    hint = "the speedup divided by the ratio of devices (on a CPU, of ranks)"
    efficiencies = [one and one.efficiency for one in scalings]
    yield Column(f"{kind}_efficiency", "efficiency", efficiencies, percent, hint)
    hint = (
        "the speedup from the baseline's computing and the all-reduce that task=collectives "
        "measured, without overlap"
    )
    predicted = [one and one.speedup for one in (row.predicted.get(kind) for row in rows)]
    yield Column(f"{kind}_predicted", "predicted", predicted, times, hint)
    against = [one and one.base for one in scalings]
    yield Column(f"{kind}_against", "against", against, is_brief=len(bases) > 1)


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


def _marked(column: Column, rows: Sequence[ComparisonRow], directions: Mapping[str, str]) -> Column:
    """Return the column with its best rows; a doubtful speed is never the best.

    Where all values are equal, none is.
    """
    end = best_end(column.key, directions) or best_end(f"perf/{column.key}", directions)
    end = "min" if column.key in FACTS[1:] else "max" if column.key.endswith("_speedup") else end
    is_speed = "/" not in column.key or column.key.startswith("perf/")
    numbers = {
        place: order
        for place, row in enumerate(rows)
        if isinstance(order := column.order(place), float) and not (is_speed and row.speed_remark)
    }
    if column.is_key or end is None or len(set(numbers.values())) < 2:
        return column
    best = max(numbers.values()) if end == "max" else min(numbers.values())
    return replace(column, best=frozenset(at for at, value in numbers.items() if value == best))
