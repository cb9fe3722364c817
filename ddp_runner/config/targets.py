"""Imports what a config names, checks the object, and calls it.

The config holds plain containers; its interpolations are resolved already.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_runner.config.allowed_targets import TORCH, is_allowed, validate_name
from ddp_runner.errors import UserError, nearest

# No subclass in these modules takes a command, a file to read, or the name of a thing to import.
KINDS: Mapping[str, type] = dict(zip(TORCH, (nn.Module, Optimizer, LRScheduler), strict=True))


def find(name: Any, *, key: str, allowed: Collection[str] = ()) -> Callable[..., Any]:
    """Return the class or function of a dotted name, if a config may name it.

    Args:
        name: dotted.
        key: of the config.
        allowed: the user's own packages: in them a config may name anything that can be called.

    Raises:
        UserError: it is not allowed, does not exist, cannot be imported, or is of another kind.
    """
    validate_name(name, key=key, allowed=allowed)
    module, _, last = name.rpartition(".")
    found: Callable[..., Any]
    if is_allowed(name, allowed):
        found = _walk(name, key=key)
        if not callable(found):
            raise UserError(f"{key} ({name}) cannot be called; name a class or a function")
    else:
        found = _attribute(import_module(module), last, key=key, name=name)
        if module in KINDS and not (isinstance(found, type) and issubclass(found, KINDS[module])):
            raise UserError(
                f"{key} ({name}) is not a subclass of {module}.{KINDS[module].__name__}; "
                "of torch a config may name no others"
            )
        if name.startswith("ddp_runner.") and not _is_own(found, module):
            raise UserError(
                f"{key} ({name}) is not a class or function that {module} itself defines"
            )
    if key == "model.loss" and isinstance(found, type):
        raise UserError(
            f"model.loss ({name}) is a class; name a function that takes outputs and targets and "
            "returns the sum over the samples"
        )
    return found


def construct(
    settings: Mapping[str, Any],
    *,
    key: str,
    allowed: Collection[str] = (),
    partial: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> Any:
    """Call what ``_target_`` names with the other keys; nested targets are built first.

    Args:
        settings: ``_target_``, ``_args_`` (positional arguments), ``_partial_``, and keywords.
        key: of the config, for messages.
        allowed: see ``find``.
        partial: return a functools.partial, as ``_partial_: true`` asks for.
        arguments: keywords that are passed on as they are; they win over the settings.

    Raises:
        UserError: a name is not allowed.
        Exception: whatever a target raises.
    """
    target = find(settings["_target_"], key=f"{key}._target_", allowed=allowed)
    built = {
        name: _built(value, key=f"{key}.{name}", allowed=allowed)
        for name, value in settings.items()
        if name not in ("_target_", "_partial_")
    }
    args = built.pop("_args_", [])
    built |= arguments or {}
    if partial or settings.get("_partial_") is True:
        return functools.partial(target, *args, **built)
    return target(*args, **built)


def _built(value: Any, *, key: str, allowed: Collection[str]) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            return construct(value, key=key, allowed=allowed)
        return {
            name: _built(one, key=f"{key}.{name}", allowed=allowed) for name, one in value.items()
        }
    if isinstance(value, list):
        return [
            _built(one, key=f"{key}.{index}", allowed=allowed) for index, one in enumerate(value)
        ]
    return value


def _is_own(found: Any, module: str) -> bool:
    is_part = inspect.isclass(found) or inspect.isfunction(found)
    return is_part and found.__module__ == module


def _walk(name: str, *, key: str) -> Any:
    """Return what a name inside an allowed package stands for; import its modules on the way."""
    first, *others = name.split(".")
    found, reached = _imported(first, key=key, name=name), first
    for part in others:
        reached = f"{reached}.{part}"
        if (
            isinstance(found, ModuleType)
            and not hasattr(found, part)
            and hasattr(found, "__path__")
        ):
            found = _imported(reached, key=key, name=name)
        else:
            found = _attribute(found, part, key=key, name=name)
    return found


def _imported(module: str, *, key: str, name: str) -> Any:
    try:
        return import_module(module)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{key} ({name}) cannot be imported ({reason}); fix it, or name another"
        ) from error


def _attribute(owner: Any, name_within: str, *, key: str, name: str) -> Any:
    try:
        return getattr(owner, name_within)
    except AttributeError:
        meant = nearest(name_within, dir(owner))
        hint = f"did you mean {name.rpartition('.')[0]}.{meant}?" if meant else "name another"
        raise UserError(f"{key} ({name}) does not exist; {hint}") from None
