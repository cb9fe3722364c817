"""Builds the optimizer, torch's or the user's, and its parameter groups.

The config selects parameters by shell patterns that match the whole dotted name: ``head.*``,
``*.bias``. A parameter that two modules share has two names, and a pattern may match either.
"""

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddp_runner.config.instantiate import find, make
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.training import ParamsConfig
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError, nearest
from ddp_runner.parallelism.shards import fit_optimizer, step_one_by_one
from ddp_runner.parallelism.stages import stages_of, whole_parameters

MODULE = "module"  # the first parameter of a factory that takes the model, not its parameters


def build_optimizer(config: RunConfig, module: nn.Module) -> Optimizer:
    """Return the optimizer of a bare model; exclude its frozen parameters first, by ``freeze``.

    Collective if the model is a stage of a pipeline.

    If the first parameter of a factory is ``module``, it gets the model and makes its own groups:
    ``def no_decay_for_embeddings(module, *, lr): ...``.

    Raises:
        UserError: a key does not fit the optimizer, a pattern of ``params`` matches nothing, or the
            optimizer needs a closure.
    """
    keys, params = config.optimizer, config.params
    name = f"optimizer={keys.get('name')} ({keys['_target_']})"
    factory = find(keys["_target_"], key="optimizer._target_", allowed=config.allowed_targets)
    argument: nn.Module | Iterable[Any]
    if next(iter(inspect.signature(factory).parameters), None) == MODULE:
        if params.groups or params.no_decay:
            raise UserError(
                f"{name} takes the model and makes its own groups",
                "leave out params.groups and params.no_decay",
            )
        argument = module
    elif params == ParamsConfig():
        argument = module.parameters()
    else:
        argument = parameter_groups(module, groups=params.groups, no_decay=params.no_decay)
    optimizer = optimizer_of(config, argument)
    _validate_groups(config, optimizer, name)
    is_stage = stages_of(module) is not None
    counts = gather_objects(len(optimizer.param_groups)) if is_stage else [1]
    if min(counts) < max(counts):
        raise UserError(
            f"{name} makes {min(counts)} groups of parameters on a rank of a pipeline and "
            f"{max(counts)} on another, and a checkpoint has the groups of the whole model",
            "make as many groups on every rank, or write parallelism=fsdp",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{name} computes the loss several times in a step, by a closure, and a run computes "
            "it once",
            "write a loop of your own, as in docs/your_own_loop.md#lbfgs, or optimizer=adamw",
        )
    return optimizer


def optimizer_of(config: RunConfig, argument: nn.Module | Iterable[Any]) -> Optimizer:
    """Return the config's optimizer of its first argument: parameters, groups of them, a module.

    Raises:
        UserError: the keys do not fit it, or it does not support parameters split over ranks.
    """
    keys, allowed = config.optimizer, config.allowed_targets
    optimizer: Optimizer = make("optimizer", keys, argument, kind=Optimizer, allowed=allowed)
    fit_optimizer(optimizer, keys, config.parallelism["name"])
    if config.batch.virtual_ranks is not None:  # the same bytes in every mode
        step_one_by_one(optimizer)
    return optimizer


def _validate_groups(config: RunConfig, optimizer: Optimizer, name: str) -> None:
    """Reject a key that the optimizer does not have: torch would keep it and never read it."""
    keys = {
        f"params.groups.{index}.{key}": key
        for index, group in enumerate(config.params.groups)
        for key in group
        if key != "match"
    }
    if config.params.no_decay:
        keys["params.no_decay"] = "weight_decay"
    for path, key in keys.items():
        if key not in optimizer.defaults:
            similar = nearest(key, optimizer.defaults)
            hint = f"did you mean {similar}?" if similar else "leave it out"
            raise UserError(f"{path}: {name} has no {key}", hint)


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters that match a pattern from training.

    Call it before the mode wraps the module: DDP waits for the gradient of every trained parameter.
    BatchNorm's running statistics are buffers, so they also change in a frozen layer.

    Raises:
        UserError: a pattern matches no parameter.
    """
    for pattern in patterns:
        for parameter in _matches(module, pattern, key="params.freeze").values():
            parameter.requires_grad_(False)


def parameter_groups(
    module: nn.Module, *, groups: Sequence[Mapping[str, Any]], no_decay: bool
) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, without the frozen parameters.

    A parameter belongs to the first group whose pattern matches it, else to the last group, which
    has the optimizer's own keys.

    A group has a pattern as ``match``, and keys of the optimizer. `no_decay` puts biases and
    parameters of at most 1 dim into groups without weight decay, except where a group sets its own.

    Raises:
        UserError: a pattern matches no parameter, or only frozen and already grouped parameters.
    """
    whole = whole_parameters(module)
    names = {id(parameter): name for name, parameter in reversed(whole.items())}
    remaining = {id(value): value for value in whole.values() if value.requires_grad}
    result = list[dict[str, Any]]()
    for index, group in enumerate(groups):
        settings = {key: value for key, value in group.items() if key != "match"}
        matches = _matches(module, group["match"], key=f"params.groups.{index}.match")
        chosen = [remaining.pop(key) for key in matches if key in remaining]
        if not chosen:
            raise UserError(
                f"params.groups.{index}.match ({group['match']}) gets no parameter: all that it "
                "matches are frozen or in an earlier group",
                "move the group up, or leave it out",
            )
        result.append({"params": chosen, **settings})
    result.append({"params": list(remaining.values())})
    if no_decay:
        result = [part for group in result for part in _by_decay(group, names)]
    # Each rank of a pipeline has all groups: they have the same rates, and the last is logged.
    return [
        group | {"params": [value for value in group["params"] if not value.is_meta]}
        for group in result
        if group["params"]
    ]


def _by_decay(group: dict[str, Any], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Split a group into the parameters that decay and those that do not."""
    if "weight_decay" in group:
        return [group]
    decayed, exempt = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in group["params"]:
        is_bias = names[id(parameter)].rpartition(".")[2] == "bias"
        (exempt if is_bias or parameter.ndim <= 1 else decayed).append(parameter)
    return [group | {"params": decayed}, group | {"params": exempt, "weight_decay": 0.0}]


def _matches(module: nn.Module, pattern: str, *, key: str) -> dict[int, nn.Parameter]:
    """Return the parameters with a matching name, by id, in the model's order."""
    whole = whole_parameters(module)
    matches = {id(value): value for name, value in whole.items() if fnmatchcase(name, pattern)}
    if not matches:
        similar = difflib.get_close_matches(pattern, [*whole], cutoff=0.0)
        raise UserError(
            f"{key} ({pattern}) matches no parameter of the model",
            f"the nearest are {', '.join(similar)}",
        )
    return matches
