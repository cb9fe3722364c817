"""A task of the user's own: a function that gets a ``Run`` and has a loop in plain PyTorch."""

from ddp_runner.own_loop.run import Run

__all__ = ["Run"]
