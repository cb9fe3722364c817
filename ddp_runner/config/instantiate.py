"""Imports the classes and functions that a config names, and builds objects with their keys."""

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
from ddp_runner.errors import UserError, any_error, nearest, one_line


def make(
    group: str,
    settings: Mapping[str, Any],
    *positional: Any,
    kind: type | UnionType | None = None,
    allowed: Collection[str] = (),
    before_each: Callable[[], object] = object,
    **arguments: Any,
) -> Any:
    """Build the object that the ``_target_`` of a group, or of ``metrics.NAME``, names.

    `group` is the dotted key of the settings, whose interpolations are resolved. With positional
    arguments ``_partial_`` is ignored; keywords win over the settings. The object must be of a
    `kind`: a class, a protocol or a union. `allowed` are the user's own packages. `before_each` is
    called before each key's value is built, and before the object itself.

    Raises:
        UserError: the target is not allowed, cannot be imported, does not take the keys, or
            builds an object of another kind.
    """
    dropped = {*runner_keys(group), *(["_partial_"] if positional else [])}
    keys = {key: value for key, value in settings.items() if key not in dropped}
    label = f"{group}={settings.get('name')}" if group in RUNNER_KEYS else group
    shown = [f"{key}=null" if keys[key] is None else key for key in keys if key[0] != "_"]
    call = functools.partial(construct, keys | arguments, *positional, key=group, allowed=allowed)
    return _report_errors(
        functools.partial(call, before_each=before_each),
        f"{label} ({keys.get('_target_')})",
        kind=kind,
        hint=f"its keys are {', '.join(shown) or 'none'}; add another by +{group}.KEY=VALUE",
    )


def make_function(
    value: Any, *, key: str, allowed: Collection[str] = (), **offered: Callable[[], Any]
) -> Any:
    """Return the function that a config names: a dotted name, or ``_target_`` with keywords.

    A class is built with the keywords, and the object is the function. Each `offered` function
    computes one more keyword, and is called only if the target takes it.

    Raises:
        UserError: the name is not allowed or does not exist, or the keywords do not fit.
    """
    has_keys = isinstance(value, Mapping)
    settings = value if has_keys else {"_target_": value}
    name_key = f"{key}._target_" if has_keys else key
    target = find(settings.get("_target_"), key=name_key, allowed=allowed)
    names = keywords(target)
    # Hydra's users write _partial_ beside a function; here it changes nothing.
    keys = {name: item for name, item in settings.items() if name not in ("_target_", "_partial_")}
    for name in keys:
        if not names & {name, ANY}:
            raise unknown_key(str(name), key, target=settings["_target_"], known=names)
    computed = {name: compute() for name, compute in offered.items() if name in names}
    function = functools.partial(target, **construct(keys, key=key, allowed=allowed), **computed)
    if isinstance(target, type):
        hint = f"its keys are {', '.join(keys) or 'none'}; add another by +{key}.KEY=VALUE"
        function = _report_errors(function, f"{key} ({settings['_target_']})", hint=hint)
    if not callable(function):
        raise UserError(
            f"{key} ({settings['_target_']}) builds a {type(function).__name__}, which cannot be "
            "called",
            "give its class the method __call__",
        )
    return function


