"""Values that a config reads from the environment (``oc.env``): used by a run, never written down.

Whatever writes a config to a file writes ``Secrets.written``. Torch-free.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from ddp_runner.config.schema import Config

Place = tuple[str | int, ...]  # keys, and positions in lists, from the config's root on


@dataclass(frozen=True)
class Secrets:
    """The values that one config reads from the environment."""

    texts: Mapping[Place, str] = field(default_factory=dict)  # as the user wrote them: ${oc.env:X}
    values: Mapping[str, str] = field(default_factory=dict)  # from the value of X to ${oc.env:X}

    def written(self, config: Config) -> Config:
        """Return the config as it may be written to a file: with the user's text for each value.

        A run that is resumed from that file reads the environment again.
        """
        shown = deepcopy(config) if self.texts else config
        for (*owners, last), text in self.texts.items():
            with suppress(LookupError):  # a list that a calibration has replaced
                owner: Any = shown
                for key in owners:
                    owner = getattr(owner, str(key)) if is_dataclass(owner) else owner[key]
                if is_dataclass(owner):
                    setattr(owner, str(last), text)
                else:
                    owner[last] = text
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
