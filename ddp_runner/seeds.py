"""Random numbers: each stream of a run is derived from the seed and its purpose.

Generator states are never saved. Each training step, evaluation batch and sample seeds its own
generators, so it draws the same numbers whatever was drawn before: after a resume, between
evaluations, with any number of workers.
"""

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_runner.device import seed_devices


class _Generator(NamedTuple):
    state: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]
    is_same: Callable[[Any, Any], bool]


# The global generators of a process, without those of its GPUs.
GENERATORS = {
    "random": _Generator(random.getstate, random.setstate, random.seed, lambda a, b: bool(a == b)),
    "torch": _Generator(
        torch.get_rng_state,
        torch.set_rng_state,
        # torch.manual_seed also seeds every kind of device, which takes 70 times as long.
        torch.default_generator.manual_seed,
        torch.equal,
    ),
    "numpy": _Generator(
        np.random.get_state,
        np.random.set_state,
        lambda seed: np.random.seed(seed % 2**32),
        # A state is (name, words, position, two cached values). The words change every 624 numbers.
        lambda a, b: a[2:] == b[2:] and bool((a[1] == b[1]).all()),
    ),
}


def derive(seed: int, *labels: str | int) -> int:
    """Return the seed of a stream, in 0 to 2**63 - 1, the range of torch.Generator.

    The labels are the purpose of the stream and its epoch, rank or step: ("order", 3). A hash
    rather than a sum: with seed + epoch, the second epoch of seed 0 would be the first of seed 1,
    and runs that differ only in their seed would not be independent.
    """
    text = repr([seed, *labels]).replace("'", '"')
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seed_all(seed: int, *labels: str | int) -> None:
    """Seed every generator of this process and its GPUs for a stream, in about 10 us.

    Without labels the seed itself is used.
    """
    value = derive(seed, *labels) if labels else seed
    seed_generators(value)
    seed_devices(value)


def seed_generators(seed: int, names: Iterable[str] = GENERATORS) -> None:
    """Seed generators by name; `seed` is at least 0."""
    for name in names:
        GENERATORS[name].seed(seed)


def generator_states(names: Iterable[str] = GENERATORS) -> dict[str, Any]:
    """Return the states of generators, by name."""
    return {name: GENERATORS[name].state() for name in names}


def moved(before: Mapping[str, Any]) -> set[str]:
    """Return the generators that have changed since `before`."""
    return {
        name
        for name, state in before.items()
        if not GENERATORS[name].is_same(GENERATORS[name].state(), state)
    }
