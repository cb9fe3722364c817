"""Imports what a config names, validates it, and builds a group's object with it.

The config holds plain containers; its interpolations are resolved already.
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import UnionType
from typing import Any, get_args

from ddp_runner.config.identity import is_inside
from ddp_runner.config.schema import RUNNER_KEYS, runner_keys
from ddp_runner.config.signatures import ANY, unknown_key
from ddp_runner.config.targets import TORCH, validate_name
from ddp_runner.errors import UserError, nearest, one_line, typed


def make(
    group: str,
    settings: Mapping[str, Any],
    *positional: Any,
    kind: type | UnionType | None = None,
    allowed: Collection[str] = (),
    before_each: Callable[[], object] = object,
    **arguments: Any,
) -> Any:
    """Build what the ``_target_`` of a group, or of ``metrics.NAME``, names from its keys.

    `kind` is the class or protocol that the object must have, or a union of them, and `allowed` the
    user's own packages. The `arguments` win over the keys. With `positional` arguments, such as an
    optimizer's parameters, ``_partial_`` changes nothing. `before_each` is called before each key's
    value is built, and before the object itself.

    Raises:
        UserError: the target may not be named, cannot be imported, does not take the keys, or
            builds another kind of object.
    """
    left_out = {*runner_keys(group), *(["_partial_"] if positional else [])}
    keys = {key: value for key, value in settings.items() if key not in left_out}
    named = f"{group}={settings.get('name')}" if group in RUNNER_KEYS else group
    shown = [f"{key}=null" if keys[key] is None else key for key in keys if key[0] != "_"]
    call = functools.partial(construct, keys | arguments, *positional, key=group, allowed=allowed)
    return _report_errors(
        functools.partial(call, before_each=before_each),
        f"{named} ({keys.get('_target_')})",
        kind=kind,
        hint=f"its keys are {', '.join(shown) or 'none'}; add another by +{group}.KEY=VALUE",
    )


def make_function(
    named: Any, *, key: str, allowed: Collection[str] = (), **offered: Callable[[], Any]
) -> Any:
    """Return the function of a dotted name, or of a mapping with ``_target_`` and keywords.

    A class is built with the keywords, and the object is the function. Of what is `offered` it gets
    the results of those keywords that it takes.

    Raises:
        UserError: the name is not allowed or does not exist, or the keywords do not fit.
    """
    has_keys = isinstance(named, Mapping)
    settings = named if has_keys else {"_target_": named}
    name_key = f"{key}._target_" if has_keys else key
    target = find(settings.get("_target_"), key=name_key, allowed=allowed)
    known = keywords(target)
    # Hydra's users write _partial_ beside a function; here it is one in any case.
    own = {name: one for name, one in settings.items() if name not in ("_target_", "_partial_")}
    for name in own:
        if not known & {name, ANY}:
            raise unknown_key(str(name), key, target=settings["_target_"], known=known)
    given = {name: compute() for name, compute in offered.items() if name in known}
    found = functools.partial(target, **construct(own, key=key, allowed=allowed), **given)
    if isinstance(target, type):
        hint = f"its keys are {', '.join(own) or 'none'}; add another by +{key}.KEY=VALUE"
        found = _report_errors(found, f"{key} ({settings['_target_']})", kind=None, hint=hint)
    if not callable(found):
        raise UserError(
            f"{key} ({settings['_target_']}) builds a {type(found).__name__}, which cannot be "
            "called; give its class the method __call__"
        )
    return found


def keywords(factory: Callable[..., Any]) -> set[str]:
    """Return the keywords of a class or function, with ANY if it takes any keyword."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # written in C
        return {ANY}
    return {ANY if one.kind is one.VAR_KEYWORD else one.name for one in parameters}


