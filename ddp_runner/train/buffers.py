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
from ddp_runner.train.step import modules_of, step_of
from ddp_runner.train.work import forward

Places = dict[str, tuple[nn.Module, str]]  # by its whole name: a buffer's owner, and its name there


def find_changing(state: TrainState) -> None:
    """Note in the state which buffers a forward in training changes, of the model and the step.

    Two samples show it; where they cannot be computed in training mode, all are taken to change.
    Collective: every rank must call.

    Raises:
        UserError: the training step changes its own under a parameter server, or the shape of a
            buffer follows the batch.
    """
    work, places = state.work, _places(state)
    changed = set[str]().union(*gather_objects(_changed(state, places) if places else set[str]()))
    if not work.layout.by_number:
        state.changing = [places[name] for name in places if name in changed]
    # A server sends a model's buffers with its parameters.
    elif own := sorted(name for name in changed if not name.startswith("model.")):
        raise UserError(
            f"{step_of(work.config)} changes {', '.join(own)}, and parallelism="
            f"{work.config.parallelism.get('name')} sends the model's buffers alone; register "
            "them in the model, or write parallelism=ddp"
        )


def share_changing(state: TrainState) -> None:
    """Give all ranks rank 0's buffers of ``find_changing``. Collective: every rank must call."""
    found = [getattr(owner, name) for owner, name in state.changing]
    if found and state.work.env.world_size > 1:
        broadcast_tensors([one for one in found if one is not None], group=state.work.group)


def _places(state: TrainState) -> Places:
    """Return where a change would matter. A step may also average weights into parameters."""
    parts = modules_of(state.work.step_fn).items()
    own = {name: one for name, one in parts if isinstance(one, nn.Module)}
    has_teacher = any(isinstance(part, _NormBase) for one in own.values() for part in one.modules())
    return {
        ".".join(filter(None, (root, path, name))): (owner, name)
        for root, one in {"model": state.module, **own}.items()
        for path, owner in one.named_modules()
        if has_teacher or not isinstance(owner, _NormBase)
        for name in owner._buffers | (owner._parameters if root in own else {})
    }


def _changed(state: TrainState, places: Places) -> set[str]:
    before = [one.detach().clone() for one in _tensors(places)]
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
                    return {*places}
                break  # it may take even batches only
            shapes.append([*map(shape_of, _tensors(places))])
        for name, one, other in zip(places, shapes[0], shapes[-1], strict=True):
            if one != other:
                raise UserError(
                    f"the buffer {name} is {one} for {NUM_FIRST} samples and {other} for "
                    f"{NUM_FIRST + 1}, and ranks and checkpoints need one shape; keep what "
                    "follows the batch in a plain attribute"
                )
        return {
            name
            for name, one, other in zip(places, before, _tensors(places), strict=True)
            if shape_of(one) != shape_of(other) or not torch.equal(one, other)
        }


def _tensors(places: Places) -> list[Tensor]:
    """Return what is there now; nothing has no elements."""
    found = (getattr(owner, name) for owner, name in places.values())
    return [torch.empty(0) if one is None else one for one in found]
