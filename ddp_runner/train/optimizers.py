"""Builds the optimizer: one of torch's or of the user's, for the parameters that are trained.

Which these are, and the keys that each has, a config says by patterns of their names. They are the
shell's, matched against the whole dotted name: ``head.*``, ``*.bias``. A parameter that two modules
share has two names, and a pattern may match either.
"""

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_runner.config.instantiate import find, make
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.training import ParamsConfig
from ddp_runner.errors import UserError, nearest, typed
from ddp_runner.parallelism.shards import fit_optimizer

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
    named = f"optimizer={keys.get('name')} ({keys['_target_']})"
    factory = find(keys["_target_"], key="optimizer._target_", allowed=config.allowed_targets)
    try:
        names = list(inspect.signature(factory).parameters)
    except ValueError:  # written in C
        names = []
    if names[:1] == [MODULE]:
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
    optimizer = optimizer_of(config, argument)
    _validate_groups(config, optimizer, named)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{named} computes the loss several times in a step, by a closure, and a run computes "
            "it once; write a loop of your own, as in docs/your_own_loop.md#lbfgs, or "
            "optimizer=adamw"
        )
    return optimizer


def optimizer_of(config: RunConfig, argument: object) -> Optimizer:
    """Return the config's optimizer of what it takes first: parameters, groups of them, a module.

    Raises:
        UserError: the keys do not fit it, or it does not fit parameters that are split over ranks.
    """
    keys, allowed = config.optimizer, config.allowed_targets
    optimizer: Optimizer = make("optimizer", keys, argument, kind=Optimizer, allowed=allowed)
    fit_optimizer(optimizer, keys, config.parallelism.get("name"))
    return optimizer


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


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters that match a pattern from training.

    Call it before the mode wraps the module: DDP waits for the gradient of every other parameter.
    BatchNorm's running statistics are buffers, and change in a frozen layer as well.

    Raises:
        UserError: a pattern matches no parameter.
    """
    for pattern in patterns:
        for parameter in _matched(module, pattern, key="params.freeze").values():
            parameter.requires_grad_(False)


def parameter_groups(
    module: nn.Module, *, groups: Sequence[Mapping[str, Any]], no_decay: bool
) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, without the frozen parameters.

    A parameter belongs to the first group whose pattern matches it, else to the last one, which has
    the optimizer's own keys.

    Args:
        module: the bare model.
        groups: each has a pattern as ``match``, and keys of the optimizer.
        no_decay: put biases and parameters of one dim apart, without weight decay, unless their
            group gives a weight_decay itself.

    Raises:
        UserError: a pattern matches no parameter, or none that is left to train.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    left = {id(one): one for one in module.parameters() if one.requires_grad}
    found = list[dict[str, Any]]()
    for index, group in enumerate(groups):
        settings = {key: value for key, value in group.items() if key != "match"}
        matched = _matched(module, group["match"], key=f"params.groups.{index}.match")
        chosen = [left.pop(one) for one in matched if one in left]
        if not chosen:
            raise UserError(
                f"params.groups.{index}.match ({group['match']}) gets no parameter: all that it "
                "matches are frozen or in an earlier group; move the group up, or leave it out"
            )
        found += [{"params": chosen, **settings}]
    found += [{"params": list(left.values())}]
    if no_decay:
        found = [part for group in found for part in _by_decay(group, names)]
    return [group for group in found if group["params"]]


def _by_decay(group: dict[str, Any], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Split a group into the parameters that decay and those that do not."""
    if "weight_decay" in group:
        return [group]
    decayed, others = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in group["params"]:
        is_bias = names[id(parameter)].rpartition(".")[2] == "bias"
        (others if is_bias or parameter.ndim <= 1 else decayed).append(parameter)
    return [group | {"params": decayed}, group | {"params": others, "weight_decay": 0.0}]


def _matched(module: nn.Module, pattern: str, *, key: str) -> dict[int, nn.Parameter]:
    """Return the parameters with a name that matches, by their identity, in the model's order."""
    named = list(module.named_parameters(remove_duplicate=False))
    matched = {id(one): one for name, one in named if fnmatchcase(name, pattern)}
    if not matched:
        nearest = difflib.get_close_matches(pattern, [name for name, _ in named], cutoff=0.0)
        raise UserError(
            f"{key} ({pattern}) matches no parameter of the model; the nearest are "
            f"{', '.join(nearest)}"
        )
    return matched
