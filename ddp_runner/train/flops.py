"""Measures the two numbers behind ``perf/mfu``: a sample's operations, and the ranks' peak rate."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.data.splits import NUM_FIRST
from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import typed
from ddp_runner.parallelism.module_names import blocks_of
from ddp_runner.parallelism.shards import has_shards
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.train.state import TrainState, restored_after
from ddp_runner.train.work import DTYPES, forward

BUDGET_S = 0.05  # for the matrix products of one device
SMALLEST, LARGEST = 256, 4096  # rows of the matrices; the largest two take 0.13 GB in fp32


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
