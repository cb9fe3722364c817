"""A config-driven experiment runner for distributed PyTorch: ``python -m ddp_runner``.

These are the names that a user's own code imports. Each is imported when it is first used, so that
commands which need no torch start without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_runner.dist_env import DistEnv
    from ddp_runner.inference.notebook import load, load_tokenizer, read_runs
    from ddp_runner.metrics.metric import summed
    from ddp_runner.own_loop.run import Run
    from ddp_runner.parallelism.ddp import DDP
    from ddp_runner.parallelism.mode import Engine, Layout, Mode, local_engine, no_wrapper
    from ddp_runner.train.step import StepOutput

__version__ = "0.1.0"

__all__ = [
    "DDP",
    "DistEnv",
    "Engine",
    "Layout",
    "Mode",
    "Run",
    "StepOutput",
    "load",
    "load_tokenizer",
    "local_engine",
    "no_wrapper",
    "read_runs",
    "summed",
]
_HOMES = {
    "dist_env": ("DistEnv",),
    "inference.notebook": ("load", "load_tokenizer", "read_runs"),
    "metrics.metric": ("summed",),
    "own_loop.run": ("Run",),
    "parallelism.ddp": ("DDP",),
    "parallelism.mode": ("Engine", "Layout", "Mode", "local_engine", "no_wrapper"),
    "train.step": ("StepOutput",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
