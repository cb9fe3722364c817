"""Checkpoints as a resume finds them."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def run_until_killed(set_trap: Callable[[], None], work: Callable[[], object]) -> bool:
    """Run the work in a child after setting the trap; return whether the trap killed it."""
    status = wait_status(forked(set_trap, work))
    assert os.WIFSIGNALED(status) or status == 0, "the child failed by itself"
    return os.WIFSIGNALED(status)


def wait_status(child: int) -> int:
    """Return the status of a child that has ended."""
    return os.waitpid(child, 0)[1]


def forked(set_trap: Callable[[], None], work: Callable[[], object]) -> int:
    """Run the work in a child after setting the trap; return its process number."""
    child = os.fork()
    if child == 0:
        try:
            set_trap()
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    return child


def kill_at_call(number: int) -> None:
    """Make this process die at the n-th call that changes the file system."""
    calls = 0

    def trap(name: str) -> None:
        original = getattr(os, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, name, counted)

    for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir"):
        trap(name)
