"""A config-driven experiment runner for distributed PyTorch: ``python -m ddp_runner``.

These are the names that a user's own code imports. Each is imported when it is first used, so that
commands which need no torch start without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_runner.dist_env import DistEnv as DistEnv
    from ddp_runner.inference.notebook import load as load
    from ddp_runner.inference.notebook import load_tokenizer as load_tokenizer
    from ddp_runner.inference.notebook import read_runs as read_runs
    from ddp_runner.metrics.metric import summed as summed
    from ddp_runner.own_loop.run import Run as Run
    from ddp_runner.parallelism.ddp import DDP as DDP
    from ddp_runner.parallelism.mode import Engine as Engine
    from ddp_runner.parallelism.mode import Layout as Layout
    from ddp_runner.parallelism.mode import Mode as Mode
    from ddp_runner.parallelism.mode import local_engine as local_engine
    from ddp_runner.parallelism.mode import no_wrapper as no_wrapper
    from ddp_runner.train.step import StepOutput as StepOutput

__version__ = "0.1.0"

_HOMES = {
    "dist_env": ("DistEnv",),
    "inference.notebook": ("load", "load_tokenizer", "read_runs"),
    "metrics.metric": ("summed",),
    "own_loop.run": ("Run",),
    "parallelism.ddp": ("DDP",),
    "parallelism.mode": ("Engine", "Layout", "Mode", "local_engine", "no_wrapper"),
    "train.step": ("StepOutput",),
}
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
