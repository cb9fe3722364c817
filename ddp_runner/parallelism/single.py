"""One process on one device: the reference for every other mode."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.mode import Layout, local_engine, no_wrapper


@dataclass(frozen=True)
class Single:
    """An unwrapped model on a rank's first device; other modes say where they differ."""

    name: str
    wrap = staticmethod(no_wrapper)
    engine = staticmethod(local_engine)

    def layout(self, env: DistEnv) -> Layout:
        """Return a rank's part of a run: a share for each rank."""
        return Layout(share=env.rank, num_shares=env.world_size, env=env)

    def place(self, build: Callable[..., nn.Module], devices: Sequence[torch.device]) -> nn.Module:
        """Build the model, and move it to the device."""
        return build().to(devices[0])

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return an empty context: backward does not communicate with other ranks."""
        return nullcontext()
