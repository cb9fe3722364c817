"""The states of optimizers and schedulers: by parameter names, and apart from their settings."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from ddp_runner.errors import UserError, is_lost_peer, listed, one_line, typed
from ddp_runner.parallelism.shards import is_shard, like

SCHEDULED = {"lr", "momentum", "betas"}  # what schedulers change in the optimizer's groups


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of all modules' parameters by their ids; a tied one has its first name."""
    names = dict[int, str]()
    for owner, value in objects.items():
        if isinstance(value, nn.Module):
            for name, parameter in value.named_parameters():
                names.setdefault(id(parameter), f"{owner}.{name}")
    return names


def settings_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizers and schedulers hold before the first step."""
    names = parameter_names(objects)
    found = dict[str, Any]()
    for name, value in objects.items():
        if isinstance(value, Optimizer):
            found[name] = by_names(value, names).get("groups")
        elif is_scheduler(value):
            found[name] = scheduler_state(value)
    return copy.deepcopy(found)


def by_names(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state with names in place of torch's numbers.

    A parameter of no module goes by its number. A state of another form is kept under ``own``.

    Raises:
        UserError: the optimizer gives no state.
    """
    try:
        state = optimizer.state_dict()
    except RuntimeError as error:
        if is_lost_peer(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(
            f"the optimizer, {_class(optimizer)}, gives no state to save ({typed(error)}); let its "
            "state_dict work on every rank and before the first step, as in a class of your own "
            "that gathers it there first"
        ) from error
    if not state.keys() >= {"state", "param_groups"}:
        return {"class": _class(optimizer), "own": state}
    known = _names(optimizer, names)
    return {
        "class": _class(optimizer),
        "state": {known.get(key, key): value for key, value in state["state"].items()},
        "groups": [
            {**group, "params": [known[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def load_optimizer(
    optimizer: Optimizer, saved: Mapping[str, Any], settings: Any, names: Mapping[int, str]
) -> None:
    """Load a state of ``by_names``, with whole tensors. What has not changed since then stays.

    Args:
        optimizer: as it was built.
        saved: with ``settings``, the groups as they were before the first step of that run.
        settings: the groups of this optimizer before its first step.
        names: by parameter, see ``parameter_names``.

    Raises:
        UserError: it is the state of another class.
    """
    if saved["class"] != _class(optimizer):
        raise UserError(
            f"the optimizer was {saved['class']} and is {_class(optimizer)} now; keep it, or start "
            "a new run with model.weights"
        )
    if "own" in saved:
        optimizer.load_state_dict(copy.deepcopy(saved["own"]))
        return
    known = _names(optimizer, names)
    numbers = {name: number for number, name in known.items()}
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    then = {name: place for place, group in enumerate(saved["groups"]) for name in group["params"]}
    left = [name for name in then if name not in numbers]
    # More than it was built with: a loop has added them. Else this run freezes what is left out.
    if left and len(saved["groups"]) > max(len(saved["settings"]), len(optimizer.param_groups)):
        raise UserError(
            f"it had {len(saved['groups'])} groups of parameters, among them {listed(left)}, and "
            f"now it has {len(optimizer.param_groups)}; add the groups before it is restored"
        )
    state = {}
    for key, values in saved["state"].items():
        if key in numbers:
            own = parameters[numbers[key]]
            state[numbers[key]] = {name: _owned(value, own) for name, value in values.items()}
        elif key not in then:  # an optimizer's own, such as a count
            state[key] = copy.deepcopy(values)
    current, groups = optimizer.state_dict(), list[dict[str, Any]]()
    for group, start in zip(current["param_groups"], settings, strict=True):
        place = next((then[known[one]] for one in group["params"] if known[one] in then), None)
        if place is None:  # none of its parameters was trained
            groups.append(group)
            continue
        now = saved["groups"][place]
        if place >= len(saved["settings"]):  # the loop added it later
            groups.append({**now, "params": group["params"]})
            continue
        before = saved["settings"][place]
        merged = _merged(group, before, now) | {"params": group["params"]}
        if not _is_same(before.get("lr"), now.get("lr")):  # by a scheduler, whose rates are a state
            rates = [one.get("initial_lr", one["lr"]) for one in (start, before)]
            merged["lr"] = now["lr"] * (rates[0] / rates[1] if rates[1] else 1.0)
        groups.append(merged)
    optimizer.load_state_dict({**current, "state": state, "param_groups": groups})


def is_scheduler(value: Any) -> TypeGuard[Any]:
    """Return whether it schedules an optimizer, and has a state."""
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return has_state and isinstance(getattr(value, "optimizer", None), Optimizer)


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's class and state."""
    return {"class": _class(scheduler), "state": scheduler.state_dict()}


def load_scheduler(
    scheduler: Any, saved: Mapping[str, Any], settings: Any, groups: Sequence[Any] | None
) -> None:
    """Load a scheduler's state; what has not changed since it was built stays this one's.

    Args:
        scheduler: as it was built.
        saved: its state, and ``settings``, as they were before the first step of that run.
        settings: of this scheduler before its first step.
        groups: of its optimizer, likewise: with other settings the scheduler takes all steps once
            more, so that its rates are those of a run that always had them. None: another scheduler
            changes the same rates, so it goes on from those that were saved.

    Raises:
        UserError: it is the state of another class, or cannot take that many steps.
    """
    then, now = saved["settings"], saved["state"]
    if now["class"] != settings["class"]:
        raise UserError(
            f"the scheduler was {now['class']} and is {settings['class']} now; keep it, or start a "
            "new run with model.weights"
        )
    own, start, state = settings["state"], then["state"], now["state"]
    first_step, last_step = _last_epoch(own), _last_epoch(state)
    is_by_metric = isinstance(scheduler, ReduceLROnPlateau) or last_step is None
    if groups is None or is_by_metric or _is_same(own, start):
        scheduler.load_state_dict(copy.deepcopy(_merged(own, start, state)))
        return
    for group, first in zip(scheduler.optimizer.param_groups, groups, strict=True):
        group.update({key: copy.deepcopy(first[key]) for key in SCHEDULED & first.keys()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer has taken no step in this process
        try:
            for _ in range(last_step - first_step):
                scheduler.step()
        except ValueError as error:  # OneCycleLR past its end
            raise UserError(f"{one_line(error)}; give it more steps") from error


def _last_epoch(state: Mapping[str, Any]) -> Any:
    """Return the step in a scheduler's state, of a chain that of its first; None if it has none."""
    if "last_epoch" not in state and (chain := state.get("_schedulers")):
        return _last_epoch(chain[0])
    return state.get("last_epoch")


def groups_of(scheduler: Any, objects: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Return the first groups of a scheduler's optimizer; None if others schedule it, too."""
    optimizer = scheduler.optimizer
    if sum(is_scheduler(one) and one.optimizer is optimizer for one in objects.values()) > 1:
        return None
    return next((settings[name] for name, one in objects.items() if one is optimizer), None)


def set_rates(scheduler: LambdaLR) -> None:
    """Set the rates of the scheduler's step: they are a function of it."""
    groups = scheduler.optimizer.param_groups
    for group, factor in zip(groups, scheduler.lr_lambdas, strict=True):
        group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)


def _names(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return {number: names.get(id(one), f"#{number}") for number, one in enumerate(parameters)}


def _class(value: object) -> str:
    return type(value).__qualname__


def _owned(value: Any, parameter: Tensor) -> Any:
    """Return a tensor of the optimizer's own: it may come from a file that is mapped to memory.

    What has the parameter's shape is split as the parameter is.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if not is_shard(parameter) or value.shape != parameter.shape:
        return value.clone()
    return like(value, parameter).clone()


def _merged(own: Any, before: Any, now: Any) -> Any:
    """Return `now`, with `own` in place of what is as it was `before`: a setting."""
    if _is_same(before, now):
        return own
    if all(isinstance(one, Mapping) for one in (own, before, now)):
        return {**own} | {
            key: _merged(own[key], before[key], value) if key in own and key in before else value
            for key, value in now.items()
        }
    are_lists = all(isinstance(one, list | tuple) for one in (own, before, now))
    if are_lists and len(own) == len(before) == len(now):
        return type(now)(map(_merged, own, before, now))
    return now


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)
