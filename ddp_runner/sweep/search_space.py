"""The search space and direction of a search, for Optuna. Torch-free."""

from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from ddp_runner.errors import UserError, nearest
from ddp_runner.metric_names import LISTED, MONITORS, best_end


def search_distribution(override: Override, distributions: Any) -> Any:
    """Return a key's values for Optuna; `distributions` is the module ``optuna.distributions``.

    Raises:
        UserError: Optuna cannot search these values.
    """
    value, line = override.value(), override.input_line
    if isinstance(value, IntervalSweep):
        low: Any = value.start
        high: Any = value.end
        if low > high:
            raise UserError(f"{line}: the lower end comes first", f"write interval({high},{low})")
        if value.tags - {"log"}:
            raise UserError(f"{line}: a search only knows the tag log", "write interval(LOW,HIGH)")
        if value.tags and low <= 0:
            raise UserError(f"{line}: a log scale needs a lower end above 0", f"replace {low}")
        is_integer = isinstance(low, int) and isinstance(high, int)
        kind = distributions.IntDistribution if is_integer else distributions.FloatDistribution
        return kind(low, high, log=bool(value.tags))
    if not (texts := list(override.sweep_string_iterator())):
        raise UserError(f"{line}: the range is empty", "write range(LOW,HIGH)")
    if isinstance(value, RangeSweep) and not value.shuffle and len(texts) > 1 and value.step > 0:
        if isinstance(value.start, int) and isinstance(value.step, int):
            return distributions.IntDistribution(int(texts[0]), int(texts[-1]), step=value.step)
        low, high = float(texts[0]), float(texts[-1])
        return distributions.FloatDistribution(low, high, step=value.step)
    return distributions.CategoricalDistribution(texts)


def search_direction(objective: str, chosen: str | None) -> str:
    """Return minimize or maximize; `chosen` is hydra.sweeper.direction.

    Raises:
        UserError: the direction is unknown, or would keep the worst trial.
    """
    if chosen not in (None, "minimize", "maximize"):
        raise UserError(f"hydra.sweeper.direction ({chosen}) must be minimize or maximize")
    known = None  # the names of other metrics of a user say nothing
    if objective in LISTED or objective.endswith("loss"):
        known = {"min": "minimize", "max": "maximize", None: None}[best_end(objective)]
    direction = chosen or known
    if direction is None:
        meant = nearest(objective, MONITORS, cutoff=0.7)
        hint = f"did you mean sweep.objective={meant}? For a metric of your own, " if meant else ""
        raise UserError(
            f"sweep.objective={objective} does not say which value is best",
            f"{hint}write hydra.sweeper.direction=maximize or minimize",
        )
    if chosen and known and chosen != known and objective in LISTED:
        raise UserError(
            f"sweep.objective={objective} with hydra.sweeper.direction={chosen} would keep the "
            "worst trial",
            "leave hydra.sweeper.direction out",
        )
    return direction


def grid_values(key: str, space: Any) -> list[Any]:
    """Return all values of a key, for a grid; raise a UserError if they are an interval."""
    if hasattr(space, "choices"):
        return list(space.choices)
    if space.step is None:
        raise UserError(
            f"{key} is an interval, and hydra/sweeper/sampler=grid takes values",
            "write choice(...)",
        )
    count = round((space.high - space.low) / space.step) + 1
    return [space.low + index * space.step for index in range(count)]
