"""The columns of a comparison's table, for all formats and the report."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from ddp_runner.compare.analysis import BUSY, NO_METRICS, SUPERLINEAR, Comparison, ComparisonRow
from ddp_runner.compare.parity import promises_parity
from ddp_runner.compare.recorded_run import Stat
from ddp_runner.compare.settings import BATCH_SIZES, rounded, title_of
from ddp_runner.compare.speedup import SCALINGS, parts_ms
from ddp_runner.compare.table import Column, Table, cut, digits, percent, setting_text, times
from ddp_runner.errors import counted
from ddp_runner.metric_names import best_end, headlines

MAX_FIRST_KEYS = 6  # keys before the metrics; more would push the metrics off the screen
PERF = (
    *("perf/samples_per_s", "perf/peak_memory_gib", "perf/comm_share", "perf/skew_ms"),
    *("perf/mfu", "perf/step_time_ms"),
)


@lru_cache(maxsize=1)  # shared by all formats and the report
def results_table(comparison: Comparison) -> Table:
    """Return the table of a comparison without empty columns.

    The settings and the metrics come first. If many keys differ, a label replaces the settings, and
    the keys come after the metrics.
    """
    rows = comparison.all_rows
    num_runs = sum(len(row.runs) for row in comparison.rows)
    same = ", ".join(f"{title_of(key)} {value}" for key, value in comparison.same.items())
    headline = f"{counted(num_runs, 'run')} compared" + (f"; all with {same}" if same else "")
    columns = _columns(comparison)
    return Table(
        cut(headline),
        tuple(column for column in columns if any(value is not None for value in column.values)),
        labels=tuple(str(number) for number in range(1, len(rows) + 1)),
        num_runs=tuple(len(row.runs) for row in rows),
    )


class _Results:
    """Makes the columns of the rows' results: metrics, speeds, times and costs."""

    def __init__(self, comparison: Comparison) -> None:
        options = (comparison.best, comparison.target)
        self._rows, self._chosen = comparison.all_rows, {item.metric for item in options if item}
        runs = [run for row in self._rows for run in row.runs]
        self._directions = {name: end for run in runs for name, end in run.directions.items()}
        self.parts = list(dict.fromkeys(part for row in self._rows for part in parts_ms(row.stats)))
        self._perf = {*PERF, *(f"perf/{part}_ms" for part in self.parts)}
        logged = {name for row in self._rows for name in row.stats} - self._perf - NO_METRICS
        names = dict.fromkeys((*sorted(self._chosen & logged), *headlines(sorted(logged))))
        self.first = [self.column(name) for name in names]
        self.others = [self.column(name, is_brief=False) for name in sorted(logged - {*names})]

    def column(
        self,
        name: str,
        title: str = "",
        show: Callable[[float], str] = digits,
        hint: str = "",
        *,
        is_brief: bool = True,
    ) -> Column:
        end = "min" if name in NO_METRICS - {"sessions"} else best_end(name, self._directions)
        is_speed = name in NO_METRICS or name.startswith("perf/")
        values = [row.stats.get(name) for row in self._rows]
        return Column(
            name.removeprefix("perf/") if name in self._perf else name,
            title or name,
            values,
            show,
            hint,
            is_brief=is_brief or name in self._chosen,
            best=_best_rows(values, end, self._rows if is_speed else ()),
        )


def _columns(comparison: Comparison) -> Iterator[Column]:
    rows, results = comparison.all_rows, _Results(comparison)
    keys = [_key_column(key, comparison) for key in comparison.keys]
    has_many_keys = sum(column.is_brief for column in keys) > MAX_FIRST_KEYS
    if has_many_keys:
        yield Column("setting", "setting", [row.label for row in rows])
    else:
        yield from keys
    if comparison.ran_out:
        yield Column("status", "status", [row.runs[0].ran_out or "completed" for row in rows])
    yield from results.first if has_many_keys else ()
    yield from _runs(comparison)
    yield from keys if has_many_keys else results.first
    yield from _speeds(comparison, results)
    yield from results.others
    yield from _costs(results)
    times = [("wall_s", "wall s"), ("sessions", ""), ("perf/step_time_ms", "step ms")]
    times += [(f"perf/{part}_ms", f"{part} ms") for part in results.parts]
    yield from (results.column(name, title, is_brief=False) for name, title in times)
    yield _parity(comparison)


def _runs(comparison: Comparison) -> Iterator[Column]:
    """Yield the folder of each row's only run, or else the numbers of its runs and seeds."""
    rows = comparison.all_rows
    if "seed" in comparison.keys:
        yield Column("run", "run", [str(row.runs[0].folder) for row in rows])
        return
    counts = [len(row.runs) for row in rows]
    seeds = [len({repr(run.seed) for run in row.runs}) for row in rows]
    hint = "fewer than runs where runs repeat a seed; results of a single seed have no ±"
    yield Column("runs", "runs", counts)
    yield Column("seeds", "seeds", seeds, hint=hint, is_brief=seeds != counts)


