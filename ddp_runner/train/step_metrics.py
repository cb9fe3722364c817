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

EXCHANGE = (StepPart.COMM, StepPart.WAIT)  # Skew computes these from all ranks' times
MEMORY = "perf/peak_memory_gib"  # a trace takes time, but no GPU memory
SETTLED_S = 30.0  # after the session's warm-up, when the peaks are measured


def step_metrics(state: TrainState, sums: Sums, *, lr: float) -> dict[str, float]:
    """Return the last step's metrics, over all ranks. Collective: every rank must call.

    `sums` and `lr` are the step's result and learning rate. A traced step has no times.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    env, norm = state.work.env, sums.grad_norm
    values = values_of([sums.loss, *sums.scalars.values()])
    is_slow = state.profiler.is_slow
    lap = state.timer.lap()
    exchanges = () if is_slow else lap.exchanges
    parts = {part: ms for part, ms in lap.parts.items() if part not in EXCHANGE}
    is_settled = state.timer.running_s > SETTLED_S
    # Ranks that compute one share together have the same loss: count it on the first of them.
    is_counted = env.rank % state.work.layout.model_ranks == 0
    summands = [*(value * is_counted for value in values), *parts.values(), is_settled]
    # A column per rank: its peak memory, and the two times of each exchange.
    column = [peak_memory_gib(), *chain(*zip(*exchanges, strict=True))]
    by_rank = torch.zeros(len(column), env.world_size, dtype=torch.float64)
    by_rank[:, env.rank] = torch.tensor(column, dtype=torch.float64)
    # A single all-reduce, because this runs in the training loop.
    packed = torch.cat([torch.tensor(summands, dtype=torch.float64), by_rank.flatten()])
    reduced = add_over_ranks(packed, state.work.group)
    loss, *totals, num_settled = reduced[: len(summands)].tolist()
    memory, times = reduced[len(summands) :].view_as(by_rank).split([1, len(column) - 1])
    scalars, part_totals = totals[: len(sums.scalars)], totals[len(sums.scalars) :]
    state.memory_gib = memory[0].tolist()
    if norm is None:
        norm = gradient_norm(state.module.parameters())
    if state.peaks is None and num_settled == env.world_size and not is_slow:
        state.peaks = measure_peaks(state)
        state.timer.restart()
    flops, peak = state.peaks or (0.0, 0.0)
    step_time_ms = lap.metrics["perf/step_time_ms"]
    metrics = {
        "train/loss": _finite_loss(loss, state),
        **{f"train/{name}": value for name, value in zip(sums.scalars, scalars, strict=True)},
        "train/lr": lr,
        "train/grad_norm": float(norm),
        **lap.metrics,
        **{part.metric: ms / env.world_size for part, ms in zip(parts, part_totals, strict=True)},
        **state.skew.add(times.view(2, len(exchanges), env.world_size), step_time_ms=step_time_ms),
        **({"perf/mfu": flops * lap.metrics["perf/samples_per_s"] / peak} if peak else {}),
        MEMORY: max(state.memory_gib),
        **state.engine.metrics(),
    }
    if not is_slow:
        return metrics
    timed = {name for name in metrics if name.startswith("perf/")} - {MEMORY}
    return {name: value for name, value in metrics.items() if name not in timed}


def ensure_tried(name: str, state: TrainState) -> None:
    """Reject a scalar that the trial did not return: the ranks add up scalars by position.

    Raises:
        UserError: on the rank with this batch.
    """
    if state.scalars is not None and name not in state.scalars:
        raise UserError(
            f"{step_of(state.work.config)} returned the scalar {name} for a batch, but not for the "
            "two samples of the trial",
            "return the same names for each batch, with 0 where there is nothing to count",
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
            f"train/loss became {loss} by step {state.step}",
            "that step was not saved: start again with a smaller optimizer.lr or "
            "train.clip_norm=1.0, or resume from a checkpoint with a small loss",
        )
    return loss
