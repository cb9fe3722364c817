"""The metrics of an optimizer step, and the measurements behind ``perf/mfu``."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.data.splits import NUM_FIRST
from ddp_runner.device import peak_memory_gib, values_of
from ddp_runner.distributed import add_over_ranks, sum_over_ranks
from ddp_runner.errors import UserError, typed
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.mode import Sums
from ddp_runner.parallelism.modules import blocks_of
from ddp_runner.parallelism.shards import has_shards
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.train.clipping import gradient_norm
from ddp_runner.train.state import DTYPES, TrainState, Work, forward, restored_after
from ddp_runner.train.step import step_of

EXCHANGE = (StepPart.COMM, StepPart.WAIT)  # Skew computes these from all ranks' times
MEMORY = "perf/peak_memory_gib"  # a trace takes time, but no GPU memory
SETTLED_S = 30.0  # after the session's warm-up, when the peaks are measured
BUDGET_S = 0.05  # for the matrix products of one device
SMALLEST, LARGEST = 256, 4096  # rows of the matrices; the largest two take 0.13 GB in fp32


def reduce_step_metrics(state: TrainState, sums: Sums, *, lr: float) -> dict[str, float]:
    """Return the last step's metrics, over all ranks. Collective: every rank must call.

    `sums` and `lr` are the step's result and learning rate. A traced step has no times.

    Raises:
        UserError: the loss is NaN or infinite.
    """
    env, norm = state.work.env, sums.grad_norm
    values = values_of([sums.loss, *sums.scalars.values()])
    is_slow = state.profiler is not None and state.profiler.is_slow
    lap = state.timer.lap()
    exchanges = () if is_slow else lap.exchanges
    parts = {part: ms for part, ms in lap.parts.items() if part not in EXCHANGE}
    is_settled = state.timer.running_s > SETTLED_S
    # Ranks that compute one share together have the same loss: count it on the first of them.
    is_counted = env.rank % state.work.layout.model_ranks == 0
    step_time_ms = lap.metrics["perf/step_time_ms"]
    summands = [*(value * is_counted for value in values), *parts.values(), is_settled]
    # A column per rank: its peak memory, and the two times of each exchange.
    column = [peak_memory_gib(), *chain(*zip(*exchanges, strict=True))]
    (loss, *totals, num_settled, total_ms), by_rank = _over_ranks(
        state.work, [*summands, step_time_ms], column
    )
    state.timer.choose_steps(total_ms / env.world_size)
    scalars, part_totals = totals[: len(sums.scalars)], totals[len(sums.scalars) :]
    state.memory_gib, times = by_rank[0].tolist(), by_rank[1:]
    if norm is None:
        norm = gradient_norm(state)
    if state.peaks is None and num_settled == env.world_size and not is_slow:
        state.peaks = measure_peaks(state)
        state.timer.restart()
    flops, peak = state.peaks or (0.0, 0.0)
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


def _over_ranks(
    work: Work, summands: Sequence[float], column: Sequence[float]
) -> tuple[list[float], Tensor]:
    """Return the sums over ranks, and the column of each rank: (len(column), world_size).

    A single all-reduce gives both, because it runs in the training loop. Collective.
    """
    by_rank = torch.zeros(len(column), work.env.world_size, dtype=torch.float64)
    by_rank[:, work.env.rank] = torch.tensor(column, dtype=torch.float64)
    packed = torch.cat([torch.tensor(summands, dtype=torch.float64), by_rank.flatten()])
    reduced = add_over_ranks(packed, work.group)
    return reduced[: len(summands)].tolist(), reduced[len(summands) :].view_as(by_rank)


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


def measure_peaks(state: TrainState) -> tuple[float, float]:
    """Return a sample's operations, and the operations per second of all ranks.

    Both are 0 if a rank cannot measure them; its log says why. Collective: every rank must call.
    """
    work, dtype = state.work, DTYPES[state.work.config.train.precision]
    measured = (0.0, 0.0)
    try:
        measured = flops_per_sample(state), matmul_flops_per_s(work.devices, dtype)
    except Exception as error:  # a full GPU, or a mode without a whole sample: the run continues
        log_to_file(f"this run has no perf/mfu: {typed(error)}")
    sums = sum_over_ranks([measured[1] > 0, 1, *measured], group=work.group)
    num_measured, num_ranks, flops, peak = sums
    return (flops / num_ranks, peak) if num_measured == num_ranks else (0.0, 0.0)


def flops_per_sample(state: TrainState) -> float:
    """Return the operations of the products in a sample's forward and backward.

    Computes ``state.sample``; restores all but the gradients. Collective if the model is split.

    Raises:
        ValueError: no rank computes a whole sample, or the step has no products.
    """
    from torch.utils.flop_counter import FlopCounterMode  # takes 0.1 s

    work, module = state.work, state.module
    if not work.layout.computes_batches or isinstance(state.model, nn.DataParallel):
        raise ValueError("other devices compute this rank's gradients")
    if work.layout.model_ranks > 1:
        raise ValueError("each rank computes a part of a sample")
    formulas = {torch.ops.aten.convolution_backward: _convolution_backward}
    assert state.sample is not None
    with (
        restored_after(state),
        _computing_once(state),
        FlopCounterMode(display=False, custom_mapping=formulas) as counter,
    ):
        module.train()
        loss = forward(state.work, module, state.sample).loss_sum
        if has_shards(module):  # FSDP replaces the parameters during the forward
            loss.backward()
            module.zero_grad(set_to_none=True)
        else:  # does not touch the gradients or DDP's hooks
            parameters = [value for value in module.parameters() if value.requires_grad]
            torch.autograd.grad(loss, parameters, allow_unused=True)
    if not (flops := counter.get_total_flops()):
        raise ValueError("the step multiplies nothing")
    return float(flops / NUM_FIRST)


@contextmanager
def _computing_once(state: TrainState) -> Iterator[None]:
    """Disable activation checkpointing: repeated operations count once."""
    config = state.work.config
    patterns = (config.model.get("blocks") or ()) if config.train.activation_checkpointing else ()
    blocks = blocks_of(state.module, patterns)
    checkpointed = [vars(block).pop("forward") for block in blocks]
    try:
        yield
    finally:
        for block, forward_twice in zip(blocks, checkpointed, strict=True):
            block.forward = forward_twice


def _convolution_backward(grad: Any, inputs: Any, weight: Any, *args: Any, **_: Any) -> int:
    """Return the forward's operations for each gradient; torch's formula ignores groups."""
    from torch.utils.flop_counter import conv_flop_count

    is_transposed, output_mask = args[4], args[7]
    return conv_flop_count(inputs, weight, grad, is_transposed) * int(sum(output_mask[:2]))


@torch.no_grad()
def matmul_flops_per_s(devices: Sequence[torch.device], dtype: torch.dtype) -> float:
    """Return the operations per second of large matrix products, summed over different devices.

    This is the rate in practice, with this number of threads and beside the machine's other ranks,
    not the rate of the data sheet.
    """
    total = 0.0
    for device in set(devices):
        size, took_s = SMALLEST // 2, 0.0
        while took_s <= BUDGET_S / 10 and size < LARGEST:
            size *= 2
            # A GPU multiplies zeros faster, so take other numbers.
            factor = torch.linspace(0.1, 1.0, size * size, device=device).to(dtype).view(size, size)
            product = factor @ factor  # warms up: choosing a kernel may take long
            took_s = _timed(factor, product, count=1)
        count = max(1, int(BUDGET_S / took_s))
        total += 2 * size**3 * count / _timed(factor, product, count=count)
    return total


def _timed(factor: Tensor, product: Tensor, *, count: int) -> float:
    """Return the seconds of `count` products."""
    product[0, 0].item()  # waits for a GPU
    started = time.perf_counter()
    for _ in range(count):
        torch.mm(factor, factor, out=product)
    product[0, 0].item()
    return time.perf_counter() - started
