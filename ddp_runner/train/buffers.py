"""Buffers that training changes, such as a codebook: all ranks take rank 0's in each step.

A forward that reads them would else depend on the rank, and on when an evaluation or a resume has
given all ranks those of rank 0. The statistics of BatchNorm are left alone, since training only
writes them and an evaluation takes rank 0's; but not if the training step has BatchNorm, too, as
that of a teacher, which reads them.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ddp_runner.data.splits import NUM_FIRST
from ddp_runner.data.trees import shape_of
from ddp_runner.distributed import broadcast_tensors, gather_objects
from ddp_runner.errors import UserError
from ddp_runner.seeds import seed_all
from ddp_runner.train.state import TrainState, restored_after
from ddp_runner.train.step import modules_of
from ddp_runner.train.trial import step_of
from ddp_runner.train.work import forward


def find_changing(state: TrainState) -> None:
    """Note in the state which buffers a forward in training changes, of the model and the step.

    Two samples show it; where they cannot be computed in training mode, all are taken to change.
    Collective: every rank must call.

    Raises:
        UserError: the training step changes its own under a parameter server, or the shape of a
            buffer follows the batch.
    """
    work = state.work
    parts = {"model": state.module, **modules_of(work.step_fn)}
    own = [value for name, value in parts.items() if name != "model"]
    has_teacher = any(
        isinstance(one, _NormBase)
        for value in own
        if isinstance(value, nn.Module)
        for one in value.modules()
    )
    places = [
        (f"{root}.{path}.{name}".replace("..", "."), owner, name)
        for root, value in parts.items()
        if isinstance(value, nn.Module)
        for path, owner in value.named_modules()
        if has_teacher or not isinstance(owner, _NormBase)
        # A step may also average weights into parameters of its own.
        for name in (owner._buffers if root == "model" else {**owner._buffers, **owner._parameters})
    ]
    by_rank = gather_objects(_changed(state, places) if places else set[str]())
    changed = set[str]().union(*by_rank)
    # A server sends a model's buffers with its parameters.
    if work.layout.by_number:
        if own := sorted(name for name in changed if not name.startswith("model.")):
            raise UserError(
                f"{step_of(work.config)} changes {', '.join(own)}, and parallelism="
                f"{work.config.parallelism.get('name')} sends the model's buffers alone; register "
                "them in the model, or write parallelism=ddp"
            )
        return
    state.changing = [(owner, name) for key, owner, name in places if key in changed]


def share_changing(state: TrainState) -> None:
    """Give all ranks rank 0's buffers of ``find_changing``. Collective: every rank must call."""
    found = [getattr(owner, name) for owner, name in state.changing]
    if found and state.work.env.world_size > 1:
        broadcast_tensors([one for one in found if one is not None], group=state.work.group)


def _changed(state: TrainState, places: list[tuple[str, nn.Module, str]]) -> set[str]:
    before = [_copy(getattr(owner, name)) for _, owner, name in places]
    with restored_after(state):
        state.module.train()
        seed_all(0)
        shapes = list[list[str]]()
        for count in (NUM_FIRST, NUM_FIRST + 1):
            try:  # with gradients, since a part may ask whether there are any
                forward(state.work, state.module, state.first(range(count)))
            except torch.OutOfMemoryError:
                raise
            except Exception:  # of two samples alone; a run's own batches will tell
                if not shapes:
                    return {key for key, _, _ in places}
                break  # it may take even batches only
            shapes.append([_shape(getattr(owner, name)) for _, owner, name in places])
        for (key, _, _), *sizes in zip(places, *shapes, strict=True):
            if sizes[0] != sizes[-1]:
                raise UserError(
                    f"the buffer {key} is {sizes[0]} for {NUM_FIRST} samples and {sizes[-1]} for "
                    f"{NUM_FIRST + 1}, and ranks and checkpoints need one shape; keep what "
                    "follows the batch in a plain attribute"
                )
        return {
            key
            for (key, owner, name), value in zip(places, before, strict=True)
            if not _is_same(getattr(owner, name), value)
        }


def _shape(buffer: Tensor | None) -> str:
    return "none" if buffer is None else shape_of(buffer)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None and other is None) or (
        one is not None and other is not None and torch.equal(one, other)
    )