def find(name: Any, *, key: str, allowed: Collection[str] = ()) -> Callable[..., Any]:
    """Return the class or function of a dotted name, if a config may name it.

    In the packages of `allowed`, the user's own, it may name anything that can be called.

    Raises:
        UserError: it is not allowed, does not exist, cannot be imported, or is of another kind.
    """
    validate_name(name, key=key, allowed=allowed)
    found: Callable[..., Any] = _imported(name, key=key)
    module = name.rpartition(".")[0]
    if is_inside(name, allowed):
        if not callable(found):
            raise UserError(f"{key} ({name}) cannot be called; name a class or a function")
    elif (base := TORCH.get(module)) is not None:
        kind = getattr(import_module(module), base)
        if not (isinstance(found, type) and issubclass(found, kind)):
            raise UserError(
                f"{key} ({name}) is not a subclass of {module}.{base}; "
                f"of {name.partition('.')[0]} a config may name no others"
            )
    elif name.startswith("ddp_runner."):
        is_part = inspect.isclass(found) or inspect.isfunction(found)
        if not (is_part and found.__module__ == module):
            raise UserError(
                f"{key} ({name}) is not a class or function that {module} itself defines"
            )
    return found


def _imported(name: str, *, key: str) -> Any:
    """Return what a dotted name stands for; import its modules on the way."""
    found: Any = None
    reached = ""
    for part in name.split("."):
        owner, reached = reached, f"{reached}.{part}".lstrip(".")
        if hasattr(found, part):
            found = getattr(found, part)
        elif found is None or (hasattr(found, "__path__") and find_spec(reached) is not None):
            try:
                found = import_module(reached)
            except Exception as error:
                raise UserError(
                    f"{key} ({name}) cannot be imported ({typed(error)}); fix it, or name another"
                ) from error
        else:
            meant = nearest(part, dir(found))
            hint = f"did you mean {owner}.{meant}?" if meant else "name another"
            raise UserError(f"{key} ({name}) does not exist; {hint}")
    return found


def construct(
    value: Any,
    *positional: Any,
    key: str,
    allowed: Collection[str] = (),
    before_each: Callable[[], object] = object,
) -> Any:
    """Return a value of the config; call each ``_target_`` in it with the keys beside it.

    The outermost one gets the `positional` arguments, too. Of the keys ``_args_`` holds more of
    them, and ``_partial_: true`` asks for a functools.partial. A text such as ``torch.float32`` is
    the dtype. `before_each` is as in ``make``.

    Raises:
        UserError: a name is not allowed.
        Exception: whatever a target raises.
    """
    if isinstance(value, list):
        return [
            construct(one, key=f"{key}.{index}", allowed=allowed) for index, one in enumerate(value)
        ]
    if not isinstance(value, Mapping):
        is_of_torch = isinstance(value, str) and re.fullmatch(r"torch\.[a-z]+\d*", value)
        return _dtype(value) if is_of_torch else value
    target = None
    if "_target_" in value:
        target = find(value["_target_"], key=f"{key}._target_", allowed=allowed)
    built = {}
    for name, one in value.items():
        if target is None or name not in ("_target_", "_partial_"):
            before_each()
            inner = functools.partial(construct, one, key=f"{key}.{name}", allowed=allowed)
            named = f"{key}.{name} ({one.get('_target_')})" if isinstance(one, Mapping) else None
            built[name] = _report_errors(inner, named, hint="change its keys") if named else inner()
    if target is None:
        return built
    before_each()
    call = functools.partial(target, *positional, *built.pop("_args_", []), **built)
    return call if value.get("_partial_") is True else call()


def _dtype(name: str) -> Any:
    """Return torch's dtype of this name, as ``torch.float32``; a text that names none stays."""
    torch = import_module("torch")
    found = getattr(torch, name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else name


def _report_errors(
    call: Callable[[], Any], named: str, *, kind: type | UnionType | None = None, hint: str
) -> Any:
    """Return what `call` builds; raise a UserError if it fails or builds another kind."""
    try:
        built = call()
    except UserError:
        raise
    except Exception as error:
        hint = hint if isinstance(error, TypeError) else "change its keys, or name another"
        raise UserError(f"{named} cannot be built: {one_line(error)}; {hint}") from error
    if kind is None or isinstance(built, kind):
        return built
    is_partial = isinstance(built, functools.partial)
    fix = "leave out its _partial_" if is_partial else "name another in its _target_"
    wanted = " or ".join(one.__name__ for one in get_args(kind) or (kind,))
    raise UserError(f"{named} builds an object of type {type(built).__name__}, not {wanted}; {fix}")
