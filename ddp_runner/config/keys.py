"""The keys of the schema with type, default and meaning, for --help and docs/keys.md."""

import inspect
import json
import textwrap
from dataclasses import fields
from itertools import groupby
from typing import Any

from ddp_runner.config.fields import KINDS, Key, plain_kind, walk
from ddp_runner.config.schema import Config

KIND_WORDS = {
    **{kind: words.removeprefix("a ") for kind, words in KINDS.items()},
    list[str]: "list of texts",
    list[dict[str, Any]]: "list of mappings",
    dict[str, Any]: "keys of your own",
}
HEADER = """# Every key

Write a key on the command line, as in `train.epochs=3`, or in a YAML of your own. `--help` prints
this list, and the options of each group. The keys of an option, such as `optimizer.lr`, are in its
YAML below [conf/](../conf); `--cfg job` shows them all. `hydra.run.dir` is the folder of a run. The
`hydra.` keys of sweeps, Slurm and searches are in [sweeps.md](sweeps.md).

To update this page, run `python -m ddp_runner.config.keys > docs/keys.md`.
"""


def help_text() -> str:
    """Return the keys for a terminal, each with its meaning below it."""
    lines = []
    for key in walk(Config()):
        lines.append(f"{key.name}={shown_default(key.value)}  ({_kind_words(key)})")
        lines.append(textwrap.indent(textwrap.fill(key.rule.doc, width=76), "    "))
    return "\n".join(lines)


def page() -> str:
    """Return docs/keys.md: a table for each group of keys."""
    lines = [HEADER]
    sections = {field.name: field.type for field in fields(Config)}
    top_level_first = sorted(walk(Config()), key=lambda key: "." in key.name)
    for group, keys in groupby(top_level_first, key=lambda key: key.name.rpartition(".")[0]):
        lines += [f"## {group or 'The run'}", ""]
        if group:
            lines += [" ".join((inspect.getdoc(sections[group]) or "").split()), ""]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for key in keys:
            default, meaning = shown_default(key.value), key.rule.doc.replace("|", "\\|")
            lines.append(f"| `{key.name}` | {_kind_words(key)} | `{default}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def shown_default(default: Any) -> str:
    """Return a key's default as written on a command line."""
    return json.dumps(default).replace('"', "")


def _kind_words(key: Key) -> str:
    """Return the words for a key's type, with its unit, its range, or its choices."""
    plain, rule = plain_kind(key.kind), key.rule
    choices = f": {' or '.join(filter(None, rule.choices))}" if rule.choices else ""
    words = [(rule.kind or KIND_WORDS[plain]) + (f" of {rule.unit}" if rule.unit else "") + choices]
    words += [f"greater than {rule.above}"] if rule.above is not None else []
    words += [f"{rule.least} or greater"] if rule.least is not None else []
    words += [f"{rule.most} or less"] if rule.most is not None else []
    words += [f"less than {rule.below}"] if rule.below is not None else []
    words += ["or null"] if plain is not key.kind else []
    return ", ".join(words)


if __name__ == "__main__":
    print(page(), end="")