def _speeds(comparison: Comparison, results: _Results) -> Iterator[Column]:
    """Yield the devices, the speed and its scalings, and the time to the target."""
    rows = comparison.all_rows
    if "num_devices" not in comparison.keys:
        devices = [row.runs[0].num_devices for row in rows]
        yield Column("num_devices", "devices", devices, is_brief=False)
    hint = "median of a run's perf/samples_per_s without its first line, the warm-up"
    yield results.column("perf/samples_per_s", "samples/s", digits, hint)
    for kind in SCALINGS:
        yield from _scaling(kind, rows)
    hint = (
        f"superlinear: an efficiency above {SUPERLINEAR:.0%}, by cache effects or a busy machine; "
        f"busy machine: other work used more than {BUSY:.0%} of the cores' time"
    )
    yield Column("remark", "remark", [row.speed_remark for row in rows], hint=hint)
    if target := comparison.target:
        hint = "from the first step to the first line that reached it; (2 of 3): a run never did"
        title = f"s to {target.metric}={target.value:g}"
        yield results.column("time_to_target_s", title, digits, hint)


def _costs(results: _Results) -> Iterator[Column]:
    hint = "highest peak of a rank, on its GPU or else in RAM; in your own loop, of rank 0"
    yield results.column("perf/peak_memory_gib", "memory GiB", digits, hint)
    hint = "share of the step time; unknown where ranks wait within a forward, as in fsdp and tp"
    yield results.column("perf/comm_share", "communication", percent, hint)
    hint = "time per step that at least half of the ranks waited for the slowest rank"
    yield results.column("perf/skew_ms", "skew ms", digits, hint)
    hint = "model FLOP utilisation, relative to the ranks' speed in large matrix products"
    yield results.column("perf/mfu", "MFU", percent, hint)
    hint = "from the command, or from the job's turn in a sweep, to the end of the first step"
    yield results.column("startup_s", "start-up s", digits, hint)


def _parity(comparison: Comparison) -> Column:
    hint = (
        "losses compared with the reference at equal steps; equal bytes: the weights after the "
        "last step are equal bit for bit; ok: equal to "
        f"{comparison.tolerance:g} of the loss; rounding grows: rounding grew slowly to this size, "
        "as in any training; breaks: from this step on, rounding does not explain the difference"
    )
    references = {parity.reference.folder for parity in comparison.parity}
    verdicts = [_verdict(row, references) for row in comparison.all_rows]
    return Column("parity", "parity", verdicts, hint=hint)


def _key_column(key: str, comparison: Comparison) -> Column:
    """Return the column of a key of the settings; not brief if the headline has it."""
    values = [row.setting.get(key) for row in comparison.all_rows]
    texts = dict(zip(map(repr, values), map(setting_text, rounded(values)), strict=True))
    is_rounded = any(texts[repr(value)] != setting_text(value) for value in values)
    return Column(
        key,
        " = ".join(map(title_of, (key, *comparison.copies.get(key, ())))),
        values,
        lambda value: texts[repr(value)],
        hint="rounded; CSV and JSON have all digits" if is_rounded else "",
        is_brief=key not in comparison.same,
        is_key=True,
    )


def _scaling(kind: str, rows: Sequence[ComparisonRow]) -> Iterator[Column]:
    scalings = [row.scalings.get(kind) for row in rows]
    bases = sorted({scaling.base for scaling in scalings if scaling})
    base = bases[0] if len(bases) == 1 else "the setting under against"
    hint = f"samples/s relative to {base}, with the same {BATCH_SIZES[SCALINGS[kind]]}"
    speedups = [scaling.speedup if scaling else None for scaling in scalings]
    best = _best_rows(speedups, "max", rows)
    yield Column(f"{kind}_speedup", f"{kind} speedup", speedups, times, hint, best=best)
    hint = "the speedup divided by the ratio of devices (on a CPU, of ranks)"
    efficiencies = [scaling and scaling.efficiency for scaling in scalings]
    yield Column(f"{kind}_efficiency", "efficiency", efficiencies, percent, hint)
    hint = "from the baseline's computing and the all-reduce of task=collectives, without overlap"
    steps = [scaling and scaling.predicted for scaling in scalings]
    predicted = [step and step.speedup for step in steps]
    yield Column(f"{kind}_predicted", "predicted", predicted, times, hint)
    against = [scaling and scaling.base for scaling in scalings]
    yield Column(f"{kind}_against", "against", against, is_brief=len(bases) > 1)


def _verdict(row: ComparisonRow, references: set[Path]) -> str | None:
    """Return the worst verdict of a row's runs; None if no run has a verdict."""
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


def _best_rows(
    values: Sequence[Stat | float | None], end: str | None, timed: Sequence[ComparisonRow]
) -> frozenset[int]:
    """Return the rows with the best value, max or min; none if all are equal.

    `timed` has the rows if the values are speeds or times: doubtful speeds are never the best.
    """
    doubtful = {index for index, row in enumerate(timed) if row.speed_remark}
    means = {
        index: value.mean if isinstance(value, Stat) else value
        for index, value in enumerate(values)
        if value is not None and index not in doubtful
    }
    if end is None or len(set(means.values())) < 2:
        return frozenset()
    best = max(means.values()) if end == "max" else min(means.values())
    return frozenset(index for index, mean in means.items() if mean == best)
