"""The command that repeats a run, and the card with it: notes, tags, machine and versions."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_runner.files import in_markdown


def repeating_command(record: Mapping[str, Any], overrides: Sequence[str]) -> list[str] | None:
    """Return the words of the command that repeats a run; None if no known command does.

    A resumed run has only the overrides of its last command, so not the keys it began with.

    Args:
        record: The fields of run.json, unchecked.
        overrides: What the run folder keeps of its last command.
    """
    groups = record.get("own_groups")
    if not isinstance(groups, list) or not all(
        isinstance(one, str) and one.startswith(("--config-dir=", "hydra.searchpath="))
        for one in groups
    ):
        return None
    if any(one.lstrip("+").startswith("resume=") for one in overrides):
        return None
    return ["python", "-m", "ddp_runner", *groups, *overrides]


def run_card(overrides: Sequence[str], record: Mapping[str, Any]) -> str:
    """Return a run's notes, command, tags, machine and versions, as Markdown.

    Where no known command repeats the run, show the keys of the last one under that name.
    """
    versions = record.get("versions") or {}
    rows = {
        "tags": ", ".join(record.get("tags") or ()),
        "host": record.get("host"),
        "ranks": record.get("world_size"),
        "machines": record.get("num_nodes"),
        "devices of rank 0": ", ".join(record.get("devices") or ()),
        "CPU threads of a rank": record.get("num_threads"),
        "git revision": record.get("git_revision"),
        **{name: version for name, version in versions.items() if version},
    }
    found = {in_markdown(name): in_markdown(str(value)) for name, value in rows.items() if value}
    lines = [f"| {name} | {value} |" for name, value in found.items()]
    words = repeating_command(record, overrides)
    title = "Keys of its last command" if words is None else "Command"
    parts = overrides if words is None else [" ".join(words[:3]), *map(shlex.quote, words[3:])]
    joint = "\n    " if words is None else " \\\n        "
    notes = [f"    {line}" for line in (record.get("notes") or "").splitlines()]  # verbatim
    own = [*notes, "", f"{title}:", ""] if notes or words is None else []
    shown = [f"    {joint.join(parts)}", ""] if parts else ["none", ""]
    return "\n".join([*own, *shown, "| fact | value |", "| --- | --- |", *lines])
