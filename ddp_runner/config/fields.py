"""A key of the schema: its default, its meaning and its rule stand beside the field. Torch-free."""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args

from ddp_runner.errors import UserError, in_yaml, nearest

# The words for the types of keys, in messages and in --help.
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
OF_SEVERAL = {list: "a list", dict: "a mapping"}
T = TypeVar("T")
MOST = 2**63 - 1  # the largest whole number of torch and NumPy, seeds included


@dataclass(frozen=True)
class Rule:
    """What a key means, and what its value must be."""

    doc: str = ""
    unit: str | None = None
    kind: str | None = None  # words for the type of a key that takes several
    above: float | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str | None, ...] = ()  # of a list: of each item
    check: Callable[[Any], object] | None = None  # raises a UserError
    packages: Mapping[str, str] = field(default_factory=dict)  # that a choice needs


@dataclass(frozen=True)
class Key:
    """One key of a config."""

    name: str  # dotted
    kind: Any  # the type that the schema gives it
    rule: Rule
    value: Any


def key(default: T, doc: str, **rule: Any) -> T:
    """Return a field of the schema; `rule` has the other fields of ``Rule``."""
    metadata = {"rule": Rule(doc, **rule)}
    if isinstance(default, list | dict):
        made: Any = field(default_factory=lambda: copy(default), metadata=metadata)
    else:
        made = field(default=default, metadata=metadata)
    found: T = made
    return found


def walk(owner: Any, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a config, or of a section of it, in the order of the schema.

    The groups that are chosen by name have no keys here: their YAMLs give them.
    """
    for one in fields(owner):
        name, value = f"{prefix}{one.name}", getattr(owner, one.name)
        if is_dataclass(value):
            yield from walk(value, f"{name}.")
        elif "rule" in one.metadata:
            yield Key(name, one.type, one.metadata["rule"], value)


def plain(owner: Any) -> dict[str, Any]:
    """Return a config as a tree of dictionaries to read: unlike asdict's its values are shared."""
    return {
        name: plain(value) if is_dataclass(value) else value for name, value in vars(owner).items()
    }


def plain_kind(kind: Any) -> Any:
    """Return a type without its ``| None``."""
    return get_args(kind)[0] if isinstance(kind, UnionType) else kind


def validate_kind(name: str, value: Any, kind: Any) -> None:
    """Reject a value of another kind than a plain type; a whole number is a number, too.

    Raises:
        UserError: naming the key.
    """
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{name} ({in_yaml(value)}) must be {(KINDS | OF_SEVERAL)[kind]}")


def validate_value(name: str, value: Any, rule: Rule) -> None:
    """Reject a value that breaks the rule of its key, or a number that no library takes.

    Raises:
        UserError: naming the key, the value and the rule.
    """
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, float) and not math.isfinite(item):
            raise UserError(f"{name} ({value}) must be a finite number")
        if isinstance(item, int) and abs(item) > MOST:
            limit = f"{MOST} or less" if item > 0 else f"{-MOST} or greater"
            raise UserError(f"{name} ({value}) must be {limit}")
        if item is not None and rule.choices and item not in rule.choices:
            known = [in_yaml(one) for one in rule.choices]
            meant = nearest(str(item), known)
            hint = f"; did you mean {meant}?" if meant else ""
            among = "among" if isinstance(value, list) else "one of"
            raise UserError(f"{name} ({in_yaml(item)}) must be {among} {', '.join(known)}{hint}")
    if value is not None and (rule.above, rule.least, rule.most) != (None, None, None):
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{name} ({in_yaml(value)}) must be a number")
        if rule.above is not None and not value > rule.above:
            raise UserError(f"{name} ({value}) must be greater than {rule.above}")
        if rule.least is not None and value < rule.least:
            raise UserError(f"{name} ({value}) must be {rule.least} or greater")
        if rule.most is not None and value > rule.most:
            raise UserError(f"{name} ({value}) must be {rule.most} or less")
    if rule.check is not None:
        rule.check(value)
