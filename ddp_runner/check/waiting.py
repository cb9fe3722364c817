"""Checks that ranks wait for the mean of the gradients."""

import time
from dataclasses import replace
from typing import Any

from torch import nn

from ddp_runner.check.rank_differences import Verdict
from ddp_runner.data.batches import StepBatch
from ddp_runner.device import synchronize
from ddp_runner.distributed import gather_objects
from ddp_runner.train.state import TrainState
from ddp_runner.train.step import StepOutput

DELAY_S = 0.3  # by which the last rank delays its backward


def wait_for_mean(state: TrainState, batch: StepBatch) -> Verdict:
    """Delay the last rank, and time when the others have the mean. Collective: every rank."""
    name, work = "no rank reads a gradient before all have computed theirs", state.work
    env, layout = work.env, work.layout
    if layout.num_shares == 1:
        return Verdict(name, True, "not measured: the ranks compute one share, so there is no mean")
    if layout.has_stages:
        return Verdict(name, True, "not measured: only last stages compute a loss")
    if env.num_nodes > 1:
        return Verdict(name, True, f"not measured: {env.num_nodes} machines have no common clock")
    late, began = env.world_size - 1, 0

    def late_step(model: nn.Module, data: Any) -> StepOutput:
        nonlocal began
        step = work.step_fn(model, data)
        synchronize(work.devices)
        gather_objects(None)  # every rank is about to begin its backward
        if env.rank == late:
            time.sleep(DELAY_S)
        began = time.monotonic_ns()  # all processes on a machine share this clock
        return step

    state.work = replace(work, step_fn=late_step)
    if layout.shares_per_rank == 1:
        # Only the last micro-batch reduces. No other collective may follow: it would wait.
        batch = replace(batch, micro_batches=batch.micro_batches[-1:])
    state.module.zero_grad(set_to_none=True)
    state.engine.backward(state, batch)
    synchronize(work.devices)
    state.work, times = work, gather_objects((began, time.monotonic_ns()))
    # The ranks that take a mean with the late rank; other ranks hold other parts of layers.
    peers = range(late % layout.model_ranks, late, layout.model_ranks)
    lead_ms = (times[late][0] - max(times[rank][0] for rank in peers)) / 1e6
    readable, earliest = min((times[rank][1], rank) for rank in peers)
    wait_ms = (readable - times[late][0]) / 1e6
    when = f"{abs(wait_ms):.1f} ms {'after' if wait_ms >= 0 else 'before'}"
    detail = (
        f"rank {late} began its backward {lead_ms:.0f} ms after the others; the first of them, "
        f"rank {earliest}, could read its gradients {when} that"
    )
    return Verdict(name, wait_ms >= 0, detail)
