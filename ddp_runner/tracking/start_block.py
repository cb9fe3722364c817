"""What a run prints at its start: that it starts, its facts, and on request what the words mean."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_runner.config.schema import RunConfig, mode_needs
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import counted
from ddp_runner.job import Job
from ddp_runner.tracking.run_record import RunFields

if TYPE_CHECKING:
    import torch
    from torch import nn


def starting_lines(job: Job) -> str:
    """Return what is printed before torch is imported, which takes seconds."""
    config = job.config
    nodes = f" on {config.launch.nnodes} nodes" if config.launch.nnodes > 1 else ""
    device = "CPU" if config.backend.device == "cpu" else "GPU"
    run = ""
    if job.run_dir and not job.title:  # a sweep has named the folder of all its jobs
        run = fact_lines({"run": str(shown_path(job.run_dir))}) + "\n"
    # Where the run's config is on another machine, nobody knows the number of ranks yet.
    ranks = "ranks" if job.lacks_run else counted(config.world_size, "rank")
    return f"{run}starting {ranks}{nodes}, {config.backend.name} on {device}; importing torch …"


def training_facts(
    config: RunConfig,
    env: DistEnv,
    *,
    num_parameters: int,
    num_trained: int,
    dataset: str,
    num_train: int | None,
    num_eval: int | None,
    num_shares: int,
    max_steps: int | None,
    steps_per_epoch: int | None,
    devices: Sequence["torch.device"],
) -> dict[str, str]:
    """Return the facts of a training, by name.

    Of the parameters `num_trained` are not frozen. A global batch is split into `num_shares`; `env`
    and `devices` are of rank 0. Numbers that are None are those of a stream.
    """
    batch = config.batch
    who = "rank" if num_shares == env.world_size else "trainer"
    shares = f"{batch.per_rank} a rank x {counted(num_shares, who)}"
    if (together := mode_needs(config.parallelism).model_ranks) != 1:
        groups = counted(num_shares, "group")
        shares = f"{batch.per_rank} a group x {groups} of {together or env.world_size} ranks"
    if config.train.grad_accum_steps > 1:
        shares += f" x {config.train.grad_accum_steps} micro-steps"
    trained = f" ({num_trained:,} trained)" if num_trained < num_parameters else ""
    return {
        "model": f"{config.model.get('name')}, {num_parameters:,} parameters{trained}, "
        f"{config.train.precision}",
        "data": f"{dataset}, {count_of(num_train)} training and {count_of(num_eval)} evaluation "
        "samples",
        **placement(config, env, devices),
        "batch": f"{batch.global_size} a step = {shares}",
        "steps": _steps(max_steps, steps_per_epoch, epochs=config.train.epochs),
    }


def placement(config: RunConfig, env: DistEnv, devices: Sequence["torch.device"]) -> dict[str, str]:
    """Return the facts of where a task computes, by name."""
    mode, backend = config.parallelism.get("name"), config.backend.name
    return {
        "parallelism": f"{mode}, {backend}, {ranks_on_nodes(env)}",
        "device": gpu_names(devices),
    }


def word_lines(
    config: RunConfig, env: DistEnv, *, device: "torch.device", versions: Mapping[str, Any]
) -> str:
    """Return what the words of distributed training mean for rank 0 of this run, one a line."""
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
    """Return the facts that are not empty, one a line, each with its name in front."""
    return "\n".join(f"{name:<12} {text}" for name, text in facts.items() if text)


def ranks_on_nodes(env: DistEnv) -> str:
    """Return how many ranks there are, on how many nodes, with how many CPU threads."""
    import torch

    threads = counted(torch.get_num_threads(), "CPU thread")
    each = " each" if env.world_size > 1 else ""
    place = f"{counted(env.world_size, 'rank')} on {counted(env.num_nodes, 'node')}"
    return f"{place} ({threads}{each})"


def gpu_names(devices: Sequence["torch.device"]) -> str:
    """Return the GPUs of rank 0 with their model; empty for a CPU."""
    from ddp_runner.device import device_name

    if devices[0].type == "cpu":
        return ""
    place = ", ".join(map(str, devices))
    return f"rank 0 on {place} ({device_name(devices[0])})"


def shown_path(path: Path) -> Path:
    """Return a path relative to the current folder if it lies in it."""
    with suppress(ValueError, OSError):  # OSError: the current folder is gone
        return path.absolute().relative_to(Path.cwd())
    return path


def sizes(module: "nn.Module") -> RunFields:
    """Return how many parameters a model has, and how many bytes its gradients take."""
    parameters = list(module.parameters())
    return {
        "num_parameters": sum(one.numel() for one in parameters),
        "gradient_bytes": sum(one.nbytes for one in parameters if one.requires_grad),
    }


def count_of(samples: int | None) -> str:
    """Return a number of samples in words; None: of a stream."""
    return "a stream of" if samples is None else f"{samples:,}"


def _steps(max_steps: int | None, steps_per_epoch: int | None, *, epochs: int) -> str:
    whole = counted(epochs, "epoch") if max_steps is None else f"{max_steps} in all"
    if steps_per_epoch is None:
        return f"{whole}, an epoch ends with the stream"
    return f"{whole}, {steps_per_epoch} an epoch"


def _numbers(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"
