"""The keys of ``hydra/launcher=slurm``: what a node has, and how a job is spread over nodes.

Torch-free.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_runner.config.fields import KINDS
from ddp_runner.config.schema import Config, mode_needs
from ddp_runner.config.sections import AUTO
from ddp_runner.errors import UserError, in_yaml
from ddp_runner.host.hardware import Hardware
from ddp_runner.sweep.layout import NodeLayout
from ddp_runner.sweep.slurm.queue import run_slurm

LOCAL = "ddp_runner.sweep.local.Local"  # the _target_ of hydra/launcher=ddp_runner
OURS = "ddp_runner.sweep.slurm.executor.Slurm"  # and of hydra/launcher=slurm
NOT_NEGATIVE = ("gpus_per_node", "max_requeues")
Options = Mapping[str, str | int | bool]  # of sbatch, by their names with underscores
OF_SWEEP = ("job_name", "array", "output", "error", "chdir")  # options of sbatch that a sweep sets


@dataclass(frozen=True)
class SlurmSettings:
    """What conf/hydra/launcher/slurm.yaml explains."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    timeout_min: int = 60
    mem_gb: float | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    cpus_per_task: int | None = None
    array_parallelism: int | None = None
    signal_delay_s: int = 90
    max_requeues: int = 20
    setup: list[str] = field(default_factory=list)
    additional_parameters: dict[str, Any] = field(default_factory=dict)
    submit: bool = True


def slurm_settings(launcher: DictConfig) -> SlurmSettings | None:
    """Return the settings in the node ``hydra.launcher``; None if the jobs run on this machine.

    Raises:
        UserError: a value is of another kind, or out of its range, or the launcher is not ours.
    """
    given: Any = OmegaConf.to_container(launcher, resolve=True)
    target = given.pop("_target_", None)
    if target == LOCAL:
        return None
    if target != OURS:
        raise UserError(
            f"hydra/launcher: {target} is of another package, and a sweep needs "
            "hydra/launcher=ddp_runner or hydra/launcher=slurm; leave hydra/launcher out"
        )
    try:
        merged = OmegaConf.merge(OmegaConf.structured(SlurmSettings), given)
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = str(error.full_key).partition(".")[0].partition("[")[0]
        kinds: dict[str, Any] = {one.name: one.type for one in fields(SlurmSettings)}
        if key not in kinds:
            raise UserError(f"hydra.launcher.{key} is not a key of hydra/launcher=slurm") from None
        kind = KINDS.get(get_args(kinds[key] | None)[0], "a list or mapping, as in its YAML")
        raise UserError(f"hydra.launcher.{key} ({in_yaml(given[key])}) must be {kind}") from None
    assert isinstance(settings, SlurmSettings)
    for key, value in vars(settings).items():
        least = 0 if key in NOT_NEGATIVE else 1
        if isinstance(value, int | float) and not isinstance(value, bool) and value < least:
            raise UserError(f"hydra.launcher.{key} ({value}) must be {least} or greater")
    for key in settings.additional_parameters:
        if key.replace("-", "_") in OF_SWEEP:
            raise UserError(
                f"hydra.launcher.additional_parameters.{key} is the sweep's own; omit it"
            )
    return settings


def node_hardware(settings: SlurmSettings) -> Hardware:
    """Return what a node has, by the keys, else by what Slurm reports of the smallest node.

    Raises:
        UserError: Slurm does not answer, or does not have the partition.
    """
    num_gpus, num_cores = settings.gpus_per_node, settings.cpus_per_node
    nodes = _nodes(settings.partition) if None in (num_gpus, num_cores) else []
    return Hardware(
        num_gpus=min(gpus for _, gpus in nodes) if num_gpus is None else num_gpus,
        num_cores=min(cores for cores, _ in nodes) if num_cores is None else num_cores,
    )


