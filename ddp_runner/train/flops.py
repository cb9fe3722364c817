"""Measures what ``perf/mfu`` compares: a sample's operations, and what the ranks can do."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.data.splits import NUM_FIRST
from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import UserError, typed
from ddp_runner.parallelism.module_names import blocks_of
from ddp_runner.parallelism.shards import has_shards
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.train.state import TrainState, restored_after
from ddp_runner.train.work import DTYPES, forward

BUDGET_S = 0.05  # to measure the matrix products of one device
SMALLEST, LARGEST = 256, 4096  # rows of the matrices; the largest two take 0.13 GB in fp32


def measure_peaks(state: TrainState) -> tuple[float, float]:
    """Return a sample's operations, and those of all ranks per second; 0 if a rank cannot tell.

    Its log says why. Collective: every rank must call.
    """
    work, own, dtype = state.work, (0.0, 0.0), DTYPES[state.work.config.train.precision]
    try:
        own = flops_per_sample(state), matmul_flops_per_s(work.devices, dtype)
    except Exception as error:  # such as a lack of memory: no reason to end the run
        log_to_file(f"this run has no perf/mfu: {typed(error)}")
    num_known, num_ranks, flops, peak = sum_over_ranks([own[1] > 0, 1, *own], group=work.group)
    return (flops / num_ranks, peak) if num_known == num_ranks else (0.0, 0.0)


def flops_per_sample(state: TrainState) -> float:
    """Return the operations of a sample's forward and backward: of products, by torch's formulas.

    The trial's two samples are computed, and the state is left as it was, but for the gradients.
    Collective if the model is split.

    Raises:
        UserError: no rank computes a whole sample, or the step multiplies nothing.
    """
    from torch.utils.flop_counter import FlopCounterMode  # takes 0.1 s

    work, module = state.work, state.module
    if not work.layout.computes or isinstance(state.model, nn.DataParallel):
        raise UserError("other devices than this rank's compute its gradients")
    if work.layout.model_ranks > 1:
        raise UserError("each rank computes a part of a sample")
    formulas = {torch.ops.aten.convolution_backward: _convolution_backward}
    assert state.sample is not None
    with (
        restored_after(state),
        _computing_once(state),
        FlopCounterMode(display=False, custom_mapping=formulas) as counter,
    ):
        module.train()
        loss = forward(state.work, module, state.sample).loss_sum
        if has_shards(module):  # its parameters are others during the forward
            loss.backward()
            module.zero_grad(set_to_none=True)
        else:  # leaves the gradients alone, and DDP's hooks
            parameters = [one for one in module.parameters() if one.requires_grad]
            torch.autograd.grad(loss, parameters, allow_unused=True)
    if not (flops := counter.get_total_flops()):
        raise UserError("the step multiplies nothing")
    return float(flops / NUM_FIRST)


@contextmanager
def _computing_once(state: TrainState) -> Iterator[None]:
    """Let blocks keep their activations in the block: what is computed twice counts once."""
    config = state.work.config
    patterns = (config.model.get("blocks") or ()) if config.train.activation_checkpointing else ()
    blocks = blocks_of(state.module, patterns)
    repeating = [vars(block).pop("forward") for block in blocks]
    try:
        yield
    finally:
        for block, forward_twice in zip(blocks, repeating, strict=True):
            block.forward = forward_twice


def _convolution_backward(grad: Any, inputs: Any, weight: Any, *others: Any, **_: Any) -> int:
    """Count as many for each gradient as for the forward; torch's formula ignores groups."""
    from torch.utils.flop_counter import conv_flop_count

    return conv_flop_count(inputs, weight, grad, others[4]) * int(sum(others[7][:2]))


@torch.no_grad()
def matmul_flops_per_s(devices: Sequence[torch.device], dtype: torch.dtype) -> float:
    """Return the operations per second of large matrix products, summed over different devices.

    It is what the device reaches in practice, with this number of threads and beside the other
    ranks on the machine, not what its data sheet says.
    """
    total = 0.0
    for device in set(devices):
        size, took_s = SMALLEST // 2, 0.0
        while took_s <= BUDGET_S / 10 and size < LARGEST:  # a small product takes no time
            size *= 2
            # Not zeros: a GPU multiplies them faster.
            factor = torch.linspace(0.1, 1.0, size * size, device=device).to(dtype).view(size, size)
            product = factor @ factor  # allocates, and chooses a kernel, which may take long
            took_s = _timed(factor, product, count=1)
        count = max(1, int(BUDGET_S / took_s))
        total += 2 * size**3 * count / _timed(factor, product, count=count)
    return total


def _timed(factor: Tensor, product: Tensor, *, count: int) -> float:
    """Return the seconds of some products; on a GPU, until it has done them."""
    product[0, 0].item()
    began = time.perf_counter()
    for _ in range(count):
        torch.mm(factor, factor, out=product)
    product[0, 0].item()
    return time.perf_counter() - began
