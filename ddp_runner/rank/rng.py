"""The random numbers of a rank's process: torch's on the CPU and its GPUs, Python's and NumPy's."""

import random
from typing import Any

import numpy as np
import torch

from ddp_runner.rank.cuda import rng_states, set_rng_states


def seed_rng(seed: int) -> None:
    """Seed all generators of this process; NumPy's takes the last 32 bits."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators of this process as plain data.

    Args:
        device: the rank's first.
    """
    name, key, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, np.asarray(key).tolist(), *rest),
    }
    if device.type == "cuda":
        state["cuda"] = rng_states(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Set what ``rng_state`` returned."""
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and device.type == "cuda":
        set_rng_states(state["cuda"], device)
