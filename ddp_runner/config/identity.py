"""The identity of a run: the dotted keys that decide its results, and their hashes."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from ddp_runner.config.fields import plain
from ddp_runner.config.schema import LIST_GROUPS, RUNNER_KEYS, RunConfig, has_own_loop
from ddp_runner.config.training import TrainConfig

# Keys and groups that do not change the results, so a run may resume with other values.
NEUTRAL_KEYS = (
    *("resume", "data_root", "verbose", "tags", "notes", "allowed_targets", "train.profile"),
    *("launch", "sweep", "trackers"),
)
# The blocks `requires` do not count either: they describe the machine.
_LISTED = rf"(?:{'|'.join(LIST_GROUPS)})\.[^.]+"
_REQUIRED = re.compile(rf"(?:{'|'.join(RUNNER_KEYS)}|{_LISTED})\.requires(?:\.|$)")
_is_required = lru_cache(maxsize=10_000)(_REQUIRED.match)  # thousands of runs repeat their keys
RANK_KEYS = ("world_size", "batch.global_size", "batch.per_rank")  # they depend on the ranks


def is_inside(name: str, owners: Iterable[str]) -> bool:
    """Return whether a dotted name equals one of the owners or is below it."""
    return any(f"{name}.".startswith(f"{owner.rstrip('.')}.") for owner in owners)


@lru_cache(maxsize=10_000)
def affects_results(key: str) -> bool:
    """Return whether a dotted key can change the results of a run, so it is in its identity."""
    return not (is_inside(key, NEUTRAL_KEYS) or _is_required(key))


def config_hash(config: RunConfig) -> str:
    """Return the identity of a resolved config: equal for runs that do the same work."""
    return digest(flatten(config))


def work_hash(config: RunConfig) -> str:
    """Return the identity of a resolved config without its number of ranks.

    The batch sizes do not count: each follows from the other and the number of ranks, and a resumed
    run keeps its own global batch.
    """
    return digest({key: value for key, value in flatten(config).items() if key not in RANK_KEYS})


def digest(values: Any) -> str:
    """Return a short hash of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return the dotted keys that affect the results, with their values."""
    return {key: value for key, value in leaves(plain(config)) if affects_results(key)}


def leaves(
    tree: Mapping[Any, Any], prefix: str = "", *, whole_lists: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested config with their values.

    A list of plain values is one value. The items of other lists have their index as key, unless
    `whole_lists` is set.
    """
    for key, value in tree.items():
        is_list = isinstance(value, list) and not whole_lists
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.", whole_lists=whole_lists)
        elif is_list and any(isinstance(item, dict | list) for item in value):
            yield from leaves(dict(enumerate(value)), f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def dotted_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a plain config, groups included."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from dotted_keys(value, f"{prefix}{key}.")


def only_used(keys: Mapping[str, Any], *, uses: Any) -> dict[str, Any]:
    """Return the dotted keys that describe the work of a run.

    Blocks `requires` are dropped. The user's own loop has in run.json the groups that it `uses`;
    its other groups and defaults of `train` are dropped too: the runner does not apply them.
    """
    used = {key: value for key, value in keys.items() if not _is_required(key)}
    if not isinstance(uses, list) or not has_own_loop(str(keys.get("task"))):
        return used
    unused = RUNNER_KEYS.keys() - {"parallelism", *map(str, uses)}
    defaults = dict(leaves({"train": plain(TrainConfig())}))
    return {
        key: value
        for key, value in used.items()
        if key.partition(".")[0] not in unused and (key not in defaults or value != defaults[key])
    }
