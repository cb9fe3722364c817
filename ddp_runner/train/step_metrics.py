"""The metrics of an optimizer step."""

import math
from itertools import chain

import torch

from ddp_runner.device import peak_memory_gib, values_of
from ddp_runner.distributed import add_over_ranks, sum_over_ranks
from ddp_runner.errors import UserError
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Sums
from ddp_runner.train.clipping import gradient_norm
from ddp_runner.train.flops import measure_peaks
from ddp_runner.train.state import TrainState
from ddp_runner.train.step import step_of

EXCHANGE = (StepPart.COMM, StepPart.WAIT)  # these come from all ranks' times
MEMORY = "perf/peak_memory_gib"  # a trace takes time, but no memory of the GPU
SETTLED_S = 30.0  # since the session's warm-up


def step_metrics(state: TrainState, sums: Sums, *, lr: float) -> dict[str, float]:
    """Return the last step's metrics, over all ranks. Collective: every rank must call.

    Those of a step that was traced have no times.

    Args:
        state: of this rank, after the step.
        sums: what the step returned.
        lr: the learning rate of the step.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    env, norm = state.work.env, sums.grad_norm
    own_loss, *own_scalars = values_of([sums.loss, *sums.scalars.values()])
    is_slow = state.profiler.is_slow
    lap = state.timer.lap()
    exchanges = () if is_slow else lap.exchanges
    parts = {part: ms for part, ms in lap.parts.items() if part not in EXCHANGE}
    is_settled = state.timer.running_s > SETTLED_S
    # Of the ranks that compute one share together, the first counts.
    counts = env.rank % state.work.layout.model_ranks == 0
    own = [own_loss * counts, *(one * counts for one in own_scalars), *parts.values(), is_settled]
    # What is wanted of each rank: its peak of memory, and the two times of each exchange.
    column = [peak_memory_gib(), *chain(*zip(*exchanges, strict=True))]
    by_rank = torch.zeros(len(column), env.world_size, dtype=torch.float64)
    by_rank[:, env.rank] = torch.tensor(column, dtype=torch.float64)
    # One all-reduce for all of it, and the times stay a tensor: this runs in the training loop.
    packed = torch.cat([torch.tensor(own, dtype=torch.float64), by_rank.flatten()])
    added = add_over_ranks(packed, state.work.group)
    loss, *totals, num_settled = added[: len(own)].tolist()
    memory, times = added[len(own) :].view_as(by_rank).split([1, len(column) - 1])
    scalars, part_totals = totals[: len(own_scalars)], totals[len(own_scalars) :]
    state.memory_gib = memory[0].tolist()
    if norm is None:
        norm = gradient_norm(state.module.parameters())
    if state.peaks is None and num_settled == env.world_size and not is_slow:
        state.peaks = measure_peaks(state)
        state.timer.restart()
    flops, peak = state.peaks or (0.0, 0.0)
    step_time_ms = lap.metrics["perf/step_time_ms"]
    found = {
        "train/loss": _finite_loss(loss, state),
        **{f"train/{name}": one for name, one in zip(sums.scalars, scalars, strict=True)},
        "train/lr": lr,
        "train/grad_norm": float(norm),
        **lap.metrics,
        **{one.metric: ms / env.world_size for one, ms in zip(parts, part_totals, strict=True)},
        **state.skew.add(times.view(2, len(exchanges), env.world_size), step_time_ms=step_time_ms),
        **({"perf/mfu": flops * lap.metrics["perf/samples_per_s"] / peak} if peak else {}),
        MEMORY: max(state.memory_gib),
        **state.engine.metrics(),
    }
    if not is_slow:
        return found
    return {key: one for key, one in found.items() if key == MEMORY or not key.startswith("perf/")}


def ensure_known(name: str, state: TrainState) -> None:
    """Reject a scalar that the trial did not see: the ranks add up scalars by their order.

    Raises:
        UserError: on the rank whose batch has it.
    """
    if state.scalars is not None and name not in state.scalars:
        raise UserError(
            f"{step_of(state.work.config)} returned the scalar {name} for a batch, and not for the "
            "two samples that were tried; return the same names for each batch, with 0 where there "
            "is nothing to count"
        )


def global_loss(state: TrainState, sums: Sums) -> float:
    """Return the mean loss over a step's global batch. Collective: every rank must call.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    (total,) = sum_over_ranks([sums.loss.item()], group=state.work.data_group)
    return _finite_loss(total, state)


def _finite_loss(loss: float, state: TrainState) -> float:
    if not math.isfinite(loss):
        raise UserError(
            f"train/loss became {loss} by step {state.step}; it was not saved: start "
            "again with a smaller optimizer.lr or train.clip_norm=1.0, or resume from a checkpoint "
            "whose loss was still small"
        )
    return loss
