"""What a config says a run computes: its dotted keys, and the hashes that are its identity."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from ddp_runner.config.fields import plain
from ddp_runner.config.schema import LIST_GROUPS, RUNNER_KEYS, RunConfig, has_own_loop
from ddp_runner.config.training import TrainConfig

# The keys, and groups of keys, that change nothing that a run computes: it may resume with others.
UNCOUNTED = (
    *("resume", "data_root", "verbose", "tags", "notes", "allowed_targets", "train.profile"),
    *("launch", "sweep", "trackers"),
)
# Beside them, what a YAML requires of the machine: it is no part of the work.
_REQUIRED = re.compile(
    rf"(?:{'|'.join(RUNNER_KEYS)}|(?:{'|'.join(LIST_GROUPS)})\.[^.]+)\.requires(?:\.|$)"
)
OF_RANKS = ("world_size", "batch.global_size", "batch.per_rank")  # they follow from the ranks


def is_inside(name: str, owners: Iterable[str]) -> bool:
    """Return whether a dotted name is one of these, or is below one of them."""
    return any(f"{name}.".startswith(f"{one.rstrip('.')}.") for one in owners)


@lru_cache(maxsize=10_000)  # the jobs of a sweep ask again
def counts(key: str) -> bool:
    """Return whether a dotted key is a part of what a run computes."""
    return not (is_inside(key, UNCOUNTED) or _REQUIRED.match(key))


def config_hash(config: RunConfig) -> str:
    """Return the identity of a resolved config: equal for runs that do the same work."""
    return digest(flatten(config))


def work_hash(config: RunConfig) -> str:
    """Return the identity of what a resolved config does, on however many ranks.

    Neither batch size counts, since each follows from the other and the number of ranks. A resumed
    run keeps its own global batch.
    """
    return digest({key: value for key, value in flatten(config).items() if key not in OF_RANKS})


def digest(values: Any) -> str:
    """Return a short hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return the dotted keys that count, and their values."""
    return {key: value for key, value in leaves(plain(config)) if counts(key)}


def leaves(
    tree: Mapping[Any, Any], prefix: str = "", *, whole_lists: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested config and their values; items of a list by their number.

    A list of plain values is one value, and so is any list with `whole_lists`.
    """
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.", whole_lists=whole_lists)
        elif not whole_lists and _is_nested(value):
            yield from leaves({str(i): item for i, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict | list) for item in value)


def only_used(keys: Mapping[str, Any], *, uses: Any) -> dict[str, Any]:
    """Return the dotted keys that say what a run does.

    What a YAML requires of the machine is left out. So is what the user's own loop has left as it
    was: it trains nothing by itself, so a default under train says nothing about it, nor does a
    group that it did not build from.

    Args:
        keys: of a config, with their values.
        uses: the groups that it used, as run.json has them; anything else for another task.
    """
    found = {key: value for key, value in keys.items() if not _REQUIRED.match(key)}
    if not isinstance(uses, list) or not has_own_loop(str(keys.get("task"))):
        return found
    unused = RUNNER_KEYS.keys() - {"parallelism", *map(str, uses)}
    defaults = dict(leaves({"train": asdict(TrainConfig())}))
    return {
        key: value
        for key, value in found.items()
        if key.partition(".")[0] not in unused and (key not in defaults or value != defaults[key])
    }
