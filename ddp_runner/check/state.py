"""Checks that all ranks have the same model, in training and in evaluation.

Collective: every rank must call each check, and gets the same finding.
"""

from dataclasses import replace

import torch

from ddp_runner.check.compare_ranks import (
    Finding,
    differences,
    format_differences,
    largest_difference,
    registered_tensors,
    tolerance,
    unregistered_values,
)
from ddp_runner.config.schema import Config
from ddp_runner.data.batches import MicroBatch
from ddp_runner.data.dataset import Split
from ddp_runner.distributed import gather_objects
from ddp_runner.train.loop import evaluate, forward, train_step
from ddp_runner.train.metrics import global_loss
from ddp_runner.train.snapshot import snapshot
from ddp_runner.train.state import TrainState

NUM_STEPS = 3  # optimizer steps; the parameters are compared after each
EVAL_STEPS = 2  # batches that a rank evaluates


def equal_start(state: TrainState) -> Finding:
    """Check that the parameters and buffers are equal after the mode has wrapped the model."""
    tensors = registered_tensors(state.module)
    differing = differences(tensors)
    detail = f"{len(tensors)} parameters and buffers, bit for bit"
    name, text = "all ranks begin with rank 0's weights", format_differences(differing)
    return Finding(name, not differing, text or detail)


def equal_parameters(state: TrainState) -> Finding:
    """Check that the parameters are equal after each of a few optimizer steps."""
    name = "parameters stay equal"
    state.model.train()
    losses: list[str] = []
    for step in range(NUM_STEPS):
        epoch, index = divmod(step, state.setup.batches.steps_per_epoch)
        batch = state.setup.batches.step(epoch, index, order=state.setup.batches.order(epoch))
        losses.append(f"{global_loss(state, train_step(state, batch)):.4f}")
        differing = differences(dict(state.module.named_parameters()))
        if differing:
            return Finding(name, False, f"after step {step + 1} {format_differences(differing)}")
    return Finding(name, True, f"after each of {NUM_STEPS} steps (loss {', '.join(losses)})")


def equal_buffers(state: TrainState, config: Config) -> Finding:
    """Check that all ranks evaluate and save the same buffers, after some training steps."""
    buffers = dict(state.module.named_buffers())
    differed = differences(buffers)
    size = EVAL_STEPS * state.setup.eval_batch_size * state.setup.env.world_size
    part = Split(state.setup.dataset.eval.inputs[:size], state.setup.dataset.eval.targets[:size])
    dataset = replace(state.setup.dataset, eval=part)
    evaluate(replace(state, setup=replace(state.setup, dataset=dataset)))
    saved = snapshot(state, config)["model"]
    differing = differences({**buffers, **saved})
    detail = (
        f"{len(buffers)} of them and {len(saved.keys() - buffers.keys())} parameters, bit for bit; "
        f"{len(differed)} differed while training, and rank 0's are used"
    )
    text = format_differences(differing) or detail
    return Finding("buffers are equal where evaluated and saved", not differing, text)


@torch.no_grad()
def equal_outputs(state: TrainState) -> Finding:
    """Check that all ranks compute the same outputs for the same samples."""
    name = "all ranks evaluate a sample alike"
    split, size = state.setup.dataset.eval, state.setup.eval_batch_size
    state.module.eval()
    batch = MicroBatch(split.inputs[:size], split.targets[:size])
    _, outputs = forward(state, state.module, batch)
    if not differences({"outputs": outputs}):
        return Finding(name, True, f"outputs of {len(batch.inputs)} samples, bit for bit")
    tensors = {**registered_tensors(state.module), **unregistered_values(state.module)}
    differing = differences(tensors)
    farthest, largest = largest_difference(outputs), max(gather_objects(float(outputs.abs().max())))
    detail = f"outputs of up to {largest:.3g} differ by up to {farthest:.3g}"
    if not differing and farthest <= tolerance(state, outputs.dtype) * largest:
        return Finding(name, True, detail)
    reason = format_differences(differing) or (
        "no tensor of the model differs: evaluation draws random numbers"
    )
    return Finding(name, False, f"{detail}; {reason}")
