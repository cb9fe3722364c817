"""A run's progress in steps and evaluations, and when it stops early.

The position in the order of samples is in ``Batches``. All ranks have the same metrics of an
evaluation, so they stop early together; a resumed run stops at the same step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ddp_runner.config.training import EarlyStopConfig
from ddp_runner.errors import counted
from ddp_runner.metric_names import best_end
from ddp_runner.metrics.metric import Metric, directions


@dataclass
class Progress:
    """A run's progress, from which a resumed run continues."""

    step: int = 0  # optimizer steps since the run began
    # Metrics of the last step; a checkpoint keeps them in its manifest.
    metrics: dict[str, float] = field(default_factory=dict, compare=False)
    owes_evaluation: bool = False  # an evaluation is due after the last step
    watched: str = ""  # early stopping: the metric's direction and name
    best: float | None = None  # its best value
    bad_evaluations: int = 0  # evaluations since the best value

    def state_dict(self) -> dict[str, Any]:
        """Return all fields except the metrics."""
        return {key.name: getattr(self, key.name) for key in fields(self) if key.compare}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of ``state_dict``."""
        vars(self).update({name: saved[name] for name in self.state_dict()})


def early_stop_of(settings: EarlyStopConfig, metrics: Mapping[str, Metric]) -> EarlyStopConfig:
    """Return the settings with the mode filled in: min or max, the best end of the metric."""
    if settings.monitor is None or settings.mode is not None:
        return settings
    return replace(settings, mode=best_end(settings.monitor, directions(metrics)))


def count_evaluation(
    progress: Progress, settings: EarlyStopConfig, metrics: Mapping[str, float]
) -> None:
    """Count an evaluation, given metrics that are the same on all ranks; see ``early_stop_of``.

    A value that is NaN or infinite is not an improvement.
    """
    progress.owes_evaluation = False
    if settings.monitor is None:
        return
    value, watched = metrics[settings.monitor], _watched(settings)
    if progress.watched != watched:  # a resumed run may watch another metric
        progress.watched, progress.best, progress.bad_evaluations = watched, None, 0
    sign = 1.0 if settings.mode == "max" else -1.0
    is_better = progress.best is None or sign * (value - progress.best) > settings.min_delta
    if math.isfinite(value) and is_better:
        progress.best, progress.bad_evaluations = value, 0
    else:
        progress.bad_evaluations += 1


def stop_reason(progress: Progress, settings: EarlyStopConfig) -> str | None:
    """Return a sentence why the run stops early here; None if it continues."""
    if settings.monitor is None or progress.watched != _watched(settings):
        return None
    if progress.bad_evaluations < settings.patience:
        return None
    fault = "was not a finite number"
    if progress.best is not None:
        least = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
        fault = f"did not improve on {progress.best:.6g}{least}"
    return (
        f"stopped early at step {progress.step}: {settings.monitor} {fault} in the last "
        f"{counted(progress.bad_evaluations, 'evaluation')}"
    )


def _watched(settings: EarlyStopConfig) -> str:
    """Return the direction and the metric, such as ``min eval/loss``."""
    return f"{settings.mode} {settings.monitor}"
