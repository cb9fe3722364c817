"""Random numbers: each stream of a run follows from the seed and from what it is for.

No state of a generator is ever saved. A training step, a batch of an evaluation and a sample each
seed what they draw from, so they draw the same numbers whatever was drawn before them: after a
resume, beside evaluations, with any number of workers.
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
    is_same: Callable[[Any, Any], bool]  # whether two states are the same


def _same_numpy(state: Any, other: Any) -> bool:
    # Name, words, position and a number in reserve. The words change every 624 numbers.
    return state[2:] == other[2:] and bool((state[1] == other[1]).all())


# The global generators of a process, those of GPUs aside.
GENERATORS = {
    "random": _Generator(random.getstate, random.setstate, random.seed, lambda a, b: bool(a == b)),
    "torch": _Generator(
        torch.get_rng_state,
        torch.set_rng_state,
        # torch.manual_seed does more for each kind of device, which takes 70 times as long.
        torch.default_generator.manual_seed,
        torch.equal,
    ),
    "numpy": _Generator(
        np.random.get_state,
        np.random.set_state,
        lambda seed: np.random.seed(seed % 2**32),
        _same_numpy,
    ),
}


def derive(seed: int, *labels: str | int) -> int:
    """Return the seed of one stream, in 0 to 2**63 - 1, as torch.Generator takes it.

    The labels say what the stream is for, and its epoch, rank or step: ("order", 3). A hash and not
    a sum: with seed + epoch the second epoch of seed 0 would be the first of seed 1, and runs that
    differ in their seed alone would not be independent.
    """
    text = repr([seed, *labels]).replace("'", '"')
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seed_all(seed: int, *labels: str | int) -> None:
    """Seed every generator of this process, those of its GPUs included, for one stream.

    It takes about 10 us. Without labels the seed itself is used.
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
    """Return the generators that have advanced, or have been seeded, since `before`."""
    return {
        name
        for name, state in before.items()
        if not GENERATORS[name].is_same(GENERATORS[name].state(), state)
    }


def restore_generators(before: Mapping[str, Any]) -> None:
    """Put generators back into earlier states, in a process that belongs to somebody else."""
    for name, state in before.items():
        GENERATORS[name].restore(state)
