"""Which metric a config may monitor, and which of its values is best. Torch-free."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ddp_runner.config.fields import Rule, validate_value
from ddp_runner.config.schema import Config, has_own_loop
from ddp_runner.config.sections import INFERENCE
from ddp_runner.config.training import TrainConfig
from ddp_runner.errors import UserError
from ddp_runner.metric_names import CLASS_METRICS, LISTED, MONITORS, best_end

ALWAYS = tuple(name for name in MONITORS if name not in CLASS_METRICS)
READ_EVALUATIONS = ("scheduler", "early_stop")  # they read a metric after each evaluation


@dataclass(frozen=True)
class KnownMetrics:
    """The metrics of a run that two samples show."""

    names: Collection[str]  # eval/NAME, and train/NAME for each scalar of the training step
    unknown: Collection[str] = ()  # metrics that need more samples: their results are not known yet
    directions: Mapping[str, str] = field(default_factory=dict)  # eval/NAME -> max or min


def validate_monitors(config: Config, known: KnownMetrics | None = None) -> None:
    """Reject a monitored metric that the run does not have, or the wrong mode for it.

    Without `known`, which only a rank has, metrics of the user's own code are not checked.
    """
    if config.task in INFERENCE:
        return  # they monitor nothing, and may evaluate other data
    saving, train = config.checkpoint, config.train
    if has_own_loop(config.task):  # monitors a metric of any name, for its checkpoints alone
        if saving.monitor is not None:
            _validate_mode("checkpoint", saving.monitor, saving.mode, best_end(saving.monitor))
        return
    if saving.load_best and saving.monitor is None:
        raise UserError(
            "checkpoint.load_best=true needs checkpoint.monitor, the metric that tells which is "
            "best",
            "write checkpoint.monitor=eval/accuracy",
        )
    own_step = known is None and train.step != TrainConfig().step
    names = MONITORS if known is None else [*ALWAYS, *sorted({*known.names} - {*ALWAYS})]
    unknown = config.metrics if known is None else known.unknown
    if config.task == "train" and not own_step:
        _validate_objective(config.sweep.objective, names, unknown)
        _validate_evaluated("sweep.objective", config.sweep.objective or "", train)
    for group, monitor, mode in _monitored(config):
        parts = ("eval/",) if group in READ_EVALUATIONS else ("eval/", "train/", "perf/")
        choices = [name for name in names if name.startswith(parts)]
        is_unknown = any(f"{monitor}_".startswith(f"eval/{name}_") for name in unknown)
        is_unknown |= own_step and monitor.startswith(parts)
        best = best_end(monitor, known.directions if known else None)
        if monitor in choices or (known and is_unknown):
            _validate_mode(group, monitor, mode, best)
        elif not is_unknown:
            choices += [f"eval/{name}" for name in unknown]
            validate_value(f"{group}.monitor", monitor, Rule(choices=tuple(choices)))
        _validate_evaluated(f"{group}.monitor", monitor, train)
        if known and group == "early_stop" and mode is None and best is None:
            raise UserError(
                f"early_stop.monitor={monitor} does not say which value is best",
                "write early_stop.mode=max or early_stop.mode=min",
            )


def ensure_monitored(config: Config, metrics: Mapping[str, float], *, part: str) -> None:
    """Reject the metrics of a part, train or eval, that lack a monitored metric."""
    for group, monitor, _ in _monitored(config):
        if monitor.startswith(f"{part}/"):
            choices = tuple(name for name in metrics if name.startswith(f"{part}/"))
            validate_value(f"{group}.monitor", monitor, Rule(choices=choices))


def _validate_objective(name: str | None, names: Iterable[str], unknown: Iterable[str]) -> None:
    """Reject a search's objective that no trial has, before the first trial trains."""
    own = [f"eval/{metric}" for metric in unknown]
    evaluated = f"{name}_".replace("best/", "eval/")
    if any(evaluated.startswith(f"{metric}_") for metric in own):
        return
    is_listed = name in LISTED and name not in CLASS_METRICS
    bests = [metric.replace("eval/", "best/") for metric in names]
    if name is not None and not is_listed and name not in {*names, *bests}:
        validate_value("sweep.objective", name, Rule(choices=(*names, *own)))


def _validate_mode(group: str, monitor: str, mode: str | None, best: str | None) -> None:
    if None not in (mode, best) and mode != best:
        raise UserError(
            f"{group}.monitor={monitor} with {group}.mode={mode} keeps the worst value, not the "
            "best",
            f"write {group}.mode={best}",
        )


def _validate_evaluated(key: str, metric: str, train: TrainConfig) -> None:
    if metric.startswith("eval/") and not (train.eval_every_epochs or train.eval_every_steps):
        raise UserError(
            f"{key}={metric} needs evaluations and train.eval_every_epochs is 0",
            "write train.eval_every_epochs=1",
        )


def _monitored(config: Config) -> Iterator[tuple[str, str, str | None]]:
    """Yield the groups that monitor a metric, each with the metric and its mode."""
    scheduler = config.scheduler
    for group, monitor, mode in (
        ("scheduler", scheduler.get("monitor"), scheduler.get("mode")),
        ("checkpoint", config.checkpoint.monitor, config.checkpoint.mode),
        ("early_stop", config.early_stop.monitor, config.early_stop.mode),
    ):
        if monitor is not None:
            yield group, monitor, mode
