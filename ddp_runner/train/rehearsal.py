"""An extra first backward, so that a resumed run adds gradients in an unbroken run's order."""

import torch

from ddp_runner.data.batches import MicroBatch
from ddp_runner.data.dataset import Split
from ddp_runner.train.loop import forward
from ddp_runner.train.state import TrainState


def rehearse(state: TrainState) -> None:
    """Run a backward whose gradients are dropped. Collective: every rank must call.

    DDP rebuilds its buckets after its first backward. A gradient's place in its bucket decides in
    which order three or more ranks are added, and so how the sum is rounded. A resumed run must
    therefore not take its first step with the initial buckets. Call this before loading the state,
    since it changes random numbers and buffers.
    """
    if state.model is state.module or state.setup.env.world_size < 3:
        return  # the mode wraps nothing, or the sum has only one order
    state.model.train()
    # The real batch size, since torch.compile compiles for it.
    batch = first_samples(state.setup.batches.split, state.setup.batches.micro_size)
    loss, _ = forward(state, state.model, batch)
    loss.backward()  # the next step sets these gradients to None


def first_samples(split: Split, count: int) -> MicroBatch:
    """Return the first samples of a split, the last one repeated if there are too few."""
    indices = torch.arange(count, device=split.inputs.device).clamp(max=len(split) - 1)
    return MicroBatch(split.inputs.index_select(0, indices), split.targets.index_select(0, indices))
