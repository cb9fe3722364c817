"""Whether all ranks have the same model, in training and evaluation; called by ``check``.

Collective: every rank must call each check, and gets the same finding.
"""

from dataclasses import replace

import torch

from ddp_runner.check.compare_ranks import (
    Finding,
    differences,
    plain_attributes,
    registered,
    spread,
    told,
    tolerance,
)
from ddp_runner.config.schema import Config
from ddp_runner.data.batches import MicroBatch
from ddp_runner.data.dataset import Split
from ddp_runner.distributed import gather_objects
from ddp_runner.train.loop import evaluate, forward, train_step
from ddp_runner.train.snapshot import snapshot
from ddp_runner.train.state import TrainState
from ddp_runner.train.step_metrics import global_loss

NUM_STEPS = 3  # after which the parameters are compared
EVAL_STEPS = 2  # batches of a rank that are evaluated


def equal_start(state: TrainState) -> Finding:
    """Compare parameters and buffers as the mode's wrap left them."""
    tensors = registered(state.module)
    found = differences(tensors)
    detail = f"{len(tensors)} parameters and buffers, bit for bit"
    return Finding("all ranks begin with rank 0's weights", not found, told(found) or detail)


def equal_parameters(state: TrainState) -> Finding:
    """Take a few optimizer steps and compare the parameters after each."""
    name = "parameters stay equal"
    state.model.train()
    losses: list[str] = []
    for step in range(NUM_STEPS):
        epoch, index = divmod(step, state.setup.batches.steps_per_epoch)
        batch = state.setup.batches.step(epoch, index, order=state.setup.batches.order(epoch))
        losses.append(f"{global_loss(state, train_step(state, batch)):.4f}")
        found = differences(dict(state.module.named_parameters()))
        if found:
            return Finding(name, False, f"after step {step + 1} {told(found)}")
    return Finding(name, True, f"after each of {NUM_STEPS} steps (loss {', '.join(losses)})")


def equal_buffers(state: TrainState, config: Config) -> Finding:
    """Evaluate, and compare what each rank has evaluated and would save."""
    buffers = dict(state.module.named_buffers())
    differed = differences(buffers)
    size = EVAL_STEPS * state.setup.eval_batch_size * state.setup.env.world_size
    part = Split(state.setup.dataset.eval.inputs[:size], state.setup.dataset.eval.targets[:size])
    dataset = replace(state.setup.dataset, eval=part)
    evaluate(replace(state, setup=replace(state.setup, dataset=dataset)))
    saved = snapshot(state, config)["model"]
    found = differences({**buffers, **saved})
    detail = (
        f"{len(buffers)} of them and {len(saved.keys() - buffers.keys())} parameters, bit for bit; "
        f"{len(differed)} differed while training, and rank 0's count"
    )
    return Finding("buffers are equal where evaluated and saved", not found, told(found) or detail)


@torch.no_grad()
def equal_outputs(state: TrainState) -> Finding:
    """Evaluate the same samples on all ranks, and name what makes the outputs differ."""
    name = "all ranks evaluate a sample alike"
    split, size = state.setup.dataset.eval, state.setup.eval_batch_size
    state.module.eval()
    batch = MicroBatch(split.inputs[:size], split.targets[:size])
    _, outputs = forward(state, state.module, batch)
    if not differences({"outputs": outputs}):
        return Finding(name, True, f"outputs of {len(batch.inputs)} samples, bit for bit")
    found = differences({**registered(state.module), **plain_attributes(state.module)})
    farthest, largest = spread(outputs), max(gather_objects(float(outputs.abs().max())))
    detail = f"outputs of up to {largest:.3g} differ by up to {farthest:.3g}"
    if not found and farthest <= tolerance(state, outputs.dtype) * largest:
        return Finding(name, True, detail)
    reason = told(found) or "no tensor of the model does: evaluation draws random numbers"
    return Finding(name, False, f"{detail}; {reason}")
