"""Metrics of an evaluation: fresh objects take in each rank's batches, and are merged into one.

A metric of ours or of the user's is sent to the other ranks as a whole. Classes of torchmetrics
name a reduction for each of their states, so only the states are sent.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ddp_runner.data.trees import shape_of
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError, typed

UNSENT = "cannot be sent to other ranks", "it may hold no lambda and no file"


@runtime_checkable
class Metric(Protocol):
    """What every metric has.

    It also has ``merge(other)``, which takes in what the object of the next rank has taken in,
    maybe no batch; classes of torchmetrics need none. ``higher_is_better``, True or False, may say
    which value is best.
    """

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in a batch: the outputs and targets of a training step, on their device."""

    def compute(self) -> Any:
        """Return a number, a vector of numbers, or a mapping from names to numbers."""


def summed(*names: str) -> Callable[[Any, Any], None]:
    """Return the ``merge`` of a metric whose attributes only grow.

    A class has the line ``merge = summed("hits", "count")``. Numbers, tensors and arrays are added,
    lists are joined in the order of the ranks, and dicts are added key by key. Before the first
    batch an attribute is 0, empty or None.
    """

    def merge(self: Any, other: Any) -> None:
        for name in names:
            setattr(self, name, _sum(getattr(self, name), getattr(other, name)))

    return merge


def _sum(value: Any, other: Any) -> Any:
    if value is None or other is None:
        return other if value is None else value
    if not isinstance(value, dict):
        return value + other
    for key, more in other.items():  # in place: it may be a Counter
        value[key] = _sum(value.get(key), more)
    return value


def directions(metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Return max or min, which is best, for each metric whose class says so, by eval/NAME."""
    known = {name: getattr(one, "higher_is_better", None) for name, one in metrics.items()}
    return {f"eval/{name}": "max" if up else "min" for name, up in known.items() if up is not None}


class ComputeError(UserError):
    """The ``compute`` of a metric raised an exception."""


class Evaluation:
    """Metrics that take in one evaluation set, split among the ranks.

    Args:
        metrics: by name, as configured; they stay as they are.
        device: of the outputs and targets.

    Raises:
        UserError: a metric has no ``merge``, or cannot be sent to the other ranks.
    """

    def __init__(self, metrics: Mapping[str, Metric], *, device: torch.device) -> None:
        self._device, self._own = device, dict[str, Any]()
        for name, metric in metrics.items():
            with _named(name, metric, *UNSENT):
                self._own[name] = _fresh(metric, device)

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in a batch of this rank.

        Raises:
            UserError: a metric cannot take it.
        """
        for name, metric in self._own.items():
            if outputs is None:
                raise UserError(
                    f"metrics.{name} needs the outputs of the model, and train.step returns none; "
                    "return StepOutput(loss_sum, count, outputs=OUTPUTS, targets=TARGETS)"
                )
            batch = f"outputs {shape_of(outputs)} with targets {shape_of(targets)}"
            with _named(name, metric, f"cannot take {batch}"):
                metric.update(outputs, targets)

    def packed(self) -> dict[str, bytes]:
        """Return what other ranks need of each metric; see ``compute``."""
        states = dict[str, bytes]()
        for name, metric in self._own.items():
            with _named(name, metric, *UNSENT):
                states[name] = packed(metric)
        return states

    def compute(self, *, group: ProcessGroup | None = None) -> dict[str, float]:
        """Return each metric over the samples of all ranks, as ``eval/NAME``. Call it once.

        A rank may have taken in no batch. Collective: every rank of the group must call; None: all
        ranks.

        Raises:
            UserError: the states of a metric cannot be merged, or it computes no number. All ranks
                raise the same error.
        """
        return self.over(gather_objects(self.packed(), group=group)) if self._own else {}

    def over(self, by_rank: Sequence[Mapping[str, bytes]]) -> dict[str, float]:
        """Return each metric over ranks, from what they have packed; see ``compute``."""
        results = dict[str, float]()
        for name, metric in self._own.items():
            with _named(name, metric, "cannot merge what another rank has"):
                whole = merged(metric, [states[name] for states in by_rank], self._device)
            after = " after its merge" if len(by_rank) > 1 else ""
            with _named(name, metric, f"cannot be computed{after}", kind=ComputeError):
                value = whole.compute()
            results |= _numbers(name, value)
        return results


@contextmanager
def _named(
    name: str,
    metric: Metric,
    failed: str,
    fix: str = "correct it, or choose a metric that fits the model",
    kind: type[UserError] = UserError,
) -> Iterator[None]:
    """Name the metric in any error of the block but a lack of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except UserError as error:
        raise kind(f"{title(name, metric)}: {error}") from error
    except Exception as error:
        raise kind(f"{title(name, metric)} {failed}: {typed(error)}; {fix}") from error


def title(name: str, metric: Metric) -> str:
    """Return a metric's name and class, for messages."""
    return f"metrics.{name} ({type(metric).__name__})"


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each number that a metric computed."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}_{key}", item)
    elif isinstance(value, Tensor) and value.ndim == 1 and value.numel() != 1:
        for index, item in enumerate(value.tolist()):
            yield f"eval/{name}_{index}", float(item)
    else:
        try:
            yield f"eval/{name}", float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"metrics.{name} computes {shape_of(value)}; return a number, a vector of numbers, "
                "or a mapping from names to numbers"
            ) from None


