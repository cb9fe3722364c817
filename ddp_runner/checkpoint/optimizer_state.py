"""Saves and loads optimizer and scheduler states by parameter name, apart from their settings."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_runner.errors import UserError, is_lost_peer, listed, typed
from ddp_runner.parallelism.shards import StoredTensor, map_leaves, shard_like

SCHEDULED = {"lr", "momentum", "betas"}  # keys of parameter groups that schedulers change


@runtime_checkable
class Scheduler(Protocol):
    """The attributes of a scheduler that a run uses."""

    optimizer: Optimizer
    step: Callable[..., Any]  # with a metric, or without arguments
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of all modules' parameters by id; a tied parameter has its first name."""
    names = dict[int, str]()
    for owner, value in objects.items():
        if isinstance(value, nn.Module):
            for name, parameter in value.named_parameters():
                names.setdefault(id(parameter), f"{owner}.{name}")
    return names


def settings_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups of optimizers and the states of schedulers, before the first step."""
    names, settings = parameter_names(objects), dict[str, Any]()
    for name, value in objects.items():
        if isinstance(value, Optimizer):
            settings[name] = by_names(value, names).get("groups")
        elif is_scheduler(value):
            settings[name] = scheduler_state(value)
    return copy.deepcopy(settings)


def by_names(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state with parameter names in place of torch's numbers.

    Parameters outside of any module keep their numbers. A state of another form is kept under
    ``own``.

    Raises:
        UserError: the optimizer's state_dict raises an error.
    """
    try:
        state = optimizer.state_dict()
    except RuntimeError as error:
        if is_lost_peer(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(
            f"the optimizer, {type(optimizer).__qualname__}, gives no state to save "
            f"({typed(error)})",
            "its state_dict must work on every rank and before the first step: write a class that "
            "gathers the state there",
        ) from error
    if not state.keys() >= {"state", "param_groups"}:
        return {**_class(type(optimizer)), "own": state}
    own_names = _names_by_number(optimizer, names)
    return {
        **_class(type(optimizer)),
        "state": {own_names.get(key, key): value for key, value in state["state"].items()},
        "groups": [
            {**group, "params": [own_names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def load_optimizer(
    optimizer: Optimizer, saved: Mapping[str, Any], settings: Any, names: Mapping[int, str]
) -> None:
    """Load a state of ``by_names`` with whole tensors; keep settings that it never changed.

    `saved` has the saved run's groups before its first step as ``settings``, and `settings` are
    those of the new optimizer. For `names` see ``parameter_names``.

    Raises:
        UserError: the state belongs to another class, or has groups that `optimizer` lacks.
    """
    _validate_class("optimizer", saved, _class(type(optimizer)))
    if "own" in saved:
        optimizer.load_state_dict(copy.deepcopy(in_memory(saved["own"])))
        return
    saved = {**saved, **{key: in_memory(saved[key]) for key in ("groups", "settings")}}
    own_names = _names_by_number(optimizer, names)
    numbers = {name: number for number, name in own_names.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    group_of = {name: i for i, group in enumerate(saved["groups"]) for name in group["params"]}
    dropped = [name for name in group_of if name not in numbers]
    # If the saved run added no groups after its first step, this run froze the parameters.
    if dropped and len(saved["groups"]) > max(len(saved["settings"]), len(settings)):
        raise UserError(
            f"it had {len(saved['groups'])} groups of parameters, with {listed(dropped)}, and now "
            f"it has {len(settings)}",
            "add the groups before restoring it",
        )
    state = {}
    for name, values in saved["state"].items():
        if name in numbers:
            number = numbers[name]
            state[number] = {key: _copied(v, parameters[number]) for key, v in values.items()}
        elif name not in group_of:  # state of the optimizer itself, such as a count
            state[name] = copy.deepcopy(in_memory(values))
    current, groups = optimizer.state_dict(), list[dict[str, Any]]()
    for group, start in zip(current["param_groups"], settings, strict=True):
        saved_in = [group_of[own_names[n]] for n in group["params"] if own_names[n] in group_of]
        # Without a saved group none of its parameters was trained.
        groups.append(_continued(group, start, saved, saved_in[0]) if saved_in else group)
    optimizer.load_state_dict({**current, "state": state, "param_groups": groups})


def _continued(
    group: dict[str, Any], start: Mapping[str, Any], saved: Mapping[str, Any], index: int
) -> dict[str, Any]:
    """Return a group with the values that training changed in the saved group `index`.

    `start` is the group before this optimizer's first step.
    """
    now, own_parameters = saved["groups"][index], {"params": group["params"]}
    if index >= len(saved["settings"]):  # the loop added it after the first step
        return {**now, **own_parameters}
    before = saved["settings"][index]
    merged: dict[str, Any] = _merged(group, before, now) | own_parameters
    if not _is_same(before.get("lr"), now.get("lr")):  # by a scheduler: keep its factor
        new_lr, old_lr = (first.get("initial_lr", first["lr"]) for first in (start, before))
        merged["lr"] = now["lr"] * (new_lr / old_lr if old_lr else 1.0)
    return merged


def is_scheduler(value: Any) -> TypeGuard[Scheduler]:
    """Return whether a value has a state and schedules an optimizer."""
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return has_state and isinstance(getattr(value, "optimizer", None), Optimizer)


def scheduler_state(scheduler: Scheduler) -> dict[str, Any]:
    """Return a scheduler's class and state."""
    return {**_class(type(scheduler)), "state": scheduler.state_dict()}


def load_scheduler(
    scheduler: Scheduler,
    saved: Mapping[str, Any],
    settings: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] | None,
) -> None:
    """Load a scheduler's state; keep settings that it never changed.

    `saved` has the saved run's state before its first step as ``settings``, and `settings` is that
    of the new scheduler. `groups` are its optimizer's before the first step: if the settings
    differ, the scheduler repeats all steps from these, so that its rates are those of a run that
    always had them. None: another scheduler changes the same rates, so it continues from the saved.

    Raises:
        UserError: the state belongs to another class.
        ValueError: this scheduler allows fewer steps than the state has taken.
    """
    before, now = saved["settings"]["state"], saved["state"]
    _validate_class("scheduler", now, settings)
    start, state = settings["state"], now["state"]
    first_step, last_step = _last_epoch(start), _last_epoch(state)
    is_by_metric = isinstance(scheduler, ReduceLROnPlateau) or last_step is None
    if groups is None or is_by_metric or _is_same(start, before):
        scheduler.load_state_dict(copy.deepcopy(_merged(start, before, state)))
        return
    for group, first in zip(scheduler.optimizer.param_groups, groups, strict=True):
        group.update({key: copy.deepcopy(first[key]) for key in SCHEDULED & first.keys()})
    with warnings.catch_warnings(action="ignore"):  # the optimizer has taken no step here
        for _ in range(last_step - first_step):
            scheduler.step()  # a ValueError of OneCycleLR past its end names its number of steps


def _last_epoch(state: Mapping[str, Any]) -> Any:
    """Return the step in a scheduler's state, or of the first in a chain; None if it has none."""
    if "last_epoch" not in state and (chain := state.get("_schedulers")):
        return _last_epoch(chain[0])
    return state.get("last_epoch")


def groups_of(
    scheduler: Scheduler, objects: Mapping[str, Any], settings: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]] | None:
    """Return the first groups of a scheduler's optimizer; None if it has other schedulers, too."""
    optimizer = scheduler.optimizer
    schedulers = [value for value in objects.values() if is_scheduler(value)]
    if sum(value.optimizer is optimizer for value in schedulers) > 1:
        return None
    return next((settings[name] for name, value in objects.items() if value is optimizer), None)


def _names_by_number(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: names.get(id(p), f"#{number}") for number, p in enumerate(parameters)}


def _class(kind: type) -> dict[str, str]:
    """Return the name and the module of a class: of torch's, which move inside it, only torch."""
    module = kind.__module__
    module = "torch" if module.startswith("torch.") else module
    return {"class": kind.__qualname__, "module": module}


def _validate_class(noun: str, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Reject the state of another class; checkpoints of earlier versions name no module."""
    module = saved.get("module", now["module"])
    if (saved["class"], module) == (now["class"], now["module"]):
        return
    names = saved["class"], now["class"]
    if names[0] == names[1]:
        names = f"{module}.{names[0]}", f"{now['module']}.{names[1]}"
    raise UserError(
        f"the {noun} was {names[0]} and is {names[1]} now",
        "keep it, or start a new run with model.weights",
    )


def in_memory(state: Any) -> Any:
    """Return a state with whole tensors in place of stored ones."""
    return map_leaves(lambda _, value: shard_like(value, None), state)


def _copied(value: Any, parameter: Tensor) -> Any:
    """Return a copy, since a file may be mapped; shard it like a parameter of the same shape."""
    if not isinstance(value, Tensor | StoredTensor):
        return copy.deepcopy(value)
    return shard_like(value, parameter if value.shape == parameter.shape else None).clone()


def _merged(new: Any, before: Any, now: Any) -> Any:
    """Return `now`, with values of `new` where `now` still equals `before`: these are settings."""
    if _is_same(before, now):
        return new
    if all(isinstance(value, Mapping) for value in (new, before, now)):
        return {**new} | {
            key: _merged(new[key], before[key], value) if key in new and key in before else value
            for key, value in now.items()
        }
    are_lists = all(isinstance(value, list | tuple) for value in (new, before, now))
    if are_lists and len(new) == len(before) == len(now):
        return type(now)(map(_merged, new, before, now))
    return now


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b)
