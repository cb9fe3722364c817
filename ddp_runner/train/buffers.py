"""Gives all ranks rank 0's value of each buffer that training changes, such as a codebook.

Otherwise a forward that reads the buffer would depend on the rank, and on when an evaluation or a
resume last synchronised it. BatchNorm's statistics are exempt: training only writes them, and an
evaluation takes rank 0's. They count if the training step has BatchNorm too: a teacher reads them.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ddp_runner.data.splits import NUM_FIRST
from ddp_runner.data.trees import shape_of
from ddp_runner.distributed import broadcast_tensors, gather_objects
from ddp_runner.errors import UserError
from ddp_runner.seeds import seed_all
from ddp_runner.train.state import TrainState, forward, restored_after
from ddp_runner.train.step import modules_of, step_of

Owners = dict[str, tuple[nn.Module, str]]  # by full name: a buffer's module and its name there


def find_changing(state: TrainState) -> None:
    """Set ``state.changing``: the buffers of model and step that a forward in training changes.

    Two samples are computed to find out. If training mode cannot compute two samples, all buffers
    count as changing. Collective: every rank must call.

    Raises:
        UserError: the training step changes its own buffers under a parameter server, training
            changes a buffer in a pipeline, or a buffer's shape depends on the batch.
    """
    work, owners = state.work, _owners(state)
    # With stages a forward is a collective, and some ranks may have no buffers.
    changed = _changed(state, owners) if owners or work.layout.has_stages else set[str]()
    changed = set[str]().union(*gather_objects(changed))
    if work.layout.has_stages and changed:
        raise UserError(
            f"training changes the buffer {min(changed)}, and a pipeline computes some samples and "
            f"{step_of(work.config)}, more than once",
            "write parallelism=fsdp",
        )
    if not work.layout.sends_batch_numbers:
        state.changing = [owners[name] for name in owners if name in changed]
    # A server sends a model's buffers with its parameters.
    elif unsent := sorted(name for name in changed if not name.startswith("model.")):
        raise UserError(
            f"{step_of(work.config)} changes {', '.join(unsent)}, and parallelism="
            f"{work.config.parallelism.get('name')} only sends the model's buffers",
            "register them in the model, or write parallelism=ddp",
        )


def share_changing(state: TrainState) -> None:
    """Copy rank 0's changing buffers to all ranks. Collective: every rank must call."""
    buffers = [getattr(module, name) for module, name in state.changing]
    if buffers and state.work.env.world_size > 1:
        tensors = [buffer for buffer in buffers if buffer is not None]
        broadcast_tensors(tensors, group=state.work.buffer_group)


def _owners(state: TrainState) -> Owners:
    """Return the buffers that matter, and the step's parameters: it may average weights into them.

    BatchNorm's statistics matter only if the step has BatchNorm.
    """
    parts = modules_of(state.work.step_fn).items()
    step_modules = {name: part for name, part in parts if isinstance(part, nn.Module)}
    has_teacher = any(
        isinstance(module, _NormBase) for root in step_modules.values() for module in root.modules()
    )
    return {
        ".".join(filter(None, (root, path, name))): (module, name)
        for root, root_module in {"model": state.module, **step_modules}.items()
        for path, module in root_module.named_modules()
        if has_teacher or not isinstance(module, _NormBase)
        for name in module._buffers | (module._parameters if root in step_modules else {})
    }


def _changed(state: TrainState, owners: Owners) -> set[str]:
    """Return the names of the buffers that differ after forwards in training mode."""
    before = [tensor.detach().clone() for tensor in _tensors(owners)]
    shapes = list[list[str]]()
    with restored_after(state):
        state.module.train()
        seed_all(0)
        for count in (NUM_FIRST, NUM_FIRST + 1):
            try:  # with gradients, since a module may check whether they are enabled
                forward(state.work, state.module, state.first(range(count)))
            except Exception:  # a step may need even batches, or larger batches
                if not shapes:
                    return {*owners}
                break
            shapes.append([*map(shape_of, _tensors(owners))])
        for name, shape, other in zip(owners, shapes[0], shapes[-1], strict=True):
            if shape != other:
                raise UserError(
                    f"the buffer {name} is {shape} for {NUM_FIRST} samples and {other} for "
                    f"{NUM_FIRST + 1}, and ranks and checkpoints need the same shape",
                    "keep what depends on the batch in a plain attribute",
                )
        return {
            name
            for name, old, new in zip(owners, before, _tensors(owners), strict=True)
            if shape_of(old) != shape_of(new) or not torch.equal(old, new)
        }


def _tensors(owners: Owners) -> list[Tensor]:
    """Return the current buffers; an empty tensor for None."""
    buffers = (getattr(module, name) for module, name in owners.values())
    return [torch.empty(0) if buffer is None else buffer for buffer in buffers]