def keywords(factory: Callable[..., Any]) -> set[str]:
    """Return the keywords of a class or function, with ANY if it takes any keyword."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # many classes written in C have no signature
        return {ANY}
    return {ANY if item.kind is item.VAR_KEYWORD else item.name for item in parameters}


def find(name: Any, *, key: str, allowed: Collection[str] = ()) -> Callable[..., Any]:
    """Return the class or function of a dotted name, if a config may name it.

    In the `allowed` packages, the user's own, a config may name any callable.

    Raises:
        UserError: it is not allowed, does not exist, cannot be imported, or is of another kind.
    """
    validate_name(name, key=key, allowed=allowed)
    target: Callable[..., Any] = _import(name, key=key)
    module = name.rpartition(".")[0]
    if is_inside(name, allowed):
        if not callable(target):
            raise UserError(f"{key} ({name}) cannot be called", "name a class or a function")
    elif (base := TORCH.get(module)) is not None:
        if not (
            isinstance(target, type) and issubclass(target, getattr(import_module(module), base))
        ):
            raise UserError(
                f"{key} ({name}) is not a subclass of {module}.{base}",
                f"from {name.partition('.')[0]} a config may name only those",
            )
    elif name.startswith("ddp_runner."):
        is_part = inspect.isclass(target) or inspect.isfunction(target)
        if not (is_part and target.__module__ == module):
            raise UserError(f"{key} ({name}) is not a class or function that {module} defines")
    return target


def _import(name: str, *, key: str) -> Any:
    """Return the object of a dotted name; import the modules on the way."""
    owner: Any = None
    path = ""
    for part in name.split("."):
        parent, path = path, f"{path}.{part}".lstrip(".")
        if hasattr(owner, part):
            owner = getattr(owner, part)
        elif owner is None or (hasattr(owner, "__path__") and find_spec(path) is not None):
            with any_error(f"{key} ({name}) cannot be imported", "fix it, or name another"):
                owner = import_module(path)
        else:
            match = nearest(part, dir(owner))
            hint = f"did you mean {parent}.{match}?" if match else "name another"
            raise UserError(f"{key} ({name}) does not exist", hint)
    return owner


def construct(
    value: Any,
    *positional: Any,
    key: str,
    allowed: Collection[str] = (),
    before_each: Callable[[], object] = object,
) -> Any:
    """Return a value of the config; call each ``_target_`` in it with the keys beside it.

    The outermost target gets the `positional` arguments. The key ``_args_`` holds more positional
    arguments, and ``_partial_: true`` returns a functools.partial. A text such as ``torch.float32``
    becomes that dtype. For `before_each` see ``make``.

    Raises:
        Exception: any error of a target; a UserError if a name is not allowed.
    """
    if isinstance(value, list):
        return [
            construct(item, key=f"{key}.{index}", allowed=allowed)
            for index, item in enumerate(value)
        ]
    if isinstance(value, str) and re.fullmatch(r"torch\.[a-z]+\d*", value):
        torch = import_module("torch")
        dtype = getattr(torch, value.removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else value
    if not isinstance(value, Mapping):
        return value
    target = None
    if "_target_" in value:
        target = find(value["_target_"], key=f"{key}._target_", allowed=allowed)
    built = {}
    for name, item in value.items():
        if target is None or name not in ("_target_", "_partial_"):
            before_each()
            inner = functools.partial(construct, item, key=f"{key}.{name}", allowed=allowed)
            label = f"{key}.{name} ({item.get('_target_')})" if isinstance(item, Mapping) else None
            built[name] = _report_errors(inner, label, hint="change its keys") if label else inner()
    if target is None:
        return built
    before_each()
    call = functools.partial(target, *positional, *built.pop("_args_", []), **built)
    return call if value.get("_partial_") is True else call()


def _report_errors(
    call: Callable[[], Any], label: str, *, kind: type | UnionType | None = None, hint: str
) -> Any:
    """Return the result of `call`; raise a UserError if it fails or builds another kind."""
    try:
        built = call()
    except Exception as error:  # a constructor may raise anything
        if isinstance(error, UserError):
            raise
        hint = hint if isinstance(error, TypeError) else "change its keys, or name another"
        raise UserError(f"{label} cannot be built: {one_line(error)}", hint) from error
    if kind is None or isinstance(built, kind):
        return built
    is_partial = isinstance(built, functools.partial)
    fix = "leave out its _partial_" if is_partial else "name another in its _target_"
    expected = " or ".join(item.__name__ for item in get_args(kind) or (kind,))
    raise UserError(f"{label} builds an object of type {type(built).__name__}, not {expected}", fix)
