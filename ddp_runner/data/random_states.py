"""The generators of random numbers that a user's dataset draws from: Python's, NumPy's and torch's.

Each process has its own. NumPy's counts only if something has imported NumPy.
"""

import random
import sys
from typing import Any

import torch

States = tuple[Any, ...]


def random_states() -> States:
    """Return the states of all three generators."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), torch.get_rng_state(), numpy and numpy.get_state()


def have_drawn(before: States) -> bool:
    """Return whether a generator has advanced since `before`."""
    python, of_torch, of_numpy = before
    now = random_states()
    if now[0] != python or not torch.equal(now[1], of_torch):
        return True
    if of_numpy is None or now[2] is None:  # NumPy was imported meanwhile, if at all
        return of_numpy is not now[2]
    # Position, cached normal, and the words, which change every 624 numbers.
    return now[2][2:] != of_numpy[2:] or bool((now[2][1] != of_numpy[1]).any())


def restore(states: States) -> None:
    """Put the generators back into earlier states."""
    python, of_torch, of_numpy = states
    random.setstate(python)
    torch.set_rng_state(of_torch)
    if of_numpy is not None:
        sys.modules["numpy.random"].set_state(of_numpy)


def seed_all(seed: int) -> None:
    """Seed the generators, those of GPUs aside."""
    random.seed(seed)
    # torch.manual_seed also seeds each GPU, which takes 70 times as long.
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(seed % 2**32)
