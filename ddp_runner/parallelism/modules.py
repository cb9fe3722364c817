"""The modules of a model: found by their names, and filled with weights one by one.

A model with ``init_weights(module)``, which fills the parameters of a single module without its
children, need never be built whole: each module's parameters are drawn from their own seed, so
they do not depend on ranks, devices or sharding.
"""

import difflib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn

from ddp_runner.errors import UserError, listed
from ddp_runner.parallelism.shards import copy_shard
from ddp_runner.seeds import derive


def matched(module: nn.Module, pattern: str, *, key: str) -> dict[str, nn.Module]:
    """Return the modules with matching names: ``blocks.*`` matches ``blocks.0``, not its children.

    Raises:
        UserError: no module matches; `key` is the config's key with the pattern.
    """
    parts = pattern.split(".")
    names = [name for name, _ in module.named_modules() if name]
    matches = {
        name: module.get_submodule(name)
        for name in names
        if name.count(".") == pattern.count(".") and all(map(fnmatchcase, name.split("."), parts))
    }
    if not matches:
        nearest = difflib.get_close_matches(pattern, names, cutoff=0.0)
        raise UserError(
            f"{key} ({pattern}) matches no module of the model",
            f"the nearest are {', '.join(nearest) or 'none: it has no modules'}",
        )
    return matches


def blocks_of(module: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    """Return the modules that the patterns of ``model.blocks`` match, inner modules first."""
    blocks = dict[str, nn.Module]()
    for pattern in patterns:
        blocks |= matched(module, pattern, key="model.blocks")
    return [blocks[name] for name in sorted(blocks, key=lambda name: -name.count("."))]


def build_by_modules(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model and ``initialise`` it; if the default device is meta, leave it empty.

    Raises:
        UserError: the model lacks ``init_weights``, or has buffers or tied parameters.
    """
    with torch.device("meta"):
        module = build()
    if not hasattr(module, "init_weights"):
        raise UserError(
            "model.meta_init=true needs a model with the method init_weights(module), which fills "
            "a module's parameters",
            "add it, or write model.meta_init=false",
        )
    if names := [name for name, _ in module.named_buffers()]:
        raise UserError(
            "model.meta_init=true builds a model without values, and nothing fills its buffers "
            f"({listed(names)})",
            "compute them in its forward, or write model.meta_init=false",
        )
    if len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters())):
        raise UserError(
            "model.meta_init=true builds a model without values, and a parameter that two modules "
            "share would become two",
            "use it in one module's forward, or write model.meta_init=false",
        )
    if torch.get_default_device().type != "meta":
        module.to_empty(device="cpu")
        initialise(module)
    return module


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Fill the parameters of a model that has ``init_weights``, whole or in shards.

    Only a single module's parameters are whole at a time. The seed is ``torch.initial_seed()``.

    Raises:
        UserError: ``init_weights`` leaves a parameter without values.
    """
    seed, done = torch.initial_seed(), set[nn.Parameter]()
    for name, module in model.named_modules():
        shards = {key: shard for key, shard in module._parameters.items() if shard is not None}
        if not shards.keys() or done.issuperset(shards.values()):
            continue  # a tied parameter belongs to the first of its modules
        filled = {
            key: nn.Parameter(torch.full(shard.shape, torch.nan, dtype=shard.dtype, device="cpu"))
            for key, shard in shards.items()
        }
        torch.default_generator.manual_seed(derive(seed, "weights", name))
        module._parameters.update(filled)
        cast(Any, model).init_weights(module)
        module._parameters.update(shards)
        if empty := [key for key, parameter in filled.items() if parameter.isnan().any()]:
            raise UserError(
                f"init_weights of the model leaves {listed(empty)} of {name or 'the model'} "
                "without values",
                "fill them",
            )
        for key, shard in shards.items():
            if shard not in done:
                copy_shard(shard, filled[key])
        done |= {*shards.values()}
