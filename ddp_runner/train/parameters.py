"""Which parameters are trained, and which of the optimizer's keys each one has, by their names.

Patterns are the shell's, matched against the whole dotted name: ``head.*``, ``*.bias``. A parameter
that two modules share has two names, and a pattern may match either.
"""

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ddp_runner.errors import UserError

NO_DECAY: Mapping[str, Any] = {"weight_decay": 0.0}


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
    return [group | {"params": decayed}, group | {"params": others, **NO_DECAY}]


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
