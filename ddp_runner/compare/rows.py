"""A row of a comparison: the figures of one setting's runs; and the best of all rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.compare.parity import Parity
from ddp_runner.compare.prediction import Measured, Prediction
from ddp_runner.compare.run import Run
from ddp_runner.compare.scaling import Scaling
from ddp_runner.compare.settings import Setting
from ddp_runner.compare.stats import (
    COMM_SHARE,
    PACE,
    STEP_TIME,
    Stat,
    Target,
    outcome,
    peak_memory_gib,
    stat,
    steady,
    step_parts_ms,
)
from ddp_runner.metric_names import is_lower_better


@dataclass(frozen=True)
class Row:
    """The runs of one setting, which differ by their seeds alone; or one run."""

    setting: Setting  # the values of Comparison.keys
    world_size: int
    num_devices: int
    runs: tuple[Run, ...]
    samples_per_s: Stat | None
    strong: Scaling | None
    weak: Scaling | None
    predicted: Mapping[str, Prediction]  # by strong and weak, against that baseline
    time_to_target_s: Stat | None
    metrics: Mapping[str, Stat]  # at the end of the runs
    peak_memory_gib: Stat | None
    comm_share: Stat | None  # of the step time, 0 to 1
    startup_s: Stat | None  # of the first session, where a run was resumed
    wall_s: Stat | None  # of all sessions
    num_sessions: Stat | None
    step_time_ms: Stat | None
    step_parts_ms: Mapping[str, float]  # what the step time goes into
    parity: tuple[Parity, ...]  # of its runs; empty: they are the reference, or have none

    @property
    def measured(self) -> Measured | None:
        """Its mean step, as a prediction takes it apart; None: it has no whole interval."""
        if self.samples_per_s is None or self.step_time_ms is None:
            return None
        pace, step = self.samples_per_s.mean, self.step_time_ms.mean
        return Measured(self.runs[0], pace, step, self.step_parts_ms)

    @property
    def scalings(self) -> Mapping[str, Scaling]:
        """What there is of strong and weak, by its name."""
        found = {"strong": self.strong, "weak": self.weak}
        return {kind: scaling for kind, scaling in found.items() if scaling is not None}


@dataclass(frozen=True)
class Best:
    """The run, and the row by its mean, with the best value of a metric."""

    metric: str
    mode: str  # max or min
    run: Run
    value: float
    row: Row
    row_stat: Stat


def build_row(
    runs: Sequence[Run],
    setting: Setting,
    *,
    scaling: Sequence[Scaling | None],
    target: Target | None,
    parity: Mapping[Path, Parity],
) -> Row:
    """Return the row of one setting's runs.

    Args:
        runs: that differ by their seeds alone.
        setting: the values of the keys in which rows differ.
        scaling: strong and weak.
        target: when it was reached is told.
        parity: of every run that was compared with a reference, by folder.
    """
    finals = [run.final for run in runs]
    names = sorted(set[str]().union(*finals))
    stats = {name: stat(final.get(name) for final in finals) for name in names}
    return Row(
        setting=setting,
        world_size=runs[0].world_size,
        num_devices=runs[0].num_devices,
        runs=tuple(runs),
        samples_per_s=stat(steady(run, PACE) for run in runs),
        strong=scaling[0],
        weak=scaling[1],
        predicted={},
        time_to_target_s=stat(target.time_s(run) for run in runs) if target else None,
        metrics={name: found for name, found in stats.items() if found is not None},
        peak_memory_gib=stat(peak_memory_gib(run) for run in runs),
        comm_share=stat(steady(run, COMM_SHARE) for run in runs),
        startup_s=stat(run.number("startup_s") for run in runs),
        wall_s=stat(run.number("wall_s") for run in runs),
        num_sessions=stat(len(run.sessions) or None for run in runs),
        step_time_ms=stat(steady(run, STEP_TIME) for run in runs),
        step_parts_ms=step_parts_ms(runs),
        parity=tuple(parity[run.folder] for run in runs if run.folder in parity),
    )


def best_of(rows: Sequence[Row], metric: str, *, mode: str | None) -> Best:
    """Return the best run and row by a metric that one of them has; `mode`: see ``compare``."""
    mode = mode or ("min" if is_lower_better(metric) else "max")
    sign = 1 if mode == "max" else -1
    outcomes = [(outcome(run, metric), run) for row in rows for run in row.runs]
    values = [(value, run) for value, run in outcomes if value is not None]
    stats = [(found, row) for row in rows if (found := stat(outcome(r, metric) for r in row.runs))]
    value, run = max(values, key=lambda pair: sign * pair[0])
    row_stat, row = max(stats, key=lambda pair: sign * pair[0].mean)
    return Best(metric, mode, run, value, row, row_stat)
