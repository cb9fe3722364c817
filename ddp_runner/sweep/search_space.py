"""What a search chooses from and which end of its metric is best, for Optuna. Torch-free."""

from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from ddp_runner.errors import UserError, nearest
from ddp_runner.metric_names import LISTED, MONITORS, best_end


def distribution_of(override: Override, made: Any) -> Any:
    """Return the values that a key may take, as a distribution; `made` is the module of Optuna's.

    Raises:
        ValueError: Optuna has no such distribution.
    """
    value = override.value()
    if isinstance(value, IntervalSweep):
        ends: Any = (value.start, value.end)
        if ends[0] > ends[1]:
            raise ValueError(f"the lower end comes first; write interval({ends[1]},{ends[0]})")
        if value.tags - {"log"}:
            raise ValueError("a search knows the tag log only; write interval(LOW,HIGH)")
        if value.tags and ends[0] <= 0:
            raise ValueError("a logarithm needs a lower end greater than 0; write another one")
        is_log, is_whole = bool(value.tags), all(isinstance(one, int) for one in ends)
        return (made.IntDistribution if is_whole else made.FloatDistribution)(*ends, log=is_log)
    if not (texts := list(override.sweep_string_iterator())):
        raise ValueError("the range is empty; write range(LOW,HIGH)")
    if isinstance(value, RangeSweep) and not value.shuffle and texts[1:] and value.step > 0:
        is_whole = all(isinstance(one, int) for one in (value.start, value.step))
        kind = made.IntDistribution if is_whole else made.FloatDistribution
        read = int if is_whole else float
        return kind(read(texts[0]), read(texts[-1]), step=value.step)
    return made.CategoricalDistribution(texts)


def direction_of(objective: str, given: str | None) -> Any:
    """Return whether less of the objective is better, or more, as Optuna says it.

    Raises:
        UserError: nobody says so, or the worst would be taken for the best.
    """
    ends = {"min": "minimize", "max": "maximize", None: None}
    # Of a metric of the user's own only a loss says so by its name.
    is_told = objective in LISTED or objective.endswith("loss")
    known = ends[best_end(objective)] if is_told else None
    if given is None and known is None:
        meant = nearest(objective, MONITORS, cutoff=0.7)
        hint = f"did you mean sweep.objective={meant}? For a metric of your own, " if meant else ""
        raise UserError(
            f"sweep.objective={objective} does not say which value is best; {hint}write "
            "hydra.sweeper.direction=maximize or minimize"
        )
    if given not in (None, "minimize", "maximize"):
        raise UserError(f"hydra.sweeper.direction ({given}) must be minimize or maximize")
    if given and known and given != known and objective in LISTED:
        raise UserError(
            f"sweep.objective={objective} with hydra.sweeper.direction={given} would keep the "
            "worst trial; leave hydra.sweeper.direction out"
        )
    return given or known


def values_of(key: str, distribution: Any) -> list[Any]:
    """Return all values of a distribution, for a search that tries each combination.

    Raises:
        UserError: it is an interval.
    """
    if hasattr(distribution, "choices"):
        return list(distribution.choices)
    if distribution.step is None:
        raise UserError(
            f"{key} is an interval, and hydra/sweeper/sampler=grid takes values; write choice(...)"
        )
    count = round((distribution.high - distribution.low) / distribution.step) + 1
    return [distribution.low + number * distribution.step for number in range(count)]
