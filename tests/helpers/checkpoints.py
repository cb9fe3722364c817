"""Checkpoints as a resume finds them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ddp_runner.checkpoint.between_ranks import agreed_checkpoint


@contextmanager
def single_rank() -> Iterator[None]:
    """Make this process the only rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def latest_checkpoint(folder: Path, *, log: Callable[[str], None]) -> Path | None:
    """Return the checkpoint that a single rank would resume."""
    with single_rank():
        return agreed_checkpoint(folder, log=log)