def _nodes(partition: str | None) -> list[tuple[int, int]]:
    """Return the cores and GPUs of each kind of node in a partition; None: the default one."""
    asked = ["--partition", partition] if partition else []
    lines = run_slurm("sinfo", "--noheader", "--exact", "--format=%P|%c|%G", *asked).splitlines()
    found = []
    for name, cores, resources in (line.split("|") for line in lines if line.count("|") == 2):
        if partition or name.endswith("*"):
            gpus = re.findall(r"\bgpu:(?:[^:,(]+:)?(\d+)", resources)  # gpu:8 and gpu:a100:8(S:0-1)
            found.append((int(cores), sum(map(int, gpus))))
    if not found:
        what = f"partition {partition}" if partition else "default partition"
        raise UserError(
            f"Slurm has no {what}; write hydra.launcher.partition=NAME, a name that sinfo shows"
        )
    return found


def ranks_of_a_node(config: Config, node: Hardware, settings: SlurmSettings) -> int:
    """Return how many ranks of a job fit on a node: by its GPUs, or else by its cores."""
    if config.launch.nproc_per_node is not None:
        return config.launch.nproc_per_node
    gpus = 0 if config.backend.device == "cpu" else node.num_gpus
    by_gpus = gpus // mode_needs(config.parallelism).devices_per_rank
    return by_gpus or max(1, node.num_cores // (settings.cpus_per_task or 1))


def job_layout(config: Config, node: Hardware, settings: SlurmSettings) -> NodeLayout:
    """Return how a job is spread over nodes; ``world_size=auto`` takes one whole node.

    Raises:
        UserError: the nodes would not run equally many ranks, or a node has too few cores.
    """
    launch, most = config.launch, ranks_of_a_node(config, node, settings)
    num_ranks = config.world_size
    if num_ranks == AUTO:
        needs = mode_needs(config.parallelism)
        num_ranks = needs.max_ranks or max(needs.min_ranks, most * launch.nnodes)
    num_nodes = launch.nnodes if launch.nnodes > 1 else -(-num_ranks // most)
    if num_ranks % num_nodes:
        below = num_ranks // num_nodes * num_nodes
        raise UserError(
            f"world_size ({num_ranks}) does not divide among {num_nodes} nodes of {most} ranks; "
            f"write {below} or {below + num_nodes}, or give launch.nproc_per_node"
        )
    layout = NodeLayout(num_nodes, num_ranks // num_nodes)
    cores = layout.ranks_per_node * rank_cores(config, node, settings)
    if cores > node.num_cores:
        raise UserError(
            f"{layout.ranks_per_node} ranks on a node take {cores} cores and it has "
            f"{node.num_cores}; write a smaller launch.nproc_per_node or "
            "hydra.launcher.cpus_per_task"
        )
    return layout


def rank_cores(config: Config, node: Hardware, settings: SlurmSettings) -> int:
    """Return the cores of a rank: as asked for, or its share of a node with GPUs, or 1."""
    if settings.cpus_per_task is not None:
        return settings.cpus_per_task
    if node.num_gpus == 0 or config.backend.device == "cpu":
        return 1
    return max(1, node.num_cores // ranks_of_a_node(config, node, settings))


def sbatch_options(
    config: Config, layout: NodeLayout, node: Hardware, settings: SlurmSettings
) -> Options:
    """Return the options of sbatch for a resolved job.

    A job is queued again when it was preempted. It receives SIGUSR1 before its time limit.
    """
    needs, gpus = mode_needs(config.parallelism), 0
    if config.backend.device != "cpu":
        gpus = layout.ranks_per_node * needs.devices_per_rank
        gpus = node.num_gpus if needs.data_parallel else gpus
    options = {
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "time": settings.timeout_min,
        "mem": f"{round(settings.mem_gb * 1024)}M" if settings.mem_gb else None,
        "nodes": layout.num_nodes,
        "ntasks_per_node": layout.ranks_per_node,
        "cpus_per_task": rank_cores(config, node, settings),
        "gpus_per_node": gpus or None,
        "signal": f"USR1@{settings.signal_delay_s}",
        "requeue": True,
        "open_mode": "append",
    }
    more = {key.replace("-", "_"): value for key, value in settings.additional_parameters.items()}
    # By identity: 0 is a value, as of nice.
    return {k: v for k, v in {**options, **more}.items() if v is not None and v is not False}
