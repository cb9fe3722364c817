"""Compare runs: one row per setting with its speed, cost and results.

This module only computes; ``render`` shows the result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.compare.parity import Parity, parities
from ddp_runner.compare.prediction import AllReduceFit, AllReduceFits, fit_all_reduces
from ddp_runner.compare.remarks import RunNote, notes_on, warnings_about
from ddp_runner.compare.rows import Best, ComparisonRow, best_of, build_rows
from ddp_runner.compare.run import Run
from ddp_runner.compare.settings import Setting, identity, same_keys, setting_of, varied_keys
from ddp_runner.compare.stats import Target, result_of
from ddp_runner.errors import UserError

TOLERANCE = 1e-3  # relative difference of losses that still counts as parity


@dataclass(frozen=True)
class Comparison:
    """The result of comparing runs."""

    keys: tuple[str, ...]  # in which rows differ
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
    tolerance: float = TOLERANCE,
    each: bool = False,
    include_parallel_jobs: bool = False,
) -> Comparison:
    """Compare runs, grouped by their settings.

    Args:
        runs: The result of ``read_runs``.
        target: Add the time until it was reached.
        best: Name the best run by this metric.
        mode: max or min is best; None to derive it from the name of the metric.
        tolerance: Relative difference of losses that still counts as parity.
        each: Make a row for each run instead of one for all seeds of a setting.
        include_parallel_jobs: Count runs that shared the machine with parallel jobs for speedups.

    Raises:
        UserError: No run has the metric of `target` or of `best`.
    """
    usable, fits = _select(runs, target=target, best=best)
    settings = {run.folder: setting_of(run) for run in usable}
    keys = varied_keys([*settings.values()]) + (("seed",) if each else ())
    parity = parities(usable, settings=settings, tolerance=tolerance)
    rows = build_rows(
        _grouped(usable, settings, each=each),
        settings,
        keys=keys,
        target=target,
        parity=parity,
        fits=fits,
        include_parallel_jobs=include_parallel_jobs,
    )
    return Comparison(
        keys=keys,
        same=same_keys([*settings.values()]),
        rows=tuple(rows),
        all_reduces=tuple(fits.values()),
        parity=parity,
        tolerance=tolerance,
        target=target,
        best=best_of(rows, best, mode=mode) if best and rows else None,
        warnings=tuple(warnings_about(rows, keys, [*settings.values()])),
        notes=tuple(note for run in usable for note in notes_on(run)),
        skipped=tuple(RunNote(run.folder, run.reason) for run in runs if run.reason is not None),
    )


def _select(
    runs: Sequence[Run], *, target: Target | None, best: str | None
) -> tuple[list[Run], AllReduceFits]:
    """Return the runs for the rows, and what the collectives benchmarks measured.

    Beside training runs, benchmarks only serve predictions and have no rows.
    """
    usable = [run for run in runs if run.reason is None]
    benchmarks = [run for run in usable if "collectives" in run.record]
    if len(benchmarks) < len(usable):
        usable = [run for run in usable if run not in benchmarks]
    if usable and target is not None:
        _validate_metric("--target", target.metric, _logged(usable))
    if usable and best is not None:
        names = _logged(usable).union(*(run.final for run in usable))
        with_result = {name for run in usable for name in names if result_of(run, name) is not None}
        _validate_metric("--best", best, with_result)
    return usable, fit_all_reduces(benchmarks)


def _logged(runs: Sequence[Run]) -> set[str]:
    names = set[str]().union(*(line for run in runs for line in run.lines))
    return names - {"step", "epoch", "time_s"}


def _validate_metric(option: str, metric: str, names: set[str]) -> None:
    if metric not in names:
        known = ", ".join(sorted(names))
        raise UserError(f"{option} ({metric}) is a metric of no run; use one of {known}")


def _grouped(
    runs: Sequence[Run], settings: Mapping[Path, Setting], *, each: bool
) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        name = str(run.folder) if each else identity(settings[run.folder])
        groups.setdefault(name, []).append(run)
    return [*groups.values()]
