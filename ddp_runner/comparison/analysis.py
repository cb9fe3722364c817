"""What runs say beside each other: a row for each setting, its speed, its cost and its results.

Numbers only; ``tables`` and ``plots`` show them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.comparison.figures import (
    COMM_SHARE,
    PACE,
    STEP_TIME,
    Stat,
    Target,
    is_lower_better,
    outcome,
    peak_memory_gib,
    stat,
    steady,
    step_parts_ms,
)
from ddp_runner.comparison.parity import Parity, parities
from ddp_runner.comparison.runs import Run
from ddp_runner.comparison.scaling import Scaling, Speed, scalings
from ddp_runner.comparison.settings import (
    Setting,
    identity,
    missing_keys,
    same_keys,
    setting_of,
    varied_keys,
)
from ddp_runner.errors import UserError

TOLERANCE = 1e-3  # of losses between modes, as a part of the loss


@dataclass(frozen=True)
class Row:
    """The runs of one setting, which differ by their seeds alone; or one run."""

    setting: Setting  # the values of Comparison.keys
    world_size: int
    runs: tuple[Run, ...]
    samples_per_s: Stat | None
    strong: Scaling | None
    weak: Scaling | None
    time_to_target_s: Stat | None
    metrics: Mapping[str, Stat]  # at the end of the runs
    peak_memory_gib: Stat | None
    comm_share: Stat | None  # of the step time, 0 to 1
    startup_s: Stat | None
    wall_s: Stat | None
    step_time_ms: Stat | None
    step_parts_ms: Mapping[str, float]  # what the step time goes into
    parity: tuple[Parity, ...]  # of its runs; empty: they are the reference, or have none


@dataclass(frozen=True)
class Best:
    """The run, and the row by its mean, with the best value of a metric."""

    metric: str
    mode: str  # max or min
    run: Run
    value: float
    row: Row
    row_stat: Stat


@dataclass(frozen=True)
class Remark:
    """What a reader must know of one run."""

    folder: Path
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """All that is known of the runs."""

    keys: tuple[str, ...]  # in which rows differ
    same: Setting  # what all have in common, of the keys that a reader asks for first
    rows: tuple[Row, ...]  # in the order of their settings
    parity: tuple[Parity, ...]
    tolerance: float  # of parity
    target: Target | None
    best: Best | None
    left_out: tuple[Remark, ...]  # runs that are in no row, and why
    notes: tuple[Remark, ...]  # runs that are in one, and what to know about them
    mixed: tuple[str, ...]  # what else differs between runs and makes them hard to compare


def compare(
    runs: Sequence[Run],
    *,
    target: Target | None = None,
    best: str | None = None,
    mode: str | None = None,
    tolerance: float = TOLERANCE,
    each: bool = False,
    include_packed: bool = False,
) -> Comparison:
    """Return what sets runs apart against what came out.

    Args:
        runs: from ``read_runs``.
        target: when it was reached is a column.
        best: the metric by which the best run is named.
        mode: max or min; None: as the name of the metric says.
        tolerance: the part of itself by which a loss may differ between modes.
        each: a row for each run, in place of one for all seeds of a setting.
        include_packed: take packed runs as if they had run alone.

    Raises:
        UserError: no run has the metric of `target` or of `best`.
    """
    usable = [run for run in runs if run.reason is None]
    settings = {run.folder: setting_of(run) for run in usable}
    if target is not None:
        _check_metric("--target", target.metric, [set().union(*run.lines) for run in usable])
    if best is not None:
        _check_metric("--best", best, [_outcomes(run) for run in usable])
    groups: dict[str, list[Run]] = {}
    for run in usable:
        name = str(run.folder) if each else identity(settings[run.folder])
        groups.setdefault(name, []).append(run)
    speeds = [
        Speed(settings[group[0].folder], found.mean if found else None)
        for group in groups.values()
        for found in [stat(steady(run, PACE) for run in group)]
    ]
    strong, weak = (
        scalings(speeds, batch_key=key, include_packed=include_packed)
        for key in ("batch.global_size", "batch.per_rank")
    )
    keys = varied_keys(list(settings.values())) + (("seed",) if each else ())
    parity = parities(usable, settings=settings, tolerance=tolerance)
    parity_of = {one.run.folder: one for one in parity}
    rows = []
    for group, *scaling in zip(groups.values(), strong, weak, strict=True):
        values = {"seed": group[0].seed, **settings[group[0].folder]}
        setting = {key: values.get(key) for key in keys}
        rows.append(_row(group, setting, scaling=scaling, target=target, parity=parity_of))
    rows.sort(key=lambda row: [_rank(value) for value in row.setting.values()])
    return Comparison(
        keys=keys,
        same=same_keys(list(settings.values())),
        rows=tuple(rows),
        parity=parity,
        tolerance=tolerance,
        target=target,
        best=_best(rows, best, mode=mode) if best and rows else None,
        left_out=tuple(Remark(run.folder, run.reason) for run in runs if run.reason is not None),
        notes=tuple(Remark(run.folder, note) for run in usable for note in _notes(run)),
        mixed=tuple(_mixed(usable, list(settings.values()))),
    )


def _row(
    runs: Sequence[Run],
    setting: Setting,
    *,
    scaling: Sequence[Scaling | None],
    target: Target | None,
    parity: Mapping[Path, Parity],
) -> Row:
    finals = [run.final for run in runs]
    names = sorted(set[str]().union(*finals))
    stats = {name: stat(final.get(name) for final in finals) for name in names}
    return Row(
        setting=setting,
        world_size=runs[0].world_size,
        runs=tuple(runs),
        samples_per_s=stat(steady(run, PACE) for run in runs),
        strong=scaling[0],
        weak=scaling[1],
        time_to_target_s=stat(target.time_s(run) for run in runs) if target else None,
        metrics={name: found for name, found in stats.items() if found is not None},
        peak_memory_gib=stat(peak_memory_gib(run) for run in runs),
        comm_share=stat(steady(run, COMM_SHARE) for run in runs),
        startup_s=stat(run.number("startup_s") for run in runs),
        wall_s=stat(run.number("wall_s") for run in runs),
        step_time_ms=stat(steady(run, STEP_TIME) for run in runs),
        step_parts_ms=step_parts_ms(runs),
        parity=tuple(parity[run.folder] for run in runs if run.folder in parity),
    )


def _outcomes(run: Run) -> set[str]:
    names = set(run.final).union(*run.lines)
    return {name for name in names if outcome(run, name) is not None}


def _check_metric(option: str, metric: str, known: Sequence[set[str]]) -> None:
    names = set().union(*known) - {"step", "epoch", "time_s"}
    if known and metric not in names:
        raise UserError(
            f"{option} ({metric}) is a metric of no run; there are {', '.join(sorted(names))}"
        )


def _best(rows: Sequence[Row], metric: str, *, mode: str | None) -> Best:
    mode = mode or ("min" if is_lower_better(metric) else "max")
    sign = 1 if mode == "max" else -1
    outcomes = [(outcome(run, metric), run) for row in rows for run in row.runs]
    values = [(value, run) for value, run in outcomes if value is not None]
    stats = [(found, row) for row in rows if (found := stat(outcome(r, metric) for r in row.runs))]
    value, run = max(values, key=lambda pair: sign * pair[0])
    row_stat, row = max(stats, key=lambda pair: sign * pair[0].mean)
    return Best(metric, mode, run, value, row, row_stat)


def _notes(run: Run) -> Iterator[str]:
    yield from run.notes
    if len(run.values(PACE)) == 1:
        yield f"no samples/s: only one line of {PACE}, the warm-up; lower train.log_every_steps"


def _mixed(runs: Sequence[Run], settings: Sequence[Setting]) -> list[str]:
    versions = [run.record.get("versions") for run in runs]
    facts = {
        "hosts": [run.record.get("host") for run in runs],
        "torch versions": [one.get("torch") if isinstance(one, dict) else None for one in versions],
        "git revisions": [run.record.get("git_revision") for run in runs],
    }
    sentences = []
    for name, values in facts.items():
        different = sorted({str(value) for value in values})
        if len(different) > 1:
            sentences.append(f"the runs are of {len(different)} {name} ({_some(different)})")
    if missing := missing_keys(settings):
        sentences.append(f"some runs, of another version, lack keys ({_some(missing)})")
    return sentences


def _some(words: Sequence[str]) -> str:
    return ", ".join(words[:3]) + (", ..." if len(words) > 3 else "")


def _rank(value: Any) -> tuple[int, float, str]:
    """Return what sorts numbers as numbers, before words, after nothing."""
    if value is None:
        return 0, 0.0, ""
    is_number = isinstance(value, int | float)
    return (1, value, "") if is_number else (2, 0.0, str(value))
