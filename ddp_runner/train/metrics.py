"""The metrics of an optimizer step."""

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart
from ddp_runner.rank.cuda import peak_memory_gib
from ddp_runner.train.state import TrainState


def step_metrics(state: TrainState, loss: Tensor, *, lr: float) -> dict[str, float]:
    """Return the last step's metrics, over all ranks. Collective: every rank must call.

    Args:
        state: of this rank, after the step.
        loss: this rank's part of the mean loss, a scalar.
        lr: the learning rate of the step.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    env, own_loss, norm = state.setup.env, loss.item(), state.grad_norm
    metrics, parts = state.setup.timer.lap()
    comm = [0.0] * env.world_size
    comm[env.rank] = parts.get(StepPart.COMM, 0.0)
    own = [own_loss, *parts.values(), *comm, *(one.item() for one in state.scalars.values())]
    total, *sums = sum_over_ranks(own, group=state.setup.group)
    comm_by_rank, scalars = (
        sums[len(parts) :][: env.world_size],
        sums[len(parts) + env.world_size :],
    )
    means = {part: value / env.world_size for part, value in zip(parts, sums, strict=False)}
    if norm is None:
        norm = gradient_norm(state.module.parameters())
    step_time_ms = metrics["perf/step_time_ms"]
    return {
        "train/loss": _finite_loss(total, state),
        **{f"train/{name}": one for name, one in zip(state.scalars, scalars, strict=True)},
        "train/lr": lr,
        "train/grad_norm": float(norm),
        **metrics,
        **part_metrics(means, comm_by_rank=comm_by_rank, step_time_ms=step_time_ms),
        "perf/peak_memory_gib": peak_memory_gib(),
        **state.gradients.metrics(),
    }


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the L2 norm of the whole gradient, a scalar."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in gradients]
    return nn.utils.get_total_norm(dense)


def part_metrics(
    parts: Mapping[StepPart, float], *, comm_by_rank: Sequence[float], step_time_ms: float
) -> dict[str, float]:
    """Return the metrics of a step's parts.

    Communication counts where no computation hides it. The rank that spends the least time in it
    is taken to measure the exchange itself; the other ranks spend the rest waiting for slower ones.

    Args:
        parts: mean over the ranks, in milliseconds.
        comm_by_rank: milliseconds that each rank spends in ``comm``; ignored for a single rank.
        step_time_ms: of the whole step.
    """
    metrics = {part.metric: value for part, value in parts.items() if part is not StepPart.COMM}
    if len(comm_by_rank) > 1:
        exchange = min(comm_by_rank)
        metrics[StepPart.COMM.metric] = exchange
        metrics[StepPart.WAIT.metric] = parts[StepPart.COMM] - exchange
        metrics["perf/comm_share"] = exchange / step_time_ms
    return metrics


def global_loss(state: TrainState, loss: Tensor) -> float:
    """Return the mean loss over the global batch. Collective: every rank must call.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    (total,) = sum_over_ranks([loss.item()], group=state.setup.group)
    return _finite_loss(total, state)


def _finite_loss(loss: float, state: TrainState) -> float:
    if not math.isfinite(loss):
        raise UserError(
            f"train/loss became {loss} by step {state.position.step}; it was not saved: start "
            "again with a smaller optimizer.lr or train.clip_norm=1.0, or resume from a checkpoint "
            "whose loss was still small"
        )
    return loss
