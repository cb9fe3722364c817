"""The plain keys of the config with type, default and meaning: what --help and docs/keys.md show.

The one source is the schema: its fields, and the comment that each has beside or above it.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import groupby
from typing import Any

from ddp_runner.config.schema import KINDS, RUNNER_KEYS, Config

FIELD = re.compile(r"    (?P<name>\w+): (?P<kind>[^=#]+) = [^#]*(?:# (?P<meaning>.*))?")
COMMENT = re.compile(r"    # (?P<text>.*)")
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
    comments = _comments(owner)
    for field in fields(owner):
        name, kind = f"{prefix}{field.name}", field.type
        if is_dataclass(kind):
            yield from all_keys(kind, f"{name}.")
        elif field.name not in RUNNER_KEYS:
            default = field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()
            text, meaning = comments[field.name]
            yield Key(name, text, json.dumps(default).replace('"', ""), meaning)


def help_text() -> str:
    """Return the keys for a terminal, each with its meaning below it."""
    lines = []
    for key in all_keys():
        lines.append(f"{key.name}={key.default}  ({key.kind})")
        lines.append(textwrap.indent(textwrap.fill(key.meaning, width=86), "    "))
    return "\n".join(lines)


def page() -> str:
    """Return docs/keys.md: a table for each group of keys."""
    lines = [HEADER]
    kinds = {field.name: field.type for field in fields(Config)}
    sections = sorted(all_keys(), key=lambda key: "." in key.name)  # the keys of no group first
    for group, keys in groupby(sections, key=lambda key: key.name.rpartition(".")[0]):
        lines += [f"## {group or 'The run'}", ""]
        if group:
            lines += [" ".join((inspect.getdoc(kinds[group]) or "").split()), ""]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for key in keys:
            meaning = key.meaning.replace("|", "\\|")
            lines.append(f"| `{key.name}` | {key.kind} | `{key.default}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _comments(owner: Any) -> dict[str, tuple[str, str]]:
    """Return the type and the comment of each field of a dataclass, by the field's name."""
    found, above = dict[str, tuple[str, str]](), list[str]()
    for line in inspect.getsource(owner).splitlines():
        if (comment := COMMENT.fullmatch(line)) is not None:
            above.append(comment["text"])
        elif (field := FIELD.fullmatch(line)) is not None:
            kind = field["kind"].replace("list[str]", "list of texts")
            kind = kind.replace("list[dict[str, Any]]", "list of mappings")
            kind = kind.replace("dict[str, Any]", "keys of your own")
            any_kind = "text or mapping" if field["name"] == "step" else "whole number or a word"
            kind = kind.replace(" | None", " or null").replace("Any", any_kind)
            for plain, words in KINDS.items():
                kind = re.sub(rf"\b{plain.__name__}\b", words.removeprefix("a "), kind)
            meaning = " ".join([*above, field["meaning"] or ""]).strip()
            found[field["name"]] = kind, meaning
            above = []
    return found


if __name__ == "__main__":
    print(page(), end="")
