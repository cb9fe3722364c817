"""Computes gradients on this rank, for its own loop or for a loop on another rank."""

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial

from torch import Tensor

from ddp_runner.data.batches import StepBatch
from ddp_runner.job import Status
from ddp_runner.parallelism.mode import Duties
from ddp_runner.train.loop import backward
from ddp_runner.train.state import TrainState


class OwnGradients:
    """Gradients from this rank's own backward; see ``GradientSource``."""

    lost: Collection[int] = ()

    def compute(self, state: TrainState, batch: StepBatch) -> Tensor:
        """Accumulate over the micro-batches and reduce with the last one. Collective."""
        return backward(state, batch)

    def outstanding(self, state: TrainState) -> tuple[int, ...]:
        """Return the batches that an asynchronous run skipped and this run has yet to compute."""
        position, batches = state.position, state.setup.batches
        first = position.epoch * batches.steps_per_epoch + position.step_in_epoch
        return tuple(batch for place, batch in batches.instead.items() if place >= first)

    def metrics(self) -> Mapping[str, float]:
        """Return no metrics: there is no other rank to measure."""
        return {}

    def close(self, status: Status) -> None:
        """Do nothing: no other rank waits for the end of the run."""


def duties_of(
    state: TrainState,
    *,
    max_steps: int,
    seed: int,
    timeout_s: float,
    ended: Callable[[], Collection[int]],
    log: Callable[[str], None],
) -> Duties:
    """Return the duties of a run that continues at the state's position and ends at max_steps.

    The other arguments are the fields of ``Duties``.
    """
    position, batches = state.position, state.setup.batches
    return Duties(
        module=state.module,
        first_step=position.epoch * batches.steps_per_epoch + position.step_in_epoch,
        num_steps=max(0, max_steps - position.step),
        outstanding=position.outstanding,
        compute=partial(backward_by_number, state, lru_cache(maxsize=2)(batches.order)),
        seed=seed,
        timeout_s=timeout_s,
        ended=ended,
        mark=state.setup.timer.mark,
        log=log,
    )


def backward_by_number(state: TrainState, order: Callable[[int], Tensor], number: int) -> Tensor:
    """Run backward on this rank's part of a batch; return its part of the mean loss.

    Args:
        state: of this rank.
        order: returns an epoch's order of samples.
        number: of the batch, counted from the start of the run.
    """
    batches = state.setup.batches
    epoch, index = divmod(number, batches.steps_per_epoch)
    return backward(state, batches.step(epoch, index, order=order(epoch)))
