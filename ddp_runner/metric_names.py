"""Every metric, listed once: its name, whether less is better, where it is shown. Torch-free.

Metrics that are not listed are the user's own: those of the config's ``metrics``, and the scalars
of a training step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

LINE_FIELDS = {"step", "epoch", "time_s"}  # of a line of metrics.jsonl, beside its metrics


class StepPart(StrEnum):
    """The parts of an optimizer step that are timed, in their order."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMM = "comm"  # the exchange of gradients, as far as no computation hides it
    WAIT = "wait"  # for ranks that are slower
    COLLECT = "collect"  # a parameter server waits for its trainers' gradients
    OPTIMIZER = "optimizer"

    @property
    def metric(self) -> str:
        """The name under which its milliseconds are logged."""
        return f"perf/{self}_ms"


@dataclass(frozen=True)
class MetricInfo:
    """One metric."""

    name: str
    lower_is_better: bool | None  # None: neither
    is_headline: bool = False  # shown on the terminal, and among a table's first columns
    needs_classes: bool = False
    is_monitor: bool = False  # every checkpoint has it, so that checkpoint.monitor may name it
    is_quantity: bool = True  # which has a mean; the number of a rank has none


METRICS = (
    MetricInfo("eval/accuracy", False, True, True, True),
    MetricInfo("eval/loss", True, True, is_monitor=True),
    MetricInfo("train/loss", True, True, is_monitor=True),
    MetricInfo("perf/samples_per_s", False, is_monitor=True),
    MetricInfo("perf/step_time_ms", True, is_monitor=True),
    MetricInfo("eval/f1", False, True, True, True),
    MetricInfo("eval/precision", False, False, True, True),
    MetricInfo("eval/recall", False, False, True, True),
    MetricInfo("train/grad_norm", None),
    MetricInfo("train/lr", None, is_monitor=True),
    MetricInfo("perf/comm_share", True),
    *(MetricInfo(part.metric, True) for part in StepPart),
    MetricInfo("perf/skew_ms", True),
    MetricInfo("perf/skew_rank", None, is_quantity=False),
    MetricInfo("perf/mfu", False),
    MetricInfo("perf/peak_memory_gib", True),
    MetricInfo("best/accuracy", False, True, True),
    MetricInfo("best/loss", True, True),
    MetricInfo("best/f1", False, True, True),
    MetricInfo("best/precision", False, False, True),
    MetricInfo("best/recall", False, False, True),
    MetricInfo("ps/staleness_mean", True),
    MetricInfo("ps/staleness_max", True),
    MetricInfo("ps/trainer_wait_ms", True),
    MetricInfo("ps/server_wait_ms", True),
    MetricInfo("ps/pushes_per_s", False),
    MetricInfo("ps/num_trainers", None),
)
LISTED = {metric.name: metric for metric in METRICS}
_ALL_REDUCE = tuple(  # of the largest message of task=collectives
    f"collectives/all_reduce_{dtype}_sum/busbw_gb_per_s"
    for dtype in ("float32", "bfloat16", "float16")
)
_HEADLINES = (*(metric.name for metric in METRICS if metric.is_headline), *_ALL_REDUCE)
MONITORS = tuple(metric.name for metric in METRICS if metric.is_monitor)
CLASS_METRICS = tuple(metric.name for metric in METRICS if metric.needs_classes)
MOST_OWN = 8  # of the user's numbers among the headlines: one for each class would fill a terminal
_COSTS = ("loss", "_ms", "_gib", "_share")  # endings of metrics of which less is better


def headlines(names: Iterable[str]) -> list[str]:
    """Return the names that a terminal, or a table at first, shows: those listed, then own ones.

    The scalars of a training step are not among them, unless there is nothing else.
    """
    given = list(names)
    own = [name for name in given if name not in LISTED and not name.startswith("collectives/")]
    first = [name for name in own if not name.startswith("train/")]
    found = [*(name for name in _HEADLINES if name in given), *first[:MOST_OWN]]
    return found or own[:MOST_OWN]


def best_end(name: str, directions: Mapping[str, str] | None = None) -> str | None:
    """Return which value of a metric is best, min or max; None if nobody says.

    Args:
        name: of a metric; one that is not listed may also go by its ending.
        directions: by the names of the user's metrics, as run.json has them. ``eval/NAME`` counts
            for ``eval/NAME_KEY`` and for ``best/NAME``, too.
    """
    if name in LISTED:
        lower = LISTED[name].lower_is_better
        return None if lower is None else "min" if lower else "max"
    evaluated = name.replace("best/", "eval/")
    fits = [own for own in directions or () if f"{evaluated}_".startswith(f"{own}_")]
    if fits:
        return (directions or {})[max(fits, key=len)]
    return "min" if name.endswith(_COSTS) else None


def is_lower_better(name: str, directions: Mapping[str, str] | None = None) -> bool:
    """Return whether less of a metric is better; see ``best_end``."""
    return best_end(name, directions) == "min"
