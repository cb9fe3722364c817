"""A row of a comparison: what the runs of one setting measured; and the best of all rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_runner.compare.parity import Parity
from ddp_runner.compare.prediction import AllReduceFits, MeasuredStep, Prediction, predict
from ddp_runner.compare.run import Run
from ddp_runner.compare.scaling import Scaling, scalings
from ddp_runner.compare.settings import BATCH_SIZES, Setting
from ddp_runner.compare.stats import (
    COMM_SHARE,
    SAMPLES_PER_S,
    STEP_TIME_MS,
    Stat,
    Target,
    peak_memory_gib,
    result_of,
    stat,
    steady_stat,
    step_parts_ms,
)
from ddp_runner.metric_names import is_lower_better


@dataclass(frozen=True)
class ComparisonRow:
    """The runs of one setting, which differ only in their seeds; or a single run."""

    setting: Setting  # values of Comparison.keys
    world_size: int
    num_devices: int
    runs: tuple[Run, ...]
    samples_per_s: Stat | None
    strong: Scaling | None
    weak: Scaling | None
    predicted: Mapping[str, Prediction]  # for strong and weak, from that scaling's baseline
    time_to_target_s: Stat | None
    metrics: Mapping[str, Stat]  # last values
    peak_memory_gib: Stat | None
    comm_share: Stat | None  # of the step time, 0 to 1
    startup_s: Stat | None  # of the first session of a resumed run
    wall_s: Stat | None  # of all sessions
    num_sessions: Stat | None
    step_time_ms: Stat | None
    step_parts_ms: Mapping[str, float]  # means
    parity: tuple[Parity, ...]  # one per run that was compared with a reference

    @property
    def step(self) -> MeasuredStep | None:
        """The mean step, from which predictions start; None if it was not measured."""
        if self.samples_per_s is None or self.step_time_ms is None:
            return None
        speed, time_ms = self.samples_per_s.mean, self.step_time_ms.mean
        return MeasuredStep(self.runs[0], speed, time_ms, self.step_parts_ms)

    @property
    def scalings(self) -> Mapping[str, Scaling]:
        """Its scalings: strong, weak, both or none."""
        kinds = {"strong": self.strong, "weak": self.weak}
        return {kind: scaling for kind, scaling in kinds.items() if scaling is not None}


@dataclass(frozen=True)
class Best:
    """The run, and the row by its mean, with the best value of a metric."""

    metric: str
    mode: str  # max or min
    run: Run
    value: float
    row: ComparisonRow
    row_stat: Stat


def build_rows(
    groups: Sequence[Sequence[Run]],
    settings: Mapping[Path, Setting],
    *,
    keys: Sequence[str],
    target: Target | None,
    parity: Sequence[Parity],
    fits: AllReduceFits,
    include_parallel_jobs: bool,
) -> list[ComparisonRow]:
    """Return a row for each group of runs, ordered by their settings.

    Args:
        groups: Runs that differ only in their seeds.
        settings: The settings of all runs, by folder.
        keys: Keys in which rows differ.
        target: Measure the time until it was reached.
        parity: Results of all runs that were compared with a reference.
        fits: All-reduces for predictions.
        include_parallel_jobs: Count runs that shared the machine with parallel jobs for speedups.
    """
    strong, weak = (
        scalings(
            [settings[runs[0].folder] for runs in groups],
            [steady_stat(runs, SAMPLES_PER_S) for runs in groups],
            batch_key=key,
            include_parallel_jobs=include_parallel_jobs,
        )
        for key in BATCH_SIZES
    )
    parity_of = {result.run.folder: result for result in parity}
    rows = []
    for runs, *scaling in zip(groups, strong, weak, strict=True):
        values = {"seed": runs[0].seed, **settings[runs[0].folder]}
        setting = {key: values.get(key) for key in keys}
        rows.append(_row(runs, setting, scaling, target, parity_of))
    predicted = [replace(row, predicted=_predictions(row, rows, fits)) for row in rows]
    return sorted(predicted, key=lambda row: [_order(value) for value in row.setting.values()])


def _row(
    runs: Sequence[Run],
    setting: Setting,
    scaling: Sequence[Scaling | None],
    target: Target | None,
    parity: Mapping[Path, Parity],
) -> ComparisonRow:
    finals = [run.final for run in runs]
    names = sorted(set[str]().union(*finals))
    stats = {name: stat(final.get(name) for final in finals) for name in names}
    return ComparisonRow(
        setting=setting,
        world_size=runs[0].world_size,
        num_devices=runs[0].num_devices,
        runs=tuple(runs),
        samples_per_s=steady_stat(runs, SAMPLES_PER_S),
        strong=scaling[0],
        weak=scaling[1],
        predicted={},
        time_to_target_s=stat(target.time_s(run) for run in runs) if target else None,
        metrics={name: value for name, value in stats.items() if value is not None},
        peak_memory_gib=stat(peak_memory_gib(run) for run in runs),
        comm_share=steady_stat(runs, COMM_SHARE),
        startup_s=stat(run.number("startup_s") for run in runs),
        wall_s=stat(run.number("wall_s") for run in runs),
        num_sessions=stat(len(run.sessions) or None for run in runs),
        step_time_ms=steady_stat(runs, STEP_TIME_MS),
        step_parts_ms=step_parts_ms(runs),
        parity=tuple(parity[run.folder] for run in runs if run.folder in parity),
    )


def _predictions(
    row: ComparisonRow, rows: Sequence[ComparisonRow], fits: AllReduceFits
) -> dict[str, Prediction]:
    """Return a row's predictions from the baselines that have fewer ranks, by kind of scaling."""
    predictions = {}
    for kind, scaling in row.scalings.items():
        base = rows[scaling.base_index]
        if base.world_size < row.world_size and row.step and base.step:
            prediction = predict(row.step, base.step, fits)
            if prediction is not None:
                predictions[kind] = prediction
    return predictions


def _order(value: Any) -> tuple[int, float, str]:
    """Return a key that sorts None first, then numbers by value, then text."""
    if value is None:
        return 0, 0.0, ""
    is_number = isinstance(value, int | float)
    return (1, value, "") if is_number else (2, 0.0, str(value))


def best_of(rows: Sequence[ComparisonRow], metric: str, *, mode: str | None) -> Best:
    """Return the best run and the best row by a metric that a run has; `mode` as in ``compare``."""
    mode = mode or ("min" if is_lower_better(metric) else "max")
    sign = 1 if mode == "max" else -1
    results = [(result_of(run, metric), run) for row in rows for run in row.runs]
    values = [(value, run) for value, run in results if value is not None]
    means = [(stat(result_of(run, metric) for run in row.runs), row) for row in rows]
    stats = [(mean, row) for mean, row in means if mean is not None]
    value, run = max(values, key=lambda pair: sign * pair[0])
    row_stat, row = max(stats, key=lambda pair: sign * pair[0].mean)
    return Best(metric, mode, run, value, row, row_stat)
