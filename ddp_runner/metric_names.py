"""Every built-in metric: its name, which value is best, where it is shown. Torch-free.

All other metrics are the user's own: the config's ``metrics``, and scalars of a training step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

LINE_FIELDS = {"step", "epoch", "time_s"}  # fields of metrics.jsonl that are not metrics


class StepPart(StrEnum):
    """The timed parts of an optimizer step, in order."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    PIPELINE = "pipeline"  # forwards and backwards of a pipeline's schedule, with its waits
    COMM = "comm"  # exchange of gradients that no computation hides
    WAIT = "wait"  # for slower ranks
    COLLECT = "collect"  # a parameter server waits for gradients
    OPTIMIZER = "optimizer"

    @property
    def metric(self) -> str:
        """The metric that logs its milliseconds."""
        return f"perf/{self}_ms"


@dataclass(frozen=True)
class MetricInfo:
    """A built-in metric and its properties."""

    name: str
    best: str | None  # its best value, max or min; None: neither
    is_headline: bool = False  # shown on the terminal and in a table's first columns
    needs_classes: bool = False
    is_monitor: bool = False  # in every checkpoint, so checkpoint.monitor may name it
    is_quantity: bool = True  # False for a rank's number, which has no mean


METRICS = (
    MetricInfo("eval/accuracy", "max", True, True, True),
    MetricInfo("eval/loss", "min", True, is_monitor=True),
    MetricInfo("train/loss", "min", True, is_monitor=True),
    MetricInfo("perf/samples_per_s", "max", is_monitor=True),
    MetricInfo("perf/step_time_ms", "min", is_monitor=True),
    MetricInfo("eval/f1", "max", True, True, True),
    MetricInfo("eval/precision", "max", False, True, True),
    MetricInfo("eval/recall", "max", False, True, True),
    MetricInfo("train/grad_norm", None),
    MetricInfo("train/lr", None, is_monitor=True),
    MetricInfo("perf/comm_share", "min"),
    *(MetricInfo(part.metric, "min") for part in StepPart),
    MetricInfo("perf/skew_ms", "min"),
    MetricInfo("perf/skew_rank", None, is_quantity=False),
    MetricInfo("perf/mfu", "max"),
    MetricInfo("perf/peak_memory_gib", "min"),
    MetricInfo("best/accuracy", "max", True, True),
    MetricInfo("best/loss", "min", True),
    MetricInfo("best/f1", "max", True, True),
    MetricInfo("best/precision", "max", False, True),
    MetricInfo("best/recall", "max", False, True),
    MetricInfo("ps/staleness_mean", "min"),
    MetricInfo("ps/staleness_max", "min"),
    MetricInfo("ps/trainer_wait_ms", "min"),
    MetricInfo("ps/server_wait_ms", "min"),
    MetricInfo("ps/pushes_per_s", "max"),
    MetricInfo("ps/num_trainers", None),
    MetricInfo("plan/peak_gib", "min", True),
    MetricInfo("plan/step_ms", "min", True),
    MetricInfo("plan/step_ms_overlapped", "min", True),
    *(MetricInfo(f"plan/{part}_gib", "min") for part in ("parameters", "gradients", "optimizer")),
    MetricInfo("plan/collective_gib", "min"),
    MetricInfo("plan/flops", None),
)
LISTED = {metric.name: metric for metric in METRICS}
_ALL_REDUCE = tuple(  # for the largest message of task=collectives
    f"collectives/all_reduce_{dtype}_sum/busbw_gb_per_s"
    for dtype in ("float32", "bfloat16", "float16")
)
_HEADLINES = (*(metric.name for metric in METRICS if metric.is_headline), *_ALL_REDUCE)
MONITORS = tuple(metric.name for metric in METRICS if metric.is_monitor)
CLASS_METRICS = tuple(metric.name for metric in METRICS if metric.needs_classes)
MOST_OWN = 8  # user metrics in the headlines: a number per class would fill the terminal
_COSTS = ("loss", "_ms", "_gib", "_share")  # name endings: lower is better


def headlines(names: Iterable[str]) -> list[str]:
    """Return the metrics that a terminal or a table shows first: built-in, then the user's own.

    Scalars of a training step appear only if there is nothing else.
    """
    names = list(names)
    custom = [name for name in names if name not in LISTED and not name.startswith("collectives/")]
    evaluated = [name for name in custom if not name.startswith("train/")]
    shown = [*(name for name in _HEADLINES if name in names), *evaluated[:MOST_OWN]]
    return shown or custom[:MOST_OWN]


def best_end(name: str, directions: Mapping[str, str] | None = None) -> str | None:
    """Return the best value of a metric, min or max; None if unknown.

    The ending of a name that is not built in may decide. `directions` has min or max by user
    metric, as in run.json; ``eval/NAME`` also covers ``eval/NAME_KEY`` and ``best/NAME``.
    """
    if name in LISTED:
        return LISTED[name].best
    evaluated = name.replace("best/", "eval/")
    matches = [key for key in directions or () if f"{evaluated}_".startswith(f"{key}_")]
    if matches:
        return (directions or {})[max(matches, key=len)]
    return "min" if name.endswith(_COSTS) else None
