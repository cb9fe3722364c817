"""Scales and clips gradients, also those of which a rank holds only a part, and takes the step."""

from collections import defaultdict
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.parallelism.shards import laid_out_as, own_part, whole
from ddp_runner.train.state import TrainState

SMALLEST_NORM = 1e-6  # torch's; a norm of 0 would divide by 0


def scale_and_clip(state: TrainState, factor: Tensor | None) -> Tensor | None:
    """Multiply the gradients by a factor, and clip them as the config asks, in one pass.

    Returns the norm of the whole gradient before clipping, a scalar; None without clipping.
    Collective: every rank must call.
    """
    config, norm = state.work.config.train, None
    if factor is None and config.clip_norm is None and config.clip_value is None:
        return None  # walking over the parameters of a small model is a tenth of its forward
    parameters = list(state.module.parameters())
    if config.clip_norm is not None or config.clip_value is not None:
        state.scaler.unscale_(state.optimizer)
        norm = gradient_norm(parameters)
        if factor is not None:
            norm = norm * factor.to(norm.device)
        if config.clip_norm is not None:
            clip = (config.clip_norm / (norm + SMALLEST_NORM)).clamp(max=1.0)
            factor = clip if factor is None else clip * factor.to(clip.device)
    if factor is not None:
        scale_gradients(parameters, factor)
    if config.clip_value is not None:
        for one in parameters:
            if one.grad is not None:
                # Of the norms of sequence parallelism a rank has summands.
                one.grad = laid_out_as(one.grad, one)
                if one.grad.is_sparse:  # it may have an index several times, with summands
                    one.grad = one.grad.coalesce()
                part = own_part(one.grad)
                values = part.values() if part.is_sparse else part
                values.clamp_(-config.clip_value, config.clip_value)
    return norm


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients by a scalar."""
    by_device = defaultdict[torch.device, list[Tensor]](list)
    for one in parameters:
        if one.grad is not None:
            by_device[one.device].append(own_part(one.grad))
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))


def step_unless_overflowed(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> bool:
    """Take the step, unless a scaled gradient has overflowed; return whether it was taken."""
    if not scaler.is_enabled():
        optimizer.step()
        return True
    # Torch does not say whether it has called the step. To compare its scale, before and after,
    # makes a GPU wait twice more, and torch's hooks do not run in optimizers that wrap another. A
    # fused optimizer is called in any case, with what was found.
    took_step, step = False, optimizer.step

    @wraps(step)
    def noted(*arguments: Any, **named: Any) -> Any:
        nonlocal took_step
        took_step = not getattr(optimizer, "found_inf", 0)
        return step(*arguments, **named)

    # As torch's own schedulers do; mypy allows no other value for a method.
    optimizer.step = noted  # type: ignore[method-assign]
    scaler.step(optimizer)
    optimizer.step = step  # type: ignore[method-assign]
    scaler.update()
    return took_step


def has_gradient(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether this rank's part of any gradient differs from zero."""
    parts = [own_part(one.grad) for one in parameters if one.grad is not None]
    return any(bool((one.coalesce().values() if one.is_sparse else one).any()) for one in parts)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the L2 norm of the whole gradient, a scalar. Collective if gradients are split."""
    # An operator takes tensors that are split over the same ranks, or tensors that are whole.
    by_mesh = defaultdict[object, list[Tensor]](list)
    for one in parameters:
        if (grad := one.grad) is not None:
            dense = grad.coalesce().values() if grad.is_sparse else grad
            by_mesh[getattr(grad, "device_mesh", None)].append(dense)
    norms = [whole(nn.utils.get_total_norm(gradients)) for gradients in by_mesh.values()]
    return norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
