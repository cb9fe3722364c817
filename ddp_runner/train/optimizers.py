"""Builds the optimizer: one of torch's or of the user's, for the parameters that are trained."""

import inspect
import re
from functools import partial

from torch import nn
from torch.optim import Optimizer

from ddp_runner.config.instantiate import complete, make
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.training import ParamsConfig
from ddp_runner.errors import UserError, nearest, typed
from ddp_runner.parallelism.shards import fit_optimizer
from ddp_runner.train.parameters import parameter_groups

MODULE = "module"  # the first parameter of a factory that takes the model, not its parameters
MOST_REASON = 150  # characters of torch's own message
# What torch says of sparse gradients, and of dense ones where it takes only sparse ones.
NOT_DENSE = re.compile(r"(?i)sparse|dense gradients|and dense")


def refuse_sparse(error: RuntimeError, who: str, *, instead: str) -> None:
    """Say in one line that `who` takes no sparse gradients, if that is torch's error."""
    if NOT_DENSE.search(str(error)) is not None:
        raise UserError(
            f"{who} cannot take the gradients of this model, of which some are sparse "
            f"({typed(error)[:MOST_REASON]}); leave out sparse=True in it, or write {instead}"
        ) from error


def build_optimizer(config: RunConfig, module: nn.Module) -> Optimizer:
    """Return the optimizer of a bare model, whose frozen parameters are frozen already.

    A factory whose first parameter is named ``module`` gets the model, to make groups of its own:
    ``def no_decay_for_embeddings(module, *, lr): ...``.

    Raises:
        UserError: a key does not fit the optimizer, a pattern of ``params`` matches nothing, or the
            optimizer needs a closure.
    """
    keys, params = config.optimizer, config.params
    factory = make("optimizer", keys, allowed=config.allowed_targets, partial=True)
    named = f"optimizer={keys.get('name')} ({keys['_target_']})"
    if _takes_module(factory):
        if params.groups or params.no_decay:
            raise UserError(
                f"{named} takes the model and makes its own groups; leave out params.groups and "
                "params.no_decay"
            )
        argument: object = module
    elif params == ParamsConfig():
        argument = module.parameters()
    else:
        argument = parameter_groups(module, groups=params.groups, no_decay=params.no_decay)
    optimizer: Optimizer = complete("optimizer", keys, factory, argument, kind=Optimizer)
    _validate_groups(config, optimizer, named)
    fit_optimizer(optimizer, keys, config.parallelism.get("name"))
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{named} computes the loss several times in a step, by a closure, and a run computes "
            "it once; write a loop of your own, as in docs/your_own_loop.md#lbfgs, or "
            "optimizer=adamw"
        )
    return optimizer


def _takes_module(factory: partial[Optimizer]) -> bool:
    """Return whether the factory's first parameter is named ``module``."""
    try:
        names = list(inspect.signature(factory.func).parameters)
    except ValueError:  # written in C
        return False
    return names[:1] == [MODULE]


def _validate_groups(config: RunConfig, optimizer: Optimizer, named: str) -> None:
    """Reject a key that the optimizer does not have: torch would keep it and never read it."""
    keys = {
        f"params.groups.{index}.{key}": key
        for index, group in enumerate(config.params.groups)
        for key in group
        if key != "match"
    }
    if config.params.no_decay:
        keys["params.no_decay"] = "weight_decay"
    for place, key in keys.items():
        if key not in optimizer.defaults:
            meant = nearest(key, optimizer.defaults)
            hint = f"did you mean {meant}?" if meant else "leave it out"
            raise UserError(f"{place}: {named} has no {key}; {hint}")
