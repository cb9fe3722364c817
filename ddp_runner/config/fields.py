"""The fields of the schema: each holds the default, meaning and rule of its key. Torch-free."""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args

from ddp_runner.errors import UserError, in_yaml, nearest

# The words for the types of keys, in messages and in --help.
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
CONTAINERS = {list: "a list", dict: "a mapping"}
T = TypeVar("T")
MAX_INT64 = 2**63 - 1  # the largest integer of torch and NumPy, also for seeds


@dataclass(frozen=True)
class Rule:
    """The meaning of a key and the values that it allows."""

    doc: str = ""
    unit: str | None = None
    kind: str | None = None  # words for the type of a key that takes several types
    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str | None, ...] = ()  # for a list: the choices for each item
    validate: Callable[[Any], object] | None = None  # raises a UserError
    packages: Mapping[str, str] = field(default_factory=dict)  # choice -> the package it needs


class Key(NamedTuple):
    """One key of a config."""

    name: str  # dotted
    kind: Any  # the type in the schema
    rule: Rule
    value: Any


def key(default: T, doc: str, **rule: Any) -> T:
    """Return a field of the schema; `rule` has the other fields of ``Rule``."""
    metadata = {"rule": Rule(doc, **rule)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def walk(owner: Any, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a config or of a section, in the order of the schema.

    Groups are left out: the YAML of the chosen option defines their keys.
    """
    for item in fields(owner):
        name, value = f"{prefix}{item.name}", getattr(owner, item.name)
        if "rule" in item.metadata:
            yield Key(name, item.type, item.metadata["rule"], value)
        elif is_dataclass(value):
            yield from walk(value, f"{name}.")


def plain(owner: Any) -> dict[str, Any]:
    """Return a config or a section as nested mappings; lists and groups are not copied."""
    return {
        name: plain(value) if is_dataclass(value) else value for name, value in vars(owner).items()
    }


def plain_kind(kind: Any) -> Any:
    """Return a type without its ``| None``."""
    return get_args(kind)[0] if isinstance(kind, UnionType) else kind


def validate_kind(name: str, value: Any, kind: Any) -> None:
    """Reject a value of the wrong type; a float key also takes an int."""
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{name} ({in_yaml(value)}) must be {(KINDS | CONTAINERS)[kind]}")


def validate_value(name: str, value: Any, rule: Rule) -> None:
    """Reject a value that breaks the rule of its key, and numbers that torch cannot hold."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, float) and not math.isfinite(item):
            raise UserError(f"{name} ({value}) must be a finite number")
        if isinstance(item, int) and abs(item) > MAX_INT64:
            limit = f"{MAX_INT64} or less" if item > 0 else f"{-MAX_INT64} or greater"
            raise UserError(f"{name} ({value}) must be {limit}")
        if item is not None and rule.choices and item not in rule.choices:
            choices = [in_yaml(choice) for choice in rule.choices]
            match = nearest(str(item), choices)
            hint = f"; did you mean {match}?" if match else ""
            among = "among" if isinstance(value, list) else "one of"
            raise UserError(f"{name} ({in_yaml(item)}) must be {among} {', '.join(choices)}{hint}")
    if value is not None and (rule.above, rule.least, rule.most, rule.below) != (None,) * 4:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{name} ({in_yaml(value)}) must be a number")
        if rule.above is not None and not value > rule.above:
            raise UserError(f"{name} ({value}) must be greater than {rule.above}")
        if rule.least is not None and value < rule.least:
            raise UserError(f"{name} ({value}) must be {rule.least} or greater")
        if rule.most is not None and value > rule.most:
            raise UserError(f"{name} ({value}) must be {rule.most} or less")
        if rule.below is not None and not value < rule.below:
            raise UserError(f"{name} ({value}) must be less than {rule.below}")
    if rule.validate is not None:
        rule.validate(value)
