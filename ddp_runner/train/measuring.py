"""Measures what a run's steps are compared with: their operations, and what its ranks can do.

A run does so once it has trained for a while, so the short jobs of a sweep do not pay for it.
Operations are counted while the run takes one of its own steps, so it takes no other ones. Only
with train.compile they are counted at the start, for two samples.
"""

import torch
from torch import nn

from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import typed
from ddp_runner.parallelism.shards import has_shards
from ddp_runner.train.evaluation import DTYPES, forward
from ddp_runner.train.flops import FlopCounter, has_compiled
from ddp_runner.train.peaks import measure_peaks
from ddp_runner.train.state import TrainState, restored_after
from ddp_runner.train.trial import NUM_SAMPLES


def measure_once_settled(state: TrainState) -> None:
    """Measure, if it is time: have one step counted, and after it measure the ranks.

    Call it between two steps, of which the first has been logged. Collective: every rank must call.
    """
    setup = state.setup
    if not state.has_settled or state.peaks is not None or setup.profiler.is_slow:
        return
    if state.counter is None:
        state.counter = FlopCounter(unknown=_why_no_step(state))
    if not state.counter.is_over:
        return  # the next step is counted
    state.peaks = measure_peaks(
        state.counter,
        devices=setup.devices,
        dtype=DTYPES[setup.config.train.precision],
        group=setup.group,
        model_ranks=setup.role.model_ranks,
    )
    state.was_counted = False
    setup.timer.forget()  # the step that was counted, too


def count_before_compiling(state: TrainState) -> None:
    """Count the operations of two samples with the bare model, and leave the state as it was.

    While operations are counted, compiled code would run uncompiled. Collective, if the user's step
    is.
    """
    counter = FlopCounter(unknown=_why_no_rank(state))
    try:
        if not counter.is_over:
            with restored_after(state):
                state.module.train()
                samples = state.setup.batches.samples(range(NUM_SAMPLES))
                with counter.counting(num_samples=NUM_SAMPLES):
                    is_split = has_shards(state.module)
                    parameters = [one for one in state.module.parameters() if one.requires_grad]
                    step = forward(state, state.module, samples)
                    if is_split:  # its parameters are others during the forward
                        step.loss_sum.backward()
                    else:
                        torch.autograd.grad(step.loss_sum, parameters, allow_unused=True)
                state.module.zero_grad(set_to_none=True)
    except Exception as error:
        counter = FlopCounter(unknown=f"its step failed without torch.compile: {typed(error)}")
    state.counter = counter


def _why_no_rank(state: TrainState) -> str:
    """Return why no rank of this mode can count a step; empty if all can."""
    if isinstance(state.model, nn.DataParallel):
        return "the replicas of parallelism=dp are on several devices"
    if state.setup.role.serve is not None or state.setup.role.gradients is not None:
        return "a parameter server computes no gradients"
    return ""


def _why_no_step(state: TrainState) -> str:
    """Return why no step can be counted, on all ranks or on none. Collective."""
    reason = _why_no_rank(state)
    if not reason and has_compiled():
        reason = "a part of it is compiled by torch.compile"
    (num_reasons,) = sum_over_ranks([bool(reason)], group=state.setup.group)
    return reason or ("another rank has compiled a part of it" if num_reasons else "")
