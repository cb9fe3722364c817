"""Measures what a run's steps are compared with: their operations, and what its ranks can do.

A run does so once it has trained for a while, so the short jobs of a sweep do not pay for it.
Operations are counted while the run takes one of its own steps, so it takes no other ones.
"""

import torch
from torch import nn

from ddp_runner.errors import typed
from ddp_runner.parallelism.ddp import all_reduce_bytes
from ddp_runner.train.evaluation import DTYPES, forward
from ddp_runner.train.flops import FlopCounter, has_compiled
from ddp_runner.train.peaks import measure_peaks
from ddp_runner.train.state import TrainState, restored_after
from ddp_runner.train.trial import NUM_SAMPLES


def measure_once_settled(state: TrainState) -> bool:
    """Measure, if it is time: have one step counted, and after it measure the ranks.

    Call it between two steps, of which the first has been logged. Collective: every rank must call.

    Returns:
        Whether it took time that is not the steps'.
    """
    if not state.has_settled or state.peaks is not None or state.setup.profiler.is_slow:
        return False
    if state.counter is None:
        state.counter = _why_uncounted(state) or FlopCounter()
        return True
    if isinstance(state.counter, FlopCounter) and not state.counter.is_over:
        return False
    state.peaks = measure_peaks(
        state.counter,
        all_reduces=all_reduce_bytes(state.model),
        devices=state.setup.devices,
        dtype=DTYPES[state.setup.config.train.precision],
        group=state.setup.group,
    )
    return True


def count_before_compiling(state: TrainState) -> None:
    """Count the operations of two samples with the bare model, and leave the state as it was.

    While operations are counted, compiled code would run uncompiled. Collective, if the user's step
    is.
    """
    counter = FlopCounter()
    try:
        with restored_after(state):
            state.module.train()
            samples = state.setup.batches.samples(range(NUM_SAMPLES))
            with counter.counting(num_samples=NUM_SAMPLES):
                step = forward(state, state.module, samples)
                parameters = [one for one in state.module.parameters() if one.requires_grad]
                torch.autograd.grad(step.loss_sum, parameters, allow_unused=True)
    except Exception as error:
        state.counter = f"its step failed without torch.compile: {typed(error)}"
    else:
        state.counter = counter


def _why_uncounted(state: TrainState) -> str:
    """Return why no step can be counted; empty if one can."""
    if isinstance(state.model, nn.DataParallel):
        return "the replicas of parallelism=dp are on several devices"
    if state.setup.role.gradients is not None:
        return "a parameter server computes no gradients"
    return "a part of it is compiled by torch.compile" if has_compiled() else ""
