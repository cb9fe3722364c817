"""Compare runs: one row per setting with its speed, cost and results.

This module only computes; ``render`` shows the result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.compare.parity import Parity, parities
from ddp_runner.compare.rows import ComparisonRow, warnings_about
from ddp_runner.compare.run import Run, Stat, Target, stat
from ddp_runner.compare.settings import (
    Setting,
    identity,
    labels,
    same_keys,
    tied_keys,
    varied_keys,
    with_copies,
)
from ddp_runner.compare.speedup import AllReduceFit, fit_all_reduces, with_speedups
from ddp_runner.errors import UserError
from ddp_runner.metric_names import LINE_FIELDS, METRICS, is_lower_better

NO_PARTS = ("step_time_ms", "skew_ms")  # other times that perf/ has
TOLERANCE = 1e-3  # relative difference of losses that still counts as parity


@dataclass(frozen=True)
class Best:
    """The setting with the best mean of a metric: a single run may owe its value to luck."""

    metric: str
    mode: str  # max or min
    row: ComparisonRow
    value: Stat


@dataclass(frozen=True)
class RunNote:
    """A sentence about one run."""

    folder: Path
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """The result of comparing runs."""

    keys: tuple[str, ...]  # in which rows differ
    copies: Mapping[str, Sequence[str]]  # of these, the keys that have the same values
    over: tuple[str, ...]  # in which the runs of a row differ
    same: Setting  # the main keys that are equal in all rows
    rows: tuple[ComparisonRow, ...]  # ordered by their settings
    all_reduces: tuple[AllReduceFit, ...]  # on which predictions are based
    parity: tuple[Parity, ...]
    tolerance: float  # of parity
    target: Target | None
    best: Best | None
    warnings: tuple[str, ...]  # why rows may not be comparable, and doubtful speeds
    notes: tuple[RunNote, ...]  # about runs that are in a row
    skipped: tuple[RunNote, ...]  # why a run is in no row


def compare(
    runs: Sequence[Run],
    *,
    target: Target | None = None,
    best: str | None = None,
    mode: str | None = None,
    over: str = "seed",
    tolerance: float = TOLERANCE,
    each: bool = False,
    include_parallel_jobs: bool = False,
) -> Comparison:
    """Compare runs, grouped by their settings.

    Args:
        runs: The result of ``read_runs``.
        target: Add the time until it was reached.
        best: Name the best setting by this metric.
        mode: max or min is best; None to derive it from the name of the metric.
        over: A key whose values are repetitions, such as the fold of a dataset, beside the seed.
        tolerance: Relative difference of losses that still counts as parity.
        each: Make a row for each run instead of one for all seeds of a setting.
        include_parallel_jobs: Count runs that shared the machine with parallel jobs for speedups.

    Raises:
        UserError: no run has the metric of `target` or of `best`, or no two differ in `over`.
    """
    usable = [run for run in runs if run.reason is None]
    benchmarks = [run for run in usable if "collectives" in run.record]
    # Beside training runs, benchmarks only serve predictions and have no rows.
    usable = [run for run in usable if "collectives" not in run.record] or benchmarks
    # An evaluation of a run is no training: beside one it has no speed, steps or parity.
    evaluations = [run for run in usable if "of_run" in run.record]
    others = [run for run in usable if "of_run" not in run.record]
    usable, left_out = (others, evaluations) if others else (evaluations, [])
    _validate_metrics(usable, target=target, best=best)
    settings = [run.setting for run in usable]
    averaged = tied_keys(settings, over) if over != "seed" else ()
    settings = [{key: one[key] for key in one if key not in averaged} for one in settings]
    copies = with_copies(varied_keys(settings), settings)
    keys = (*copies, *(["seed"] if each else []))
    fits = fit_all_reduces(benchmarks)
    parity = {result.run.folder: result for result in parities(usable, tolerance=tolerance)}
    groups: dict[str, list[Run]] = {}
    for run in usable:
        name = str(run.folder) if each else identity(run.setting, without=averaged)
        groups.setdefault(name, []).append(run)
    shown = [{key: _value(group[0], key) for key in keys} for group in groups.values()]
    named = zip(labels(shown), shown, groups.values(), strict=True)
    rows = [_row(*one, target=target, parity=parity) for one in named]
    rows = with_speedups(rows, fits, include_parallel_jobs=include_parallel_jobs)
    rows.sort(key=lambda row: [_order(value) for value in row.setting.values()])
    return Comparison(
        keys=keys,
        copies=copies,
        over=("seed", *averaged),
        same=same_keys(settings),
        rows=tuple(rows),
        all_reduces=tuple(fits.values()),
        parity=tuple(parity.values()),
        tolerance=tolerance,
        target=target,
        best=_best(rows, best, mode=mode) if best and rows else None,
        warnings=tuple(warnings_about(rows, usable)),
        notes=tuple(RunNote(run.folder, note) for run in usable for note in run.notes),
        skipped=(
            *(RunNote(run.folder, run.reason) for run in runs if run.reason is not None),
            *(RunNote(run.folder, _evaluates(run)) for run in left_out),
        ),
    )


def _evaluates(run: Run) -> str:
    return f"an evaluation of {run.record['of_run']}; name only evaluations to compare them"


def _validate_metrics(runs: Sequence[Run], *, target: Target | None, best: str | None) -> None:
    logged = {name for run in runs for line in run.lines for name in line}
    logged -= LINE_FIELDS
    asked = [("--target", target.metric, logged)] if target else []
    if best is not None:
        names = logged.union(*(run.final for run in runs))
        with_result = {name for run in runs for name in names if run.result(name) is not None}
        asked.append(("--best", best, with_result))
    for option, metric, names in asked:
        if runs and metric not in names:
            known = ", ".join(sorted(names))
            raise UserError(f"{option} ({metric}) is a metric of no run; use one of {known}")


def _value(run: Run, key: str) -> Any:
    return run.seed if key == "seed" else run.setting.get(key)


def _row(
    label: str,
    setting: Setting,
    runs: Sequence[Run],
    *,
    target: Target | None,
    parity: Mapping[Path, Parity],
) -> ComparisonRow:
    """Return the row of runs that differ only in their seeds, without its scalings."""

    def result(name: str) -> Stat | None:
        return stat(run.result(f"perf/{name}") for run in runs)

    finals = [run.final for run in runs]
    no_quantities = {metric.name for metric in METRICS if not metric.is_quantity}
    names = sorted(set[str]().union(*finals) - no_quantities)
    metrics = {name: stat(final.get(name) for final in finals) for name in names}
    logged = dict.fromkeys(name for run in runs for line in run.lines for name in line)
    perf = [name.removeprefix("perf/") for name in logged if name.startswith("perf/")]
    times = [name for name in perf if name.endswith("_ms") and name not in NO_PARTS]
    parts = {name.removesuffix("_ms"): result(name) for name in times}
    return ComparisonRow(
        label=label,
        setting=setting,
        world_size=runs[0].world_size,
        num_devices=runs[0].num_devices,
        runs=tuple(runs),
        samples_per_s=result("samples_per_s"),
        time_to_target_s=stat(target.time_s(run) for run in runs) if target else None,
        metrics={name: value for name, value in metrics.items() if value is not None},
        peak_memory_gib=result("peak_memory_gib"),
        comm_share=result("comm_share"),
        skew_ms=result("skew_ms"),
        mfu=result("mfu"),
        startup_s=stat(run.number("startup_s") for run in runs),
        wall_s=stat(run.number("wall_s") for run in runs),
        num_sessions=stat(len(run.sessions) or None for run in runs),
        step_time_ms=result("step_time_ms"),
        step_parts_ms={name: part.mean for name, part in parts.items() if part is not None},
        parity=tuple(parity[run.folder] for run in runs if run.folder in parity),
    )


def _order(value: Any) -> tuple[bool, bool, Any]:
    """Return a key that sorts None first, then numbers by value, then text."""
    is_text = not isinstance(value, int | float)
    return value is not None, is_text, str(value) if is_text else value


def _best(rows: Sequence[ComparisonRow], metric: str, *, mode: str | None) -> Best:
    """Return the best row by a metric that a run has, of equals the first; see ``compare``."""
    is_lower = any(is_lower_better(metric, run.directions) for row in rows for run in row.runs)
    mode = mode or ("min" if is_lower else "max")
    sign = 1 if mode == "max" else -1
    means = [(stat(run.result(metric) for run in row.runs), row) for row in rows]
    stats = [(mean, row) for mean, row in means if mean is not None]
    value, row = max(stats, key=lambda pair: sign * pair[0].mean)
    return Best(metric, mode, row, value)
