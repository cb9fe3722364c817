"""Builds the object that a group of the config names; what fails is reported in one sentence."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ddp_runner.config.schema import RUNNER_KEYS
from ddp_runner.config.targets import construct
from ddp_runner.errors import UserError, nearest

ANY = "**"  # in a set of keywords: the function takes any


def make(
    group: str,
    settings: Mapping[str, Any],
    *,
    kind: type | None = None,
    allowed: Collection[str] = (),
    partial: bool = False,
    **arguments: Any,
) -> Any:
    """Build what a group's ``_target_`` names from the group's keys.

    Args:
        group: of the config.
        settings: its keys.
        kind: the class or protocol that the object must have; None: any.
        allowed: the user's own packages: ``allowed_targets``.
        partial: return a functools.partial, to be called with more arguments later.
        arguments: passed on as they are.

    Raises:
        UserError: the target may not be named, cannot be imported, does not take the keys, or
            builds another kind of object.
    """
    keys = {key: value for key, value in settings.items() if key not in RUNNER_KEYS[group]}
    named = f"{group}={settings.get('name')}"
    if "_target_" not in keys:
        raise UserError(f"{named} has no _target_; name the class or function that builds it")
    hint = f"its keys are {', '.join(key for key in keys if not key.startswith('_'))}"
    with _building(named, keys["_target_"], hint):
        built = construct(keys, key=group, allowed=allowed, partial=partial, arguments=arguments)
    return built if partial or kind is None else _of_kind(built, kind, group, settings)


def complete(
    group: str,
    settings: Mapping[str, Any],
    factory: Callable[..., Any],
    *arguments: Any,
    kind: type,
    **offered: Any,
) -> Any:
    """Call what ``make`` returned with `partial`.

    Args:
        group: of the config, for messages.
        settings: the group's keys.
        factory: what ``make`` returned.
        arguments: positional arguments.
        kind: the class or protocol that the object must have.
        offered: keyword arguments, such as the steps of the whole run; only those that the factory
            takes are passed.

    Raises:
        UserError: the factory does not take a key of the group, rejects a value, or builds another
            kind of object.
    """
    target = settings.get("_target_")
    known = keywords(factory)
    for key in [one for one in settings if one != "name" and one[0] != "_"]:
        if key not in known and ANY not in known:
            named = sorted(known - offered.keys())
            meant = nearest(key, named)
            hint = f"did you mean {group}.{meant}?" if meant else f"it has {', '.join(named)}"
            raise UserError(f"{group}.{key} is not a keyword of {target}; {hint}")
    taken = {key: value for key, value in offered.items() if key in known or ANY in known}
    hint = f"a keyword that it needs is added by +{group}.KEY=VALUE"
    with _building(f"{group}={settings.get('name')}", target, hint):
        built = factory(*arguments, **taken)
    return _of_kind(built, kind, group, settings)


@contextmanager
def _building(named: str, target: object, hint: str) -> Iterator[None]:
    """Turn whatever a target raises into one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{named} ({target}) cannot be built: {reason}; {hint}") from error


def _of_kind(built: Any, kind: type, group: str, settings: Mapping[str, Any]) -> Any:
    if isinstance(built, kind):
        return built
    is_partial = isinstance(built, functools.partial)
    fix = "leave out its _partial_" if is_partial else "name another in its _target_"
    raise UserError(
        f"{group}={settings.get('name')} ({settings['_target_']}) builds an object of type "
        f"{type(built).__name__}, not {kind.__name__}; {fix}"
    )


def keywords(factory: Callable[..., Any]) -> set[str]:
    """Return the keywords of a class or function, with ANY if it takes any keyword."""
    try:
        parameters = list(inspect.signature(getattr(factory, "func", factory)).parameters.values())
    except ValueError:  # written in C
        return {ANY}
    names = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return names | ({ANY} if takes_any else set())
