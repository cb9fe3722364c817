"""Every metric, listed once: its name, whether less is better, where it is shown. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


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
class Metric:
    """One metric. A chart is named by its category and title in TensorBoard's Custom Scalars."""

    name: str
    lower_is_better: bool | None  # None: neither
    is_headline: bool = False  # shown on the terminal, and among a table's first columns
    needs_classes: bool = False
    is_monitor: bool = False  # every checkpoint has it, so that checkpoint.monitor may name it
    charts: tuple[tuple[str, str], ...] = ()


_LOSSES = ("train", "loss of training and evaluation")
_PARTS = ("perf", "what a step's time goes into (ms)")
_MATCHES = ("eval", "precision, recall and F1")
# In the order of TensorBoard's HParams tab, which shows the first five at once.
METRICS = (
    Metric("eval/accuracy", False, True, True, True, charts=(("eval", "accuracy"),)),
    Metric("eval/loss", True, True, is_monitor=True, charts=(_LOSSES, ("eval", "loss"))),
    Metric("train/loss", True, True, is_monitor=True, charts=(_LOSSES,)),
    Metric("perf/samples_per_s", False, is_monitor=True, charts=(("perf", "samples per second"),)),
    Metric("perf/step_time_ms", True, is_monitor=True, charts=(("perf", "step time (ms)"),)),
    Metric("eval/f1", False, True, True, True, charts=(_MATCHES,)),
    Metric("eval/precision", False, False, True, True, charts=(_MATCHES,)),
    Metric("eval/recall", False, False, True, True, charts=(_MATCHES,)),
    Metric("train/grad_norm", None, charts=(("train", "gradient norm before clipping"),)),
    Metric("train/lr", None, is_monitor=True, charts=(("train", "learning rate"),)),
    Metric("perf/comm_share", True, charts=(("perf", "communication's part of the step time"),)),
    *(Metric(part.metric, True, charts=(_PARTS,)) for part in StepPart),
    Metric("perf/peak_memory_gib", True, charts=(("perf", "peak memory of rank 0 (GiB)"),)),
    Metric("best/accuracy", False, True, True),
    Metric("best/loss", True, True),
    Metric("best/f1", False, True, True),
    Metric("best/precision", False, False, True),
    Metric("best/recall", False, False, True),
    Metric("ps/staleness_mean", True, charts=(("ps", "staleness (updates)"),)),
    Metric("ps/staleness_max", True, charts=(("ps", "staleness (updates)"),)),
    Metric("ps/trainer_wait_ms", True, charts=(("ps", "waiting (ms)"),)),
    Metric("ps/server_wait_ms", True, charts=(("ps", "waiting (ms)"),)),
    Metric("ps/pushes_per_s", False, charts=(("ps", "pushes per second"),)),
    Metric("ps/num_trainers", None, charts=(("ps", "trainers"),)),
)
_BY_NAME = {metric.name: metric for metric in METRICS}
_ALL_REDUCE = tuple(  # of the largest message of task=collectives
    f"collectives/all_reduce_{dtype}_sum/busbw_gb_per_s"
    for dtype in ("float32", "bfloat16", "float16")
)
HEADLINES = (*(metric.name for metric in METRICS if metric.is_headline), *_ALL_REDUCE)
MONITORS = tuple(metric.name for metric in METRICS if metric.is_monitor)
CLASS_METRICS = tuple(metric.name for metric in METRICS if metric.needs_classes)
_COSTS = ("loss", "_ms", "_gib", "_share")  # endings of metrics of which less is better


def headlines(names: Iterable[str]) -> list[str]:
    """Return the names among these that are shown first: ours in their order, then a user's own."""
    given = list(names)
    own = [one for one in given if one not in _BY_NAME and not one.startswith("collectives/")]
    return [*(one for one in HEADLINES if one in given), *own]


def is_lower_better(name: str) -> bool:
    """Return whether less of a metric is better; a metric that is not listed goes by its ending."""
    known = _BY_NAME.get(name)
    if known is not None and known.lower_is_better is not None:
        return known.lower_is_better
    return name.endswith(_COSTS)
