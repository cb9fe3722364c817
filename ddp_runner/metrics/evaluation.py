"""The metrics of one evaluation: fresh copies take in each rank's batches, then one value each."""

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError, listed, typed
from ddp_runner.metrics.merge import UnmergeableError, merged, moved, state_of
from ddp_runner.metrics.metric import Metric


class ComputeError(UserError):
    """The ``compute`` of a metric raised an exception."""


class Evaluation:
    """Metrics that take in one evaluation set, split among the ranks.

    Args:
        metrics: by name, as configured; they stay as they are.
        device: of the outputs and targets.
    """

    def __init__(self, metrics: Mapping[str, Metric], *, device: torch.device) -> None:
        self._configured, self._device = metrics, device
        self._own = {name: moved(copy.deepcopy(one), device) for name, one in metrics.items()}

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
            try:
                metric.update(outputs, targets)
            except torch.OutOfMemoryError:
                raise
            except UserError as error:
                raise UserError(f"{_title(name, metric)}: {error}") from error
            except Exception as error:
                raise UserError(
                    f"{_title(name, metric)} cannot take outputs {_shape(outputs)} with targets "
                    f"{_shape(targets)}: {typed(error)}; choose a metric that fits the model"
                ) from error

    def compute(self, *, group: ProcessGroup | None = None) -> dict[str, float]:
        """Return each metric over the samples of all ranks, as ``eval/NAME``. Call it once.

        A rank may have taken in no batch. Every rank computes the same numbers from the same
        states. Collective: every rank of the group must call; None: all ranks.

        Raises:
            UserError: the states of a metric cannot be merged, or it computes no number. All ranks
                raise the same error.
        """
        if not self._own:
            return {}
        try:
            by_rank = gather_objects(self._states(), group=group)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"metrics ({listed(list(self._own))}) cannot be sent to the other ranks: "
                f"{typed(error)}; an object with merge(self, other) may hold no lambda and no file"
            ) from error
        results = dict[str, float]()
        for name in self._own:
            results |= self._result(name, [states[name] for states in by_rank])
        return results

    def try_compute(self) -> tuple[set[str], set[str]]:
        """Return the names of the numbers over this rank's batches, and the metrics without one.

        Some metrics cannot be computed from a few samples. Call it once, in place of ``compute``.

        Raises:
            UserError: a metric computes something else than numbers.
        """
        names, without, states = set[str](), set[str](), self._states()
        for name, state in states.items():
            try:
                names |= self._result(name, [state]).keys()
            except ComputeError:
                without.add(name)
        return names, without

    def _states(self) -> dict[str, Any]:
        return {name: state_of(metric) for name, metric in self._own.items()}

    def _result(self, name: str, states: list[Any]) -> dict[str, float]:
        """Return the numbers of a metric from its states on the ranks."""
        own, start = self._own[name], copy.deepcopy(self._configured[name])
        title = _title(name, own)
        try:
            value = moved(merged(own, start, states), self._device).compute()
        except torch.OutOfMemoryError:
            raise
        except UnmergeableError as error:
            raise UserError(f"{title} {error}") from error
        except Exception as error:
            raise ComputeError(f"{title} raises {typed(error)} in its compute; mend it") from error
        return dict(_numbers(name, value))


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
                f"metrics.{name} computes {_shape(value)}; return a number, a vector of numbers, "
                "or a mapping from names to numbers"
            ) from None


def _title(name: str, metric: Metric) -> str:
    return f"metrics.{name} ({type(metric).__name__})"


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    keys = f" of {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
    return f"a {type(value).__name__}{keys}"
