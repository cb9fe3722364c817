"""The plain keys of the config with type, default and meaning: what --help and docs/keys.md show.

The one source is the schema: its fields, and the comment that each has beside or above it.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from ddp_runner.config.schema import Config

FIELD = re.compile(r"    (?P<name>\w+): [^#]*(?:# (?P<meaning>.*))?")
COMMENT = re.compile(r"    # (?P<text>.*)")
WORDS = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}
HEADER = """# Every key

Write a key on the command line, as in `train.epochs=3`, or in a YAML of your own. `--help` prints
this list, and the options of each group. The keys of an option, such as `optimizer.lr`, are in its
YAML below [conf/](../conf); `--cfg job` shows them all.

This page is made by `python -m ddp_runner.config.keys > docs/keys.md`.
"""


@dataclass(frozen=True)
class Key:
    """One key of the config."""

    name: str  # dotted
    kind: str
    default: str
    meaning: str


def all_keys(owner: Any = Config, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of the schema in its order, without the groups that are chosen by name."""
    meanings = _meanings(owner)
    for field in fields(owner):
        kind: Any = field.type
        if is_dataclass(kind):
            yield from all_keys(kind, f"{prefix}{field.name}.")
        elif kind != dict[str, Any]:
            name = f"{prefix}{field.name}"
            yield Key(name, _kind(kind), _default(field), meanings[field.name])


def help_text() -> str:
    """Return the keys for a terminal, each with its meaning below it."""
    lines = []
    for key in all_keys():
        lines.append(f"{key.name}={key.default}  ({key.kind})")
        lines += textwrap.wrap(
            key.meaning, width=90, initial_indent="    ", subsequent_indent="    "
        )
    return "\n".join(lines)


def page() -> str:
    """Return docs/keys.md: a table for each group of keys."""
    lines = [HEADER]
    group = None
    for key in all_keys():
        first, dot, _ = key.name.partition(".")
        if (first if dot else "") != group:
            group = first if dot else ""
            about = inspect.getdoc(_owner(group)) or ""
            title = f"## {group}" if group else "## The run"
            lines += ["", title, "", " ".join(about.split()) if group else ""]
            lines += ["", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        cells = (f"`{key.name}`", key.kind, f"`{key.default}`", key.meaning.replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _owner(group: str) -> Any:
    return next((field.type for field in fields(Config) if field.name == group), Config)


def _meanings(owner: Any) -> dict[str, str]:
    """Return the comment of each field of a dataclass, by the field's name."""
    found, above = dict[str, str](), list[str]()
    for line in inspect.getsource(owner).splitlines():
        if (comment := COMMENT.fullmatch(line)) is not None:
            above.append(comment["text"])
        elif (field := FIELD.fullmatch(line)) is not None:
            found[field["name"]] = " ".join([*above, field["meaning"] or ""]).strip()
            above = []
    return found


def _kind(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    if kind is Any:
        return "whole number or auto"
    text = text.replace("list[str]", "list of texts").replace(" | None", " or null")
    return re.sub(r"\b(int|float|bool|str)\b", lambda word: WORDS[word[0]], text)


def _default(field: Field[Any]) -> str:
    factory = field.default_factory
    value: Any = factory() if factory is not MISSING else field.default
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


if __name__ == "__main__":
    print(page(), end="")
