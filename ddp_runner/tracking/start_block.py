"""What a run prints at its start: a first line, its facts, and on request a glossary."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.config.schema import RunConfig
from ddp_runner.config.sections import PLAN
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import counted
from ddp_runner.job import Job

if TYPE_CHECKING:
    import torch


def starting_lines(job: Job) -> str:
    """Return the lines to print before the import of torch, which takes seconds."""
    config = job.config
    nodes = f" on {config.launch.nnodes} nodes" if config.launch.nnodes > 1 else ""
    device = "CPU" if config.backend.device == "cpu" else "GPU"
    run = ""
    if job.run_dir and not job.title:  # a sweep prints its own folder once for all jobs
        run = fact_lines({"run": str(shown_path(job.run_dir))}) + "\n"
    # Without the run's config, which is on another machine, the number of ranks is unknown.
    ranks = "ranks" if job.lacks_run else counted(config.world_size, "rank")
    if config.task == PLAN:
        return f"{run}planning {ranks} in one process; importing torch …"
    return f"{run}starting {ranks}{nodes}, {config.backend.name} on {device}; importing torch …"


def placement(config: RunConfig, env: DistEnv, devices: Sequence["torch.device"]) -> dict[str, str]:
    """Return the parallelism and the devices of a task as facts, by name."""
    mode, backend = config.parallelism.get("name"), config.backend.name
    return {
        "parallelism": f"{mode}, {backend}, {ranks_on_nodes(env)}",
        "device": gpu_names(devices),
    }


def word_lines(
    config: RunConfig, env: DistEnv, *, device: "torch.device", versions: Mapping[str, str | None]
) -> str:
    """Return a glossary of distributed training with the values of rank 0, one word a line."""
    words = {
        "world size": f"{env.world_size}, the number of ranks over all nodes",
        "rank": f"{_numbers(env.world_size)}, over all nodes; this is rank {env.rank}, process "
        f"{os.getpid()}",
        "local rank": f"{_numbers(env.local_world_size)} within a node, chooses the device; this "
        f"is {env.local_rank}, on {device}",
        "node rank": f"{_numbers(env.num_nodes)}, a number for each node; this is {env.node_rank}",
        "timeout": f"{config.backend.timeout_s:g} s for a collective",
        "versions": f"torch {versions['torch']}, Python {versions['python']}",
    }
    return fact_lines(words)


def fact_lines(facts: Mapping[str, str]) -> str:
    """Return the facts that are not empty as lines of a name and a text."""
    return "\n".join(f"{name:<12} {text}" for name, text in facts.items() if text)


def ranks_on_nodes(env: DistEnv) -> str:
    """Return the numbers of ranks, of nodes and of CPU threads per rank, as text."""
    import torch

    threads = counted(torch.get_num_threads(), "CPU thread")
    each = " each" if env.world_size > 1 else ""
    ranks, nodes = counted(env.world_size, "rank"), counted(env.num_nodes, "node")
    return f"{ranks} on {nodes} ({threads}{each})"


def gpu_names(devices: Sequence["torch.device"]) -> str:
    """Return the GPUs of rank 0 and their model name; empty for a CPU."""
    from ddp_runner.device import device_name

    if devices[0].type == "cpu":
        return ""
    return f"rank 0 on {', '.join(map(str, devices))} ({device_name(devices[0])})"


def shown_path(path: Path) -> Path:
    """Return a path relative to the current folder if it is inside of it."""
    with suppress(ValueError, OSError):  # outside of it, or the current folder was deleted
        return path.absolute().relative_to(Path.cwd())
    return path


def count_of(samples: int | None) -> str:
    """Return a number of samples as text; None stands for a stream."""
    return "a stream of" if samples is None else f"{samples:,}"


def _numbers(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"
