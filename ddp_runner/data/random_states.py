"""The generators of random numbers that a user's dataset draws from: Python's, NumPy's and torch's.

Each process has its own. NumPy's counts only if something has imported NumPy.
"""

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class _Generator:
    state: Callable[[], Any]  # None: its library is not imported
    restore: Callable[[Any], object]
    seed: Callable[[int], object]
    is_same: Callable[[Any, Any], bool]  # whether two states, neither None, are the same


def _numpy() -> ModuleType | None:
    return sys.modules.get("numpy.random")


def _same_numpy(state: Any, other: Any) -> bool:
    # Name, words, position and a number in reserve. The words change every 624 numbers.
    return state[2:] == other[2:] and bool((state[1] == other[1]).all())


GENERATORS = {
    "random": _Generator(random.getstate, random.setstate, random.seed, lambda a, b: bool(a == b)),
    "torch": _Generator(
        torch.get_rng_state,
        torch.set_rng_state,
        # torch.manual_seed also seeds each GPU, which takes 70 times as long.
        torch.default_generator.manual_seed,
        torch.equal,
    ),
    "numpy": _Generator(
        lambda: (numpy := _numpy()) and numpy.get_state(),
        lambda state: (numpy := _numpy()) and numpy.set_state(state),
        lambda seed: (numpy := _numpy()) and numpy.seed(seed % 2**32),
        _same_numpy,
    ),
}


def random_states(names: Iterable[str] = GENERATORS) -> dict[str, Any]:
    """Return the states of generators, by name."""
    return {name: GENERATORS[name].state() for name in names}


def moved(before: Mapping[str, Any]) -> set[str]:
    """Return the generators that have advanced, or have been seeded, since `before`."""
    return {name for name, state in before.items() if not _is_same(name, state)}


def restore(before: Mapping[str, Any]) -> None:
    """Put generators back into earlier states."""
    for name, state in before.items():
        if state is not None:
            GENERATORS[name].restore(state)


def seed_all(seed: int, names: Iterable[str] = GENERATORS) -> None:
    """Seed generators, those of GPUs aside; `seed` is at least 0."""
    for name in names:
        GENERATORS[name].seed(seed)


def _is_same(name: str, before: Any) -> bool:
    now = GENERATORS[name].state()
    if before is None or now is None:  # a library that was imported meanwhile has drawn its seed
        return before is now
    return GENERATORS[name].is_same(now, before)
