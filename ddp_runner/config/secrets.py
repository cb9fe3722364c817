"""Values that a config reads from the environment (``oc.env``) are never written. Torch-free.

Code that writes a config to a file writes ``Secrets.written``. A run folder may come from anybody,
so its config must not read this environment or name a server unless the present command repeats it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, is_dataclass
from functools import reduce
from itertools import takewhile
from operator import getitem
from typing import Any, TypeVar

from ddp_runner.config.schema import RunConfig
from ddp_runner.errors import with_causes

# A URL or HOST:PORT; a range such as train[100:200] does not match.
ADDRESS = re.compile(
    r"://|^(?:\S*@)?(?:[a-z][\w.-]*|\d+(?:\.\d+){3}|\[[\da-f:.]+\]):\d{1,5}(?=/|$)", re.IGNORECASE
)
WORDS = ("name", "notes", "resume", "tags")  # keys that no code connects to
T = TypeVar("T")
KeyPath = tuple[str | int, ...]  # keys and list indices from the config's root


@dataclass(frozen=True)
class Secrets:
    """The values that one config reads from the environment."""

    texts: Mapping[KeyPath, str] = field(default_factory=dict)  # as the user wrote: ${oc.env:X}
    values: Mapping[str, str] = field(default_factory=dict)  # value of X -> ${oc.env:X}

    def written(self, config: RunConfig) -> RunConfig:
        """Return the config to write to a file: with the user's text for each value.

        A run that is resumed from that file reads the environment again.
        """
        for path, text in self.texts.items():
            with suppress(LookupError):  # task=sample and calibrations replace whole groups
                config = replaced(config, path, text)
        return config

    def hide(self, text: str) -> str:
        """Return a sentence with ``${oc.env:X}`` in place of the value of X."""
        if not self.values:
            return text
        any_value = "|".join(map(re.escape, self.values))
        return re.sub(rf"(?<!\w)({any_value})(?!\w)", lambda match: self.values[match[1]], text)

    @contextmanager
    def hidden_in_errors(self) -> Iterator[None]:
        """Hide the values in the message of an error that leaves the block, and of its causes."""
        try:
            yield
        except BaseException as error:  # sys.exit(TEXT) has a message too
            for link in with_causes(error) if self.values else ():
                link.args = tuple(map(self._hidden, link.args))
                if isinstance(getattr(link, "value", None), str):  # an OmegaConf error
                    vars(link)["value"] = self._hidden(vars(link)["value"])
                if isinstance(link, SystemExit):
                    link.code = self._hidden(link.code)
                if isinstance(link, OSError) and isinstance(link.filename, str):
                    link.filename = self.hide(link.filename)
            raise

    def _hidden(self, argument: Any) -> Any:
        """Return an error's argument, as a text without secrets if its text has any."""
        shown = str(argument)
        return argument if (hidden := self.hide(shown)) == shown else hidden


def foreign_keys(config: Mapping[str, Any], composed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run's config with an interpolation or an address, and their values.

    Texts that the present command `composed` too are skipped. Both configs are unresolved: in a
    frozen config only interpolations that read the environment are left.
    """
    tree: Any = config
    trusted, keys = dict(walk_texts(composed)), dict[str, Any]()
    for path, text in walk_texts(config):
        parts = [text, *map(str, path)]
        is_address = path[0] not in WORDS and any(map(ADDRESS.search, parts))
        if (is_address or any("${" in part for part in parts)) and trusted.get(path) != text:
            key = list(takewhile(lambda part: re.fullmatch(r"[^\W\d]\w*", str(part)), path))
            keys[".".join(map(str, key))] = reduce(getitem, key, tree)
    return keys


def replaced(owner: T, path: Sequence[str | int], value: Any) -> T:
    """Return a config, section, mapping or list with another value at a path; the rest is shared.

    Raises:
        LookupError: the owner of the last key does not exist.
    """
    (key, *rest), changed = path, copy(owner)
    items: Any = vars(changed) if is_dataclass(changed) else changed
    items[key] = replaced(items[key], rest, value) if rest else value
    return changed


def walk_texts(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield each text of a plain config with its path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from walk_texts(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from walk_texts(value, (*path, index))
    elif isinstance(tree, str | bytes):
        yield path, str(tree)
