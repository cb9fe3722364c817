"""The metrics of an optimizer step, over all ranks."""

import math

from torch import Tensor, nn

from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart
from ddp_runner.rank.cuda import peak_memory_gib
from ddp_runner.train.state import TrainState
from ddp_runner.train.step_timer import part_metrics


def step_metrics(state: TrainState, loss: Tensor, *, lr: float) -> dict[str, float]:
    """Return the last step's metrics, over all ranks. Collective: every rank must call.

    Args:
        state: of this rank, after the step.
        loss: this rank's part of the mean loss, a scalar.
        lr: the learning rate of the step.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    setup = state.setup
    rank, world_size = setup.env.rank, setup.env.world_size
    own_loss = loss.item()
    metrics, parts = setup.timer.lap()
    own_comm = parts.get(StepPart.COMM, 0.0)
    comm = [own_comm if other == rank else 0.0 for other in range(world_size)]
    total, *sums = sum_over_ranks([own_loss, *parts.values(), *comm], group=setup.group)
    means = [value / world_size for value in sums[: len(parts)]]
    parts = dict(zip(parts, means, strict=True))
    return {
        "train/loss": finite_loss(total, step=state.position.step),
        "train/lr": lr,
        "train/grad_norm": float(_grad_norm(state.module))
        if state.grad_norm is None
        else float(state.grad_norm),
        **metrics,
        **part_metrics(
            parts, comm_by_rank=sums[len(parts) :], step_time_ms=metrics["perf/step_time_ms"]
        ),
        "perf/peak_memory_gib": peak_memory_gib(),
        **state.gradients.metrics(),
    }


def global_loss(state: TrainState, loss: Tensor) -> float:
    """Return the mean loss over the global batch. Collective: every rank must call.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    (total,) = sum_over_ranks([loss.item()], group=state.setup.group)
    return finite_loss(total, step=state.position.step)


def finite_loss(loss: float, *, step: int) -> float:
    """Return the loss if it is finite.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    if not math.isfinite(loss):
        raise UserError(
            f"train/loss became {loss} by step {step}; it was not saved: start again with a "
            "smaller optimizer.lr or train.clip_norm=1.0, or resume from a checkpoint whose loss "
            "was still small"
        )
    return loss


def _grad_norm(module: nn.Module) -> Tensor:
    """Return the L2 norm over all gradients, a scalar."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in gradients]
    return nn.utils.get_total_norm(dense)
