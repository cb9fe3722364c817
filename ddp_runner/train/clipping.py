"""Scales and clips gradients, whole or split over ranks, and takes the optimizer step."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.device import sum_dtype
from ddp_runner.parallelism.shards import full_tensor, is_shard, own_part
from ddp_runner.parallelism.stages import stages_of
from ddp_runner.train.state import TrainState


def scale_and_clip(state: TrainState, factor: Tensor | None) -> Tensor | None:
    """Multiply the gradients by a factor, and clip them by norm and by value, in one pass.

    Returns the norm of the whole gradient before clipping, a scalar; None without clipping.
    Collective: every rank must call.
    """
    config, norm = state.work.config.train, None
    clips = config.clip_norm is not None or config.clip_value is not None
    if factor is None and not clips:
        return None  # visiting a small model's parameters takes a tenth of its forward's time
    parameters = list(state.module.parameters())
    if clips:
        state.scaler.unscale_(state.optimizer)
        norm = gradient_norm(state)
        if factor is not None:
            norm = norm * factor.to(norm.device)
        if config.clip_norm is not None:
            clip = (config.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch does: no 0 / 0
            factor = clip if factor is None else clip * factor.to(clip.device)
    if factor is not None:
        scale_gradients(parameters, factor)
    if config.clip_value is not None:
        clip_values(parameters, config.clip_value)
    return norm


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients by a scalar."""
    by_device = defaultdict[torch.device, list[Tensor]](list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_device[parameter.device].append(own_part(parameter.grad))
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))


def clip_values(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clip each element of the gradients to [-limit, limit]."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        grad: Tensor = parameter.grad
        # Under sequence parallelism a rank has only summands of a norm layer's gradient.
        if is_shard(grad) and is_shard(parameter):
            grad = grad.redistribute(placements=parameter.placements)
        if grad.is_sparse:  # an index may occur several times, with summands
            grad = grad.coalesce()
        parameter.grad = grad
        part = own_part(grad)
        values = part.values() if part.is_sparse else part
        values.clamp_(-limit, limit)


def step_unless_overflowed(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> bool:
    """Take the step, unless a scaled gradient has overflowed; return whether it was taken."""
    if not scaler.is_enabled():
        optimizer.step()
        return True
    # GradScaler does not tell whether it called the step. Comparing its scale before and after
    # makes a GPU wait twice, and torch's hooks do not run in optimizers that wrap another. A fused
    # optimizer is always called, with found_inf as an attribute.
    took_step, step = False, optimizer.step

    @wraps(step)
    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal took_step
        took_step = not getattr(optimizer, "found_inf", 0)
        return step(*args, **kwargs)

    # torch's schedulers patch the method in the same way; mypy cannot know.
    optimizer.step = recorded_step  # type: ignore[method-assign]
    scaler.step(optimizer)
    optimizer.step = step  # type: ignore[method-assign]
    scaler.update()
    return took_step


def has_gradient(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether this rank's part of any gradient differs from zero."""
    parts = [own_part(value.grad) for value in parameters if value.grad is not None]
    return any(bool((part.coalesce().values() if part.is_sparse else part).any()) for part in parts)


def gradient_norm(state: TrainState) -> Tensor:
    """Return the L2 norm of the whole gradient, a scalar. Collective if the model is split."""
    if (stages := stages_of(state.module)) is not None:
        named = state.module.named_parameters()
        own = [p.grad for name, p in named if p.grad is not None and name not in stages.copies]
        # A stage without gradients, or of another dtype, must send as many bytes.
        norm = nn.utils.get_total_norm(own).to(stages.device, sum_dtype(stages.device))
        dist.all_reduce(squared := norm * norm, group=stages.group)
        return squared.sqrt().to(torch.get_default_dtype())
    gradients = [p.grad for p in state.module.parameters() if p.grad is not None]
    if state.work.config.batch.virtual_ranks is not None:
        return _norm_by_rows(gradients)
    # torch cannot combine tensors of different meshes, nor split and whole tensors.
    by_mesh = defaultdict[object, list[Tensor]](list)
    for gradient in gradients:
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        by_mesh[getattr(gradient, "device_mesh", None)].append(dense)
    norms = [full_tensor(nn.utils.get_total_norm(part)) for part in by_mesh.values()]
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)


def _norm_by_rows(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of the norms of all rows: equal bits however the rows are split over ranks.

    Only the first dimension may be split, over a mesh of one axis. Collective if one is.
    """
    counts = [gradient.shape[0] if gradient.ndim else 1 for gradient in gradients]
    norms = torch.zeros(sum(counts), device=own_part(gradients[0]).device)
    group = next((value.device_mesh.get_group() for value in gradients if is_shard(value)), None)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    for gradient, slot in zip(gradients, norms.split(counts), strict=True):
        part, first = own_part(gradient), 0
        if is_shard(gradient):
            first = min(-(-len(slot) // size) * rank, len(slot))
        elif rank > 0:
            continue  # every rank has the whole tensor
        # Contiguous, as shards are: another memory format adds in another order.
        rows = part.contiguous().flatten(1) if part.ndim > 1 else part.reshape(-1, 1)
        slot[first : first + len(rows)] = torch.linalg.vector_norm(rows, dim=1)
    if group is not None:
        dist.all_reduce(norms, group=group)  # exact: one rank has a row, and the others have 0
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm
