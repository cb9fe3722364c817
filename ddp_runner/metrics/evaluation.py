"""The metrics of one evaluation: fresh copies take in each rank's batches, then one value each."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ddp_runner.data.trees import first_tensor, shape_of
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError, typed
from ddp_runner.metrics.merge import fresh, merged, packed
from ddp_runner.metrics.metric import Metric

Batch = tuple[Any, Any]  # the outputs and targets of a training step
ROUNDING, NEGLIGIBLE = 1e-3, 1e-6  # relative and absolute
FIX = "correct it, or choose a metric that fits the model"


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
        self._device, self._own = device, dict[str, Metric]()
        for name, metric in metrics.items():
            with _sending(name, metric):
                self._own[name] = fresh(metric, device)

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in a batch of this rank.

        Raises:
            UserError: a metric cannot take it.
        """
        for name, metric in self._own.items():
            if outputs is None:
                raise UserError(
                    f"metrics.{name} needs the outputs of the model, and train.step returns none; "
                    "return Step(loss_sum, count, outputs=OUTPUTS, targets=TARGETS)"
                )
            batch = f"outputs {shape_of(outputs)} with targets {shape_of(targets)}"
            with _named(name, metric, f"cannot take {batch}"):
                metric.update(outputs, targets)

    def packed(self) -> dict[str, bytes]:
        """Return what other ranks need of each metric, by its name.

        Raises:
            UserError: a metric cannot be sent.
        """
        states = dict[str, bytes]()
        for name, metric in self._own.items():
            with _sending(name, metric):
                states[name] = packed(metric)
        return states

    def compute(self, *, group: ProcessGroup | None = None) -> dict[str, float]:
        """Return each metric over the samples of all ranks, as ``eval/NAME``. Call it once.

        A rank may have taken in no batch. Every rank computes the same numbers from the same
        states. Collective: every rank of the group must call; None: all ranks.

        Raises:
            UserError: see ``over``. All ranks raise the same error.
        """
        return self.over(gather_objects(self.packed(), group=group)) if self._own else {}

    def over(self, by_rank: Sequence[Mapping[str, bytes]]) -> dict[str, float]:
        """Return each metric over ranks, from what they have packed. Call it once.

        Raises:
            UserError: the states of a metric cannot be merged, or it computes no number.
        """
        results = dict[str, float]()
        for name, own in self._own.items():
            with _named(name, own, "cannot merge what another rank has"):
                whole = merged(own, [states[name] for states in by_rank], self._device)
            after = " after its merge" if len(by_rank) > 1 else ""
            with _named(name, own, f"cannot be computed{after}", kind=ComputeError):
                value = whole.compute()
            results |= _numbers(name, value)
        return results


def try_metrics(
    metrics: Mapping[str, Metric], *batches: Batch, device: torch.device
) -> tuple[set[str], set[str]]:
    """Return the names of the numbers that metrics compute, and the metrics that need more samples.

    One object takes in the batches, and so do the objects of four ranks, of which two have none and
    the last has more than the others. Merged, they must compute the same; a metric that draws
    random numbers cannot be compared.

    Raises:
        UserError: a metric cannot take a batch, computes something else than numbers, or its
            ``merge`` changes them.
    """
    names, without = set[str](), set[str]()
    for name, metric in metrics.items():
        first, second = batches
        rounding = _rounding(first[0])
        over = partial(_over_ranks, name, metric, device=device)
        try:
            whole = over([[first, second, second]])
        except ComputeError:
            without.add(name)
            continue
        names |= whole.keys()
        parts = over([[], [first], [], [second, second]])
        off = _off(whole, parts, rounding)
        if off and not _off(whole, over([[first, second, second]]), rounding):
            one, several = (values.get(off[0], math.nan) for values in (whole, parts))
            raise UserError(
                f"{_title(name, metric)} depends on how many ranks there are: {off[0]} is "
                f"{one:.6g} in one object and {several:.6g} merged from several; correct its "
                "merge(self, other), which must take in all that the other has"
            )
    return names, without


def _over_ranks(
    name: str, metric: Metric, by_rank: Sequence[Sequence[Batch]], *, device: torch.device
) -> dict[str, float]:
    """Return what a metric computes over ranks with these batches, all played by this one."""
    states = []
    for batches in by_rank:
        rank = Evaluation({name: metric}, device=device)  # one at a time: it may hold a network
        for outputs, targets in batches:
            rank.update(outputs, targets)
        states.append(rank.packed())
    return rank.over(states)


def _off(whole: Mapping[str, float], parts: Mapping[str, float], rounding: float) -> list[str]:
    """Return the names of the numbers that differ by more than rounding."""
    values = {key: (parts.get(key, math.nan), whole.get(key, math.nan)) for key in [*whole, *parts]}
    return [
        key
        for key, (one, other) in values.items()
        if not np.isclose(one, other, rtol=rounding, atol=NEGLIGIBLE, equal_nan=True)
    ]


def _rounding(outputs: Any) -> float:
    """Return what is far above the rounding of float32, or of outputs of 16 bits, and relative."""
    tensor = first_tensor(outputs)
    if tensor is None or not tensor.is_floating_point():
        return ROUNDING
    return max(ROUNDING, 8 * torch.finfo(tensor.dtype).eps)


@contextmanager
def _named(
    name: str, metric: Metric, failed: str, *, fix: str = FIX, kind: type[UserError] = UserError
) -> Iterator[None]:
    """Name the metric in each error of the block.

    Raises:
        UserError: of this kind, for any exception but one of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except UserError as error:
        raise kind(f"{_title(name, metric)}: {error}") from error
    except Exception as error:
        raise kind(f"{_title(name, metric)} {failed}: {typed(error)}; {fix}") from error


_sending = partial(
    _named, failed="cannot be sent to other ranks", fix="it may hold no lambda and no file"
)


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


def _title(name: str, metric: Metric) -> str:
    return f"metrics.{name} ({type(metric).__name__})"
