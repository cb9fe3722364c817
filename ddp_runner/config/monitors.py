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
from ddp_runner.metric_names import CLASS_METRICS, LISTED, MONITORS, best_end

ALWAYS = tuple(name for name in MONITORS if name not in CLASS_METRICS)
OF_EVALUATIONS = ("scheduler", "early_stop")  # they read a metric after each evaluation


@dataclass(frozen=True)
class KnownMetrics:
    """The metrics of a run, as far as two samples show them."""

    names: Collection[str]  # eval/NAME, and train/NAME of a training step's scalars
    # Metrics that cannot be computed from two samples: what they return is not known yet.
    unknown: Collection[str] = ()
    directions: Mapping[str, str] = field(default_factory=dict)  # eval/NAME -> max or min


def validate_monitors(config: Config, known: KnownMetrics | None = None) -> None:
    """Reject a monitored metric that no run of this config has, and the wrong end of one.

    `known` is what a rank knows. Before that, what the user's metrics and training step return is
    left to it.
    """
    if config.task in INFERENCE:
        return  # they monitor nothing, and may evaluate other data
    own_loop, train = has_own_loop(config.task), config.train
    if config.checkpoint.load_best and config.checkpoint.monitor is None and not own_loop:
        raise UserError(
            "checkpoint.load_best=true needs checkpoint.monitor, the metric that tells which is "
            "best; write checkpoint.monitor=eval/accuracy"
        )
    own_step = known is None and train.step != TrainConfig().step
    names = MONITORS if known is None else [*ALWAYS, *sorted({*known.names} - {*ALWAYS})]
    unknown = config.metrics if known is None else known.unknown
    if config.task == "train" and not own_step:
        _validate_objective(config.sweep.objective, names, unknown)
        _validate_evaluated("sweep.objective", config.sweep.objective or "", train)
    for group, monitor, mode in _monitored(config):
        if own_loop and group != "checkpoint":
            continue  # nobody reads it
        parts = ("eval/",) if group in OF_EVALUATIONS else ("eval/", "train/", "perf/")
        choices = [name for name in names if name.startswith(parts)]
        is_unknown = any(f"{monitor}_".startswith(f"eval/{name}_") for name in unknown)
        is_unknown |= own_step and monitor.startswith(parts)
        best = best_end(monitor, known.directions if known else None)
        if monitor in choices or own_loop or (known and is_unknown):
            _validate_end(group, monitor, mode, best)
        elif not is_unknown:
            _validate_name(group, monitor, [*choices, *(f"eval/{name}" for name in unknown)])
        if own_loop:
            continue
        _validate_evaluated(f"{group}.monitor", monitor, train)
        if known and group == "early_stop" and mode is None and best is None:
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
        if monitor.startswith(f"{part}/"):
            _validate_name(group, monitor, [one for one in metrics if one.startswith(f"{part}/")])


def _validate_objective(name: str | None, names: Iterable[str], unknown: Iterable[str]) -> None:
    """Reject the metric of a search that no trial of it has, before the first one has trained."""
    own = [f"eval/{one}" for one in unknown]
    evaluated = f"{name}_".replace("best/", "eval/")
    if any(evaluated.startswith(f"{one}_") for one in own):
        return
    is_listed = name in LISTED and name not in CLASS_METRICS
    known = {*names, *(one.replace("eval/", "best/") for one in names)}
    if name is not None and not is_listed and name not in known:
        validate_value("sweep.objective", name, Rule(choices=(*names, *own)))


def _validate_evaluated(key: str, metric: str, train: TrainConfig) -> None:
    if metric.startswith("eval/") and not (train.eval_every_epochs or train.eval_every_steps):
        raise UserError(
            f"{key}={metric} needs evaluations and train.eval_every_epochs is 0; "
            "write train.eval_every_epochs=1"
        )


def _validate_name(group: str, monitor: str, names: Iterable[str]) -> None:
    validate_value(f"{group}.monitor", monitor, Rule(choices=tuple(names)))


def _monitored(config: Config) -> Iterator[tuple[str, str, str | None]]:
    """Yield the groups that monitor a metric, with the metric and the mode that is given."""
    if (monitor := config.scheduler.get("monitor")) is not None:
        yield "scheduler", monitor, config.scheduler.get("mode")
    if (monitor := config.checkpoint.monitor) is not None:
        yield "checkpoint", monitor, config.checkpoint.mode
    if (monitor := config.early_stop.monitor) is not None:
        yield "early_stop", monitor, config.early_stop.mode


def _validate_end(group: str, monitor: str, mode: str | None, best: str | None) -> None:
    if None not in (mode, best) and mode != best:
        raise UserError(
            f"{group}.monitor={monitor} with {group}.mode={mode} takes the worst for the best; "
            f"write {group}.mode={best}"
        )
