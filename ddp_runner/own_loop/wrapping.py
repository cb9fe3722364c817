"""For a user's own loop: builds objects from config groups, and wraps modules in the run's mode."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddp_runner.checkpoint.optimizer_state import settings_of
from ddp_runner.checkpoint.saved_objects import Saver
from ddp_runner.checkpoint.weights import load_weights, starting_weights
from ddp_runner.errors import UserError
from ddp_runner.parallelism.single import Single
from ddp_runner.rank.session import Session
from ddp_runner.train.build_model import place_model

REPLACED = "_replaced"  # the attribute of a parameter that ``wrap`` has replaced


def bare(module: Any) -> Any:
    """Return the module that a mode or torch.compile has wrapped; anything else as it is."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return bare(module.module)
    return getattr(module, "_orig_mod", module)


def fix_bucket_order(model: nn.Module) -> None:
    """Run a backward whose gradients are dropped, so that DDP rebuilds its buckets now.

    DDP rebuilds its buckets after its first backward. A gradient's place in its bucket decides in
    which order three or more ranks are added, and so how the sum is rounded. A resumed run would
    take its first step with the initial buckets, and an undisturbed one with the rebuilt ones. So
    both get them here: in the reverse order of the module's parameters. Collective.

    It calls no forward of the user's: nobody knows its arguments yet.
    """
    if not isinstance(model, DistributedDataParallel) or dist.get_world_size() < 3:
        return  # nothing is added, or the sum has only one order
    # These never rebuild their buckets, or by what the first backward used.
    if model.static_graph or model.find_unused_parameters:
        return
    parameters = [one for one in model.module.parameters() if one.requires_grad]

    def total(_: Tensor) -> Tensor:
        sums = torch.zeros((), device=parameters[-1].device)
        for parameter in parameters:  # backward visits the last one first
            sums = sums + parameter.sum().to(sums)
        return sums

    model.module.forward = total  # an attribute of this object: it hides the class's method
    try:
        with torch.enable_grad():
            model(torch.zeros(1)).backward()
    finally:
        del model.module.forward
    model.zero_grad(set_to_none=True)


def mark_replaced(before: Sequence[nn.Parameter], module: nn.Module) -> None:
    """Mark the parameters that a module had before and has no more: it holds shards instead."""
    now = {id(one) for one in module.parameters()}
    for one in before:
        if id(one) not in now:
            setattr(one, REPLACED, True)


def validate_objects(objects: Mapping[str, Any]) -> None:
    """Reject what cannot be saved and restored in place, or would train nothing.

    Raises:
        UserError: an object has no ``state_dict`` and ``load_state_dict``, and is not a dict; or an
            optimizer was made before ``wrap``.
    """
    for name, value in objects.items():
        has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        if not has_state and not isinstance(value, dict):
            raise UserError(
                f"{name}, a {type(value).__name__}, has no state_dict and load_state_dict; give "
                "run.restore an object that has, or plain values in a dict, which it updates"
            )
        if not isinstance(value, torch.optim.Optimizer):
            continue
        held = [one for group in value.param_groups for one in group["params"]]
        if any(hasattr(one, REPLACED) for one in held):
            raise UserError(
                f"{name} was made before run.wrap, which has replaced the module's parameters by "
                "shards of them, so that it would train nothing; make it after run.wrap"
            )


def build_model(session: Session, **arguments: Any) -> nn.Module:
    """Return the config's model on this rank's devices; see ``Run.model``."""
    config, devices, found = session.config, session.devices, None
    # ``wrap`` places it; a model of several stages places itself.
    mode = session.mode if len(devices) > 1 else Single("single")
    module = place_model(config, mode, {}, devices, **arguments)
    if config.model.get("weights") is not None:
        if session.env.is_rank_zero:
            found = starting_weights(config, session.run_dir.checkpoints, log=session.log)
        load_weights(module, found)
    return module


def build_saver(session: Session, objects: Mapping[str, Any]) -> Saver:
    """Return what saves and restores the objects; see ``validate_objects``."""
    validate_objects(objects)
    return Saver(
        objects,
        settings_of(objects),
        task=session.config.task,
        num_shares=session.mode.layout(session.env).num_shares,
        rank=session.env.rank,
        num_ranks=session.env.world_size,
        compares_buffers=True,
    )
