"""A function of the user's own as the task: it gets a ``Run`` and writes its loop in plain PyTorch."""

from ddp_runner.own_loop.run import Run

__all__ = ["Run"]
