"""What a config reads from the environment (``oc.env``): a run uses it and never writes it down.

``__main__`` finds it in the composed config; what writes files asks for the config as ``written``.
Torch-free.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from ddp_runner.config.schema import Config

if TYPE_CHECKING:
    from omegaconf import DictConfig

Place = tuple[str | int, ...]  # keys, and positions in lists, from the config's root on
LEAST_LENGTH = 4  # of a value that is hidden in sentences: shorter ones are words or numbers


@dataclass(frozen=True)
class Secrets:
    """What one config has from the environment."""

    texts: Mapping[Place, str] = field(default_factory=dict)  # as the user wrote it: ${oc.env:X}
    values: Mapping[str, str] = field(default_factory=dict)  # X's value, and ${oc.env:X}

    def written(self, config: Config) -> Config:
        """Return the config as it may be written down: with the user's text for each such value.

        A run that is resumed from it reads the environment again.
        """
        shown = deepcopy(config) if self.texts else config
        for (*owners, last), text in self.texts.items():
            with suppress(LookupError):  # a list that a calibration has replaced
                owner: Any = reduce(_child, owners, shown)
                if is_dataclass(owner):
                    setattr(owner, str(last), text)
                else:
                    owner[last] = text
        return shown

    def hide(self, text: str) -> str:
        """Return a sentence with ``${oc.env:X}`` wherever it has the value of X."""
        if not self.values:
            return text
        any_value = "|".join(map(re.escape, self.values))
        return re.sub(rf"(?<!\w)({any_value})(?!\w)", lambda found: self.values[found[1]], text)

    @contextmanager
    def hidden_in_errors(self) -> Iterator[None]:
        """Hide the values in the words of an error that leaves the block, and of its causes."""
        try:
            yield
        except BaseException as error:  # sys.exit(TEXT) has words as well
            link: BaseException | None = error if self.values else None
            while link is not None:
                link.args = tuple(map(self._hidden, link.args))
                if isinstance(link, SystemExit):
                    link.code = self._hidden(link.code)
                if isinstance(link, OSError) and isinstance(link.filename, str):
                    link.filename = self.hide(link.filename)
                link = link.__cause__ or link.__context__
            raise

    def _hidden(self, argument: Any) -> Any:
        """Return an argument of an error; as text, if that holds a value."""
        shown = str(argument)
        return argument if (hidden := self.hide(shown)) == shown else hidden


def find_secrets(raw: "DictConfig") -> Secrets:
    """Return what a composed config reads from the environment, by whatever way it does.

    Each value is resolved once more while ``oc.env`` is watched: a value may come from it by way
    of other keys, within a longer text, in a list, or through other resolvers.
    """
    from omegaconf import OmegaConf  # late: a comparison imports this module and needs no config
    from omegaconf.resolvers import oc

    read, values, texts = list[str](), dict[str, str](), dict[Place, str]()

    def watched(name: str, *default: Any) -> str | None:
        read.append(name)
        value = oc.env(name, *default)
        if name in os.environ and _is_telling(os.environ[name]):
            values[os.environ[name]] = f"${{oc.env:{name}}}"
        return value

    OmegaConf.register_new_resolver("oc.env", watched, replace=True)
    try:
        for place, text in _interpolations(OmegaConf.to_container(raw, resolve=False), ()):
            read.clear()
            # A value that cannot be resolved is named when the config is.
            with suppress(Exception):
                value = reduce(_child, place, raw)
                if OmegaConf.is_config(value):
                    OmegaConf.to_container(value, resolve=True)
            if read:
                texts[place] = text
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    longest_first = sorted(values, key=len, reverse=True)
    return Secrets(texts, {value: values[value] for value in longest_first})


def _interpolations(tree: Any, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _interpolations(value, (*place, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _interpolations(value, (*place, index))
    elif isinstance(tree, str) and "${" in tree:
        yield place, tree


def _child(owner: Any, key: str | int) -> Any:
    return getattr(owner, str(key)) if is_dataclass(owner) else owner[key]


def _is_telling(value: str) -> bool:
    """Return whether a value is long enough, and no number, to be looked for in a sentence."""
    return len(value) >= LEAST_LENGTH and re.fullmatch(r"[\d.eE+-]+", value) is None
