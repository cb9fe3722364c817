"""Ends a run whose evaluations no longer improve.

The count is a part of the position, so a resumed run stops at the same step. All ranks have the
same metrics of an evaluation, so they stop together.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from ddp_runner.config.training import EarlyStopConfig
from ddp_runner.errors import counted
from ddp_runner.metric_names import best_end
from ddp_runner.metrics.metric import directions
from ddp_runner.train.state import Position, Setup


def early_stop_of(setup: Setup) -> EarlyStopConfig:
    """Return the run's settings with the mode filled in: which value of the metric is best."""
    settings = setup.config.early_stop
    if settings.monitor is None or settings.mode is not None:
        return settings
    return replace(settings, mode=best_end(settings.monitor, directions(setup.metrics)))


def count_evaluation(
    position: Position, settings: EarlyStopConfig, metrics: Mapping[str, float]
) -> None:
    """Count an evaluation, whose metrics are the same on all ranks; see ``early_stop_of``.

    A value that is NaN or infinite is no improvement.
    """
    if settings.monitor is None:
        return
    value, watched = metrics[settings.monitor], _watched(settings)
    if position.watched != watched:  # a resumed run may watch another metric
        position.watched, position.best, position.bad_evaluations = watched, None, 0
    sign = 1.0 if settings.mode == "max" else -1.0
    best = position.best
    is_better = best is None or sign * (value - best) > settings.min_delta
    if math.isfinite(value) and is_better:
        position.best, position.bad_evaluations = value, 0
    else:
        position.bad_evaluations += 1


def stop_reason(position: Position, settings: EarlyStopConfig) -> str | None:
    """Return in a sentence why the run ends at this position; None if it goes on."""
    if settings.monitor is None or position.watched != _watched(settings):
        return None
    if position.bad_evaluations < settings.patience:
        return None
    fault = "was not a finite number"
    if position.best is not None:
        least = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
        fault = f"did not improve on {position.best:.6g}{least}"
    return (
        f"stopped early at step {position.step}: {settings.monitor} {fault} in the last "
        f"{counted(position.bad_evaluations, 'evaluation')}"
    )


def _watched(settings: EarlyStopConfig) -> str:
    """Return the metric and its direction, such as ``min eval/loss``."""
    return f"{settings.mode} {settings.monitor}"
