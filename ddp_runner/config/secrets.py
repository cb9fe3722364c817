"""Values that a config reads from the environment (``oc.env``): used by a run, never written down.

Whatever writes a config to a file writes ``Secrets.written``. And a run's own config may do some
things only if the present command says them again, since a run folder may come from anybody: its
texts must not carry this environment's variables away, nor make this machine ask a server.
Torch-free.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass
from functools import reduce
from itertools import takewhile
from operator import getitem
from typing import Any

from ddp_runner.config.schema import Config, RunConfig

# An address: of a scheme, or HOST:PORT. A range such as train[100:200] is none.
ADDRESS = re.compile(
    r"://|^(?:\S*@)?(?:[a-z][\w.-]*|\d+(?:\.\d+){3}|\[[\da-f:.]+\]):\d{1,5}(?=/|$)", re.IGNORECASE
)
WORDS = ("name", "notes", "resume", "tags")  # they lead nowhere
Place = tuple[str | int, ...]  # keys, and positions in lists, from the config's root on


@dataclass(frozen=True)
class Secrets:
    """The values that one config reads from the environment."""

    texts: Mapping[Place, str] = field(default_factory=dict)  # as the user wrote them: ${oc.env:X}
    values: Mapping[str, str] = field(default_factory=dict)  # from the value of X to ${oc.env:X}

    def written(self, config: RunConfig) -> RunConfig:
        """Return the config as it may be written to a file: with the user's text for each value.

        A run that is resumed from that file reads the environment again.
        """
        shown = deepcopy(config) if self.texts else config
        for place, text in self.texts.items():
            with suppress(LookupError):  # a list that a calibration has replaced
                put(shown, place, text)
        return shown

    def hide(self, text: str) -> str:
        """Return a sentence with ``${oc.env:X}`` in place of the value of X."""
        if not self.values:
            return text
        any_value = "|".join(map(re.escape, self.values))
        return re.sub(rf"(?<!\w)({any_value})(?!\w)", lambda found: self.values[found[1]], text)

    @contextmanager
    def hidden_in_errors(self) -> Iterator[None]:
        """Hide the values in the message of an error that leaves the block, and of its causes."""
        try:
            yield
        except BaseException as error:  # sys.exit(TEXT) has a message too
            link: BaseException | None = error if self.values else None
            while link is not None:
                link.args = tuple(map(self._hidden, link.args))
                if isinstance(getattr(link, "value", None), str):  # of OmegaConf's
                    vars(link)["value"] = self._hidden(vars(link)["value"])
                if isinstance(link, SystemExit):
                    link.code = self._hidden(link.code)
                if isinstance(link, OSError) and isinstance(link.filename, str):
                    link.filename = self.hide(link.filename)
                link = link.__cause__ or link.__context__
            raise

    def _hidden(self, argument: Any) -> Any:
        """Return an argument of an error; if its text holds a value, the text without it."""
        shown = str(argument)
        return argument if (hidden := self.hide(shown)) == shown else hidden


def foreign_keys(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run's config that have an interpolation or an address, and their values.

    A frozen config has interpolations only where the environment is read: see ``Secrets.written``.

    Args:
        config: of the run, its interpolations unresolved.
        own: what the present command composes, likewise; texts that stand there, too, are left out.
    """
    tree: Any = config
    known, found = dict(texts(own)), dict[str, Any]()
    for place, text in texts(config):
        parts = [text, *(str(one) for one in place)]
        is_address = place[0] not in WORDS and any(map(ADDRESS.search, parts))
        if (is_address or any("${" in one for one in parts)) and known.get(place) != text:
            key = list(takewhile(lambda one: re.fullmatch(r"[^\W\d]\w*", str(one)), place))
            found[".".join(map(str, key))] = reduce(getitem, key, tree)
    return found


def put(config: Config, place: Place, value: Any) -> None:
    """Set a value of a config, in place; a LookupError if nothing is there."""
    owner: Any = config
    for key in place[:-1]:
        owner = getattr(owner, str(key)) if is_dataclass(owner) else owner[key]
    if is_dataclass(owner):
        setattr(owner, str(place[-1]), value)
    else:
        owner[place[-1]] = value


def texts(tree: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield each text of a plain config, and where it stands."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from texts(value, (*place, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from texts(value, (*place, index))
    elif isinstance(tree, str | bytes):
        yield place, str(tree)
