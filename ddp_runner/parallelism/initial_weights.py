"""Gives a model initial weights that depend on no rank, device or way of splitting it.

A model that offers ``init_weights(module)``, which fills the parameters that a module holds itself,
need never be built whole: each module's parameters are drawn from a seed of its own.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from ddp_runner.errors import UserError, listed
from ddp_runner.parallelism.shards import copy_shard
from ddp_runner.seeds import derive


def build_by_modules(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model and ``initialise`` it; where the default device is meta, leave it empty.

    Raises:
        UserError: it offers no ``init_weights``, or has buffers, which nothing would fill.
    """
    with torch.device("meta"):
        module = build()
    if not hasattr(module, "init_weights"):
        raise UserError(
            "model.meta_init=true needs a model with the method init_weights(module), which fills "
            "a module's own parameters; write it, or model.meta_init=false"
        )
    if names := [name for name, _ in module.named_buffers()]:
        raise UserError(
            "model.meta_init=true builds a model without values, and nothing fills its buffers "
            f"({listed(names)}); compute them in its forward, or write model.meta_init=false"
        )
    if len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters())):
        raise UserError(
            "model.meta_init=true builds a model without values, and a parameter that two modules "
            "share would become two; use it in one module's forward, or write model.meta_init=false"
        )
    if torch.get_default_device().type != "meta":
        module.to_empty(device="cpu")
        initialise(module)
    return module


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Fill the parameters of a model that offers ``init_weights``, whole or in shards.

    Besides the parameters there is never more than one module's own at a time. The seed is
    torch's.

    Raises:
        UserError: ``init_weights`` leaves a parameter without values.
    """
    seed, done = torch.initial_seed(), set[nn.Parameter]()
    for name, module in model.named_modules():
        own = {key: one for key, one in module._parameters.items() if one is not None}
        if not own.keys() or done.issuperset(own.values()):
            continue  # a tied parameter belongs to the first of its modules
        whole = {
            key: nn.Parameter(torch.full(one.shape, torch.nan, dtype=one.dtype, device="cpu"))
            for key, one in own.items()
        }
        torch.default_generator.manual_seed(derive(seed, "weights", name))
        module._parameters.update(whole)
        try:
            cast(Any, model).init_weights(module)  # a method of the user's, which it offers
        finally:
            module._parameters.update(own)
        if empty := [key for key, one in whole.items() if one.isnan().any()]:
            raise UserError(
                f"init_weights of the model leaves {listed(empty)} of {name or 'the model'} "
                "without values; fill them"
            )
        for key, one in own.items():
            if one not in done:
                copy_shard(one, whole[key])
        done |= {*own.values()}
