"""What a run's config may do only if the present command says it again. Torch-free.

A run folder may come from anybody. Its texts must not carry this environment's variables away, nor
make this machine ask a server.
"""

import re
from collections.abc import Mapping
from functools import reduce
from itertools import takewhile
from operator import getitem
from typing import Any

from ddp_runner.config.load import texts

# An address: of a scheme, or HOST:PORT. A range such as train[100:200] is none.
ADDRESS = re.compile(
    r"://|^(?:\S*@)?(?:[a-z][\w.-]*|\d+(?:\.\d+){3}|\[[\da-f:.]+\]):\d{1,5}(?=/|$)", re.IGNORECASE
)
WORDS = ("name", "notes", "resume", "tags")  # they lead nowhere


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
