"""What runs say beside each other: a row for each setting, its speed, its cost and its results.

Numbers only; ``tables`` and ``plots`` show them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_runner.compare.doubts import doubts
from ddp_runner.compare.parity import Parity, parities
from ddp_runner.compare.prediction import Link, Prediction, links_of, predict
from ddp_runner.compare.rows import Best, Row, best_of, build_row
from ddp_runner.compare.run import Run
from ddp_runner.compare.scaling import Speed, scalings
from ddp_runner.compare.settings import (
    Setting,
    identity,
    missing_keys,
    same_keys,
    setting_of,
    varied_keys,
)
from ddp_runner.compare.stats import PACE, Target, outcome, stat, steady
from ddp_runner.errors import UserError

TOLERANCE = 1e-3  # of losses between modes, as a part of the loss


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
    links: tuple[Link, ...]  # what predictions take an all-reduce from
    parity: tuple[Parity, ...]
    tolerance: float  # of parity
    target: Target | None
    best: Best | None
    left_out: tuple[Remark, ...]  # runs that are in no row, and why
    notes: tuple[Remark, ...]  # runs that are in one, and what to know about them
    mixed: tuple[str, ...]  # what else differs between runs and makes them hard to compare
    doubts: tuple[str, ...]  # speeds that may be wrong, and why


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
    benchmarks = [run for run in usable if "collectives" in run.record]
    if len(benchmarks) < len(usable):  # beside training they are what it is measured against
        usable = [run for run in usable if run not in benchmarks]
    settings = {run.folder: setting_of(run) for run in usable}
    if target is not None:
        _validate_metric("--target", target.metric, [set().union(*run.lines) for run in usable])
    if best is not None:
        _validate_metric("--best", best, [_outcomes(run) for run in usable])
    groups: dict[str, list[Run]] = {}
    for run in usable:
        name = str(run.folder) if each else identity(settings[run.folder])
        groups.setdefault(name, []).append(run)
    speeds = [
        Speed(settings[group[0].folder], *((found.mean, found.sd) if found else (None,)))
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
        rows.append(build_row(group, setting, scaling=scaling, target=target, parity=parity_of))
    links = links_of(benchmarks)
    rows = [replace(row, predicted=_predictions(row, rows, links)) for row in rows]
    rows.sort(key=lambda row: [_rank(value) for value in row.setting.values()])
    return Comparison(
        keys=keys,
        same=same_keys(list(settings.values())),
        rows=tuple(rows),
        links=tuple(links.values()),
        parity=parity,
        tolerance=tolerance,
        target=target,
        best=best_of(rows, best, mode=mode) if best and rows else None,
        left_out=tuple(Remark(run.folder, run.reason) for run in runs if run.reason is not None),
        notes=tuple(Remark(run.folder, note) for run in usable for note in _notes(run)),
        mixed=tuple(_mixed(usable, list(settings.values()))),
        doubts=tuple(doubts(rows, keys)),
    )


def _predictions(
    row: Row, rows: Sequence[Row], links: Mapping[tuple[str, int], Link]
) -> dict[str, Prediction]:
    """Return what each kind of scaling's baseline says of a row with more ranks."""
    found = dict[str, Prediction]()
    for kind, scaling in row.scalings.items():
        base = rows[scaling.base_index]
        if base.world_size < row.world_size and row.measured and base.measured:
            prediction = predict(row.measured, base.measured, links)
            found |= {} if prediction is None else {kind: prediction}
    return found


def _outcomes(run: Run) -> set[str]:
    names = set(run.final).union(*run.lines)
    return {name for name in names if outcome(run, name) is not None}


def _validate_metric(option: str, metric: str, known: Sequence[set[str]]) -> None:
    names = set().union(*known) - {"step", "epoch", "time_s"}
    if known and metric not in names:
        raise UserError(
            f"{option} ({metric}) is a metric of no run; there are {', '.join(sorted(names))}"
        )


def _notes(run: Run) -> Iterator[str]:
    yield from run.notes
    if len(run.sessions) > 1:
        yield f"resumed: wall s adds up its {len(run.sessions)} sessions, start-up s is the first's"
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