def packed(metric: Metric) -> bytes:
    """Return what other ranks need of a metric."""
    buffer = BytesIO()
    torch.save([_state(part) for part in _theirs(metric)] or metric, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes, device: torch.device) -> Any:
    return torch.load(BytesIO(data), map_location=device, weights_only=False)


def merged(own: Metric, by_rank: Sequence[bytes], device: torch.device) -> Any:
    """Return a metric that has what all ranks have taken in; `own` is changed."""
    states = [_unpacked(data, device) for data in by_rank]
    if parts := _theirs(own):
        for part, by_rank_of_part in zip(parts, zip(*states, strict=True), strict=True):
            _merge(part, by_rank_of_part)
        return own
    whole, *others = states
    for other in others:
        whole.merge(other)
    return whole


def _fresh(metric: Metric, device: torch.device) -> Any:
    """Return a copy of a metric with its tensors on a device."""
    if _theirs(metric):
        theirs: Any = copy.deepcopy(metric)
        theirs.to(device)  # of a collection it returns nothing
        return theirs
    if not hasattr(metric, "merge"):
        raise UserError(
            "it has no merge(self, other), which makes one metric of those of two ranks; write it, "
            'or merge = summed("hits", "count") with ddp_runner.summed'
        )
    return _unpacked(packed(metric), device)


def _theirs(metric: Any) -> list[Any]:
    """Return a metric of torchmetrics and the metrics inside of it; nothing for other objects.

    torchmetrics has no public name for how a state is reduced. Its own exchange is not used: a rank
    without samples has empty lists, whose shape and type the other ranks do not expect. Checked
    with torchmetrics 1.9.
    """
    is_collection = isinstance(metric, nn.ModuleDict) and hasattr(metric, "compute_groups")
    if not (is_collection or hasattr(metric, "_reductions")):
        return []
    return [module for module in metric.modules() if hasattr(module, "_reductions")]


def _state(metric: Any) -> dict[str, Any]:
    state = {name: getattr(metric, name) for name in metric._reductions}
    return {**state, "_update_count": metric._update_count}


def _merge(metric: Any, states: Sequence[dict[str, Any]]) -> None:
    """Set the states of all ranks in a metric of torchmetrics, reduced as it asks.

    Its exchange gives a reduction the ranks' tensors as one stack, and lists as one list. A sum
    over each output, as in R2Score, is a single 0 on a rank without samples.
    """
    if any(state.keys() != states[0].keys() for state in states):
        raise UserError(
            "it adds states with its first batch, so a rank without samples lacks them; give it "
            "what it takes from that batch, such as num_classes"
        )
    for name, reduction in metric._reductions.items():
        values = [state[name] for state in states]
        is_list = isinstance(values[0], list)
        joined = list(chain(*values)) if is_list else torch.stack(torch.broadcast_tensors(*values))
        is_empty = is_list and not joined
        setattr(metric, name, joined if reduction is None or is_empty else reduction(joined))
    metric._update_count = sum(state["_update_count"] for state in states)
    metric.distributed_available_fn = lambda: False  # its compute would exchange them once more
