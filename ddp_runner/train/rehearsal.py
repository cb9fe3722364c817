"""A first backward that counts for nothing, so that a resumed run sums as an unbroken one does."""

import torch

from ddp_runner.data.batches import MicroBatch
from ddp_runner.train.loop import forward
from ddp_runner.train.state import TrainState


def rehearse(state: TrainState) -> None:
    """Let the model's wrapper see a backward that counts for nothing. Collective: every rank.

    DDP lines its gradients up anew after its first backward. Where in line a gradient stands
    decides in which order three ranks or more are added, hence how the sum is rounded: a resumed
    run must not take a step with the line that a new one begins with. Call it before the state is
    loaded: random numbers and buffers are not as they were.
    """
    if state.model is state.module or state.setup.env.world_size < 3:
        return  # nothing is wrapped, or the sum has one order only
    state.model.train()
    batches = state.setup.batches
    split = batches.split
    # As many as in a real one: a compiled model is compiled for them.
    few = torch.arange(batches.micro_size, device=split.inputs.device)
    few = few.clamp(max=len(split) - 1)
    batch = MicroBatch(split.inputs.index_select(0, few), split.targets.index_select(0, few))
    loss, _ = forward(state, state.model, batch)
    loss.backward()  # the next step drops these gradients, as it does those of any step
