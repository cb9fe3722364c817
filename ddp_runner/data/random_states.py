"""The global random number generators of Python, NumPy and torch: read, seed and restore them."""

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


def states(names: Iterable[str]) -> dict[str, Any]:
    """Return the states of generators."""
    return {name: GENERATORS[name].state() for name in names}


def moved(before: Mapping[str, Any]) -> set[str]:
    """Return the generators that have advanced, or have been seeded, since `before`."""
    return {name for name, state in before.items() if not _is_same(name, state)}


def restore(before: Mapping[str, Any]) -> None:
    """Give generators back their states."""
    for name, state in before.items():
        if state is not None:
            GENERATORS[name].restore(state)


def seed(names: Iterable[str], number: int) -> None:
    """Seed generators; `number` is at least 0."""
    for name in names:
        GENERATORS[name].seed(number)


def _is_same(name: str, before: Any) -> bool:
    now = GENERATORS[name].state()
    if before is None or now is None:  # a library that was imported meanwhile has drawn its seed
        return before is now
    return GENERATORS[name].is_same(now, before)
