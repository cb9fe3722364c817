"""Which metric a config may monitor, and which end of it is best. Torch-free.

The launcher knows the metrics of every run. A rank learns the others when it tries two samples:
what the user's metrics and training step return, and whether the dataset has classes. Each
function raises a UserError for the first rule that is broken.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ddp_runner.config.fields import Rule, validate_value
from ddp_runner.config.schema import Config, has_own_loop
from ddp_runner.config.sections import INFERENCE
from ddp_runner.config.training import TrainConfig
from ddp_runner.errors import UserError
from ddp_runner.metric_names import CLASS_METRICS, MONITORS, best_end

OF_EVALUATIONS = ("scheduler", "early_stop")  # they read a metric after each evaluation


@dataclass(frozen=True)
class KnownMetrics:
    """The metrics of a run, as far as two samples show them."""

    names: Collection[str]  # eval/NAME, and train/NAME of a training step's scalars
    # Metrics that cannot be computed from two samples: what they return is not known yet.
    unknown: Collection[str] = ()
    directions: Mapping[str, str] = field(default_factory=dict)  # eval/NAME -> max or min


def validate_monitors(config: Config) -> None:
    """Reject a monitored metric that no run of this config has, and the wrong end of one."""
    if config.task in INFERENCE:
        return  # they monitor nothing, and may evaluate other data
    own_loop, train = has_own_loop(config.task), config.train
    if config.checkpoint.load_best and config.checkpoint.monitor is None and not own_loop:
        raise UserError(
            "checkpoint.load_best=true needs checkpoint.monitor, the metric that tells which is "
            "best; write checkpoint.monitor=eval/accuracy"
        )
    for group, monitor, mode in _monitored(config):
        if own_loop:
            if group == "checkpoint":  # nobody reads the others
                _validate_end(group, monitor, mode, best_end(monitor))
            continue
        known = [*MONITORS, *(f"eval/{name}" for name in config.metrics)]
        if group in OF_EVALUATIONS:
            known = [name for name in known if name.startswith("eval/")]
        is_own = monitor not in MONITORS and _may_be_own(config, monitor, group)
        if not is_own:  # else a rank knows the metric, and its end
            validate_value(f"{group}.monitor", monitor, Rule(choices=tuple(known)))
            _validate_end(group, monitor, mode, best_end(monitor))
        if monitor.startswith("eval/") and not (train.eval_every_epochs or train.eval_every_steps):
            raise UserError(
                f"{group}.monitor={monitor} needs evaluations and train.eval_every_epochs is 0; "
                "write train.eval_every_epochs=1"
            )


def validate_known(config: Config, known: KnownMetrics) -> None:
    """Reject a monitored metric that the run turns out not to have, and the wrong end of one."""
    always = set(MONITORS) - set(CLASS_METRICS)
    for group, monitor, mode in _monitored(config):
        later = any(f"{monitor}_".startswith(f"eval/{name}_") for name in known.unknown)
        if monitor not in always and monitor not in known.names and not later:
            raise _not_a_metric(group, monitor, sorted(known.names))
        best = best_end(monitor, known.directions)
        _validate_end(group, monitor, mode, best)
        if group == "early_stop" and mode is None and best is None:
            raise UserError(
                f"early_stop.monitor={monitor} does not say which value is best; write "
                "early_stop.mode=max or early_stop.mode=min"
            )


def ensure_monitored(config: Config, metrics: Mapping[str, float], *, part: str) -> None:
    """Reject metrics of a part, train or eval, that lack one that is monitored.

    Raises:
        UserError: two samples did not show that the run does not have it.
    """
    for group, monitor, _ in _monitored(config):
        if monitor.startswith(f"{part}/") and monitor not in metrics:
            there = (name for name in metrics if name.startswith(f"{part}/"))
            raise _not_a_metric(group, monitor, there)


def _not_a_metric(group: str, monitor: str, names: Iterable[str]) -> UserError:
    return UserError(
        f"{group}.monitor ({monitor}) is not a metric of this run; choose one of {', '.join(names)}"
    )


def _monitored(config: Config) -> Iterator[tuple[str, str, str | None]]:
    """Yield the groups that monitor a metric, with the metric and the mode that is given."""
    if (monitor := config.scheduler.get("monitor")) is not None:
        yield "scheduler", monitor, config.scheduler.get("mode")
    if (monitor := config.checkpoint.monitor) is not None:
        yield "checkpoint", monitor, config.checkpoint.mode
    if (monitor := config.early_stop.monitor) is not None:
        yield "early_stop", monitor, config.early_stop.mode


def _may_be_own(config: Config, monitor: str, group: str) -> bool:
    """Return whether a metric may be of the user's metrics or of their training step."""
    if any(f"{monitor}_".startswith(f"eval/{name}_") for name in config.metrics):
        return True
    is_ordinary = config.train.step == TrainConfig().step
    parts = ("eval/",) if group in OF_EVALUATIONS else ("eval/", "train/")
    return not is_ordinary and monitor.startswith(parts)


def _validate_end(group: str, monitor: str, mode: str | None, best: str | None) -> None:
    if None not in (mode, best) and mode != best:
        raise UserError(
            f"{group}.monitor={monitor} with {group}.mode={mode} takes the worst for the best; "
            f"write {group}.mode={best}"
        )
