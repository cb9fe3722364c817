"""Wraps the modules of a user's own loop, and builds their saver."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddp_runner.checkpoint.optimizer_state import settings_of
from ddp_runner.checkpoint.saved_objects import Saver
from ddp_runner.errors import UserError
from ddp_runner.rank.session import Session

REPLACED = "_replaced"  # marks a parameter that ``wrap`` replaced


def bare(module: Any) -> Any:
    """Return the module inside a wrapper of a mode or torch.compile; anything else unchanged."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return bare(module.module)
    return getattr(module, "_orig_mod", module)


def fix_bucket_order(model: nn.Module) -> None:
    """Run a backward, so that DDP rebuilds its buckets before the first step. Collective.

    A gradient's position in its bucket decides the order in which three or more ranks are added,
    and so the rounding of the sum. DDP rebuilds its buckets after its first backward, so a resumed
    run would take its next step with other buckets than an uninterrupted run. The forward here
    replaces the user's, as its arguments are still unknown.
    """
    if not isinstance(model, DistributedDataParallel) or dist.get_world_size() < 3:
        return  # nothing is added, or the sum has only one order
    # DDP never rebuilds these buckets, or by the parameters that the first backward used.
    if model.static_graph or model.find_unused_parameters:
        return
    parameters = [value for value in model.module.parameters() if value.requires_grad]

    def total(_: Tensor) -> Tensor:
        result = torch.zeros((), device=parameters[-1].device)
        for parameter in parameters:  # backward visits the last parameter first
            result = result + parameter.sum().to(result)
        return result

    model.module.forward = total  # set on the instance, over the class's method
    try:
        with torch.enable_grad():
            model(torch.zeros(1)).backward()
    finally:
        del model.module.forward
    model.zero_grad(set_to_none=True)


def mark_replaced(before: Sequence[nn.Parameter], module: nn.Module) -> None:
    """Mark the former parameters that the module no longer has: FSDP replaced them by shards."""
    current = {id(parameter) for parameter in module.parameters()}
    for parameter in before:
        if id(parameter) not in current:
            setattr(parameter, REPLACED, True)


def validate_objects(objects: Mapping[str, Any]) -> None:
    """Reject objects without a state, and optimizers that were made before ``wrap``."""
    for name, value in objects.items():
        has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        if not has_state and not isinstance(value, dict):
            raise UserError(
                f"{name}, a {type(value).__name__}, has no state_dict and load_state_dict",
                "give run.restore an object with both, or plain values in a dict, which it updates",
            )
        groups = value.param_groups if isinstance(value, torch.optim.Optimizer) else ()
        if any(hasattr(parameter, REPLACED) for group in groups for parameter in group["params"]):
            raise UserError(
                f"{name} was made before run.wrap, which replaced the module's parameters by "
                "shards, so it would train nothing",
                "make it after run.wrap",
            )


def build_saver(session: Session, objects: Mapping[str, Any]) -> Saver:
    """Return the saver of the objects; see ``validate_objects``."""
    validate_objects(objects)
    return Saver(
        objects,
        settings_of(objects),
        task=session.config.task,
        num_shares=session.mode.layout(session.env).num_shares,
        is_sharded=session.config.checkpoint.format == "sharded",
        compares_buffers=True,
    )
