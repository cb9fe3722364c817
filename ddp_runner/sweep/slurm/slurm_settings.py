"""The keys of ``hydra/launcher=slurm``, and the layout of a job on nodes. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_runner.config.fields import KINDS, Rule, validate_value
from ddp_runner.config.schema import Config, mode_needs
from ddp_runner.config.sections import AUTO
from ddp_runner.errors import UserError, in_yaml
from ddp_runner.host.hardware import Hardware
from ddp_runner.sweep.slurm.queue import run_slurm

LOCAL = "ddp_runner.sweep.local.Local"  # _target_ of hydra/launcher=ddp_runner
OURS = "ddp_runner.sweep.slurm.executor.Slurm"  # _target_ of hydra/launcher=slurm
NOT_NEGATIVE = ("gpus_per_node", "max_requeues")
Options = Mapping[str, str | int | bool]  # of sbatch, with underscores in the names
SWEEP_OPTIONS = ("job_name", "array", "output", "error", "chdir")  # the sweep sets these


@dataclass(frozen=True)
class SlurmSettings:
    """The keys; conf/hydra/launcher/slurm.yaml explains them."""

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

    @cached_property
    def node(self) -> Hardware:
        """The hardware of a node, by the keys, else by the smallest node that sinfo reports."""
        num_gpus, num_cores = self.gpus_per_node, self.cpus_per_node
        nodes = _nodes(self.partition) if None in (num_gpus, num_cores) else []
        return Hardware(
            num_gpus=min(gpus for _, gpus in nodes) if num_gpus is None else num_gpus,
            num_cores=min(cores for cores, _ in nodes) if num_cores is None else num_cores,
        )

    def ranks_per_node(self, config: Config) -> int:
        """Return the ranks of a job that fit on a node, by its GPUs, or without GPUs its cores."""
        if config.launch.nproc_per_node is not None:
            return config.launch.nproc_per_node
        gpus = 0 if config.backend.device == "cpu" else self.node.num_gpus
        by_gpus = gpus // mode_needs(config.parallelism).devices_per_rank
        return by_gpus or max(1, self.node.num_cores // (self.cpus_per_task or 1))

    def layout(self, config: Config) -> tuple[int, int]:
        """Return the number of a job's nodes, and of the ranks on each.

        ``world_size=auto`` takes ``launch.nnodes`` whole nodes.

        Raises:
            UserError: the ranks do not divide among the nodes, or a node has too few cores.
        """
        launch, most = config.launch, self.ranks_per_node(config)
        num_ranks = config.world_size
        if num_ranks == AUTO:
            needs = mode_needs(config.parallelism)
            num_ranks = needs.max_ranks or max(needs.min_ranks, most * launch.nnodes)
        num_nodes = launch.nnodes if launch.nnodes > 1 else -(-num_ranks // most)
        if num_ranks % num_nodes:
            below = num_ranks // num_nodes * num_nodes
            raise UserError(
                f"world_size ({num_ranks}) does not divide among {num_nodes} nodes of {most} ranks",
                f"write {below} or {below + num_nodes}, or give launch.nproc_per_node",
            )
        per_node = num_ranks // num_nodes
        cores = per_node * self.rank_cores(config)
        if cores > self.node.num_cores:
            raise UserError(
                f"{per_node} ranks on a node take {cores} cores and a node has "
                f"{self.node.num_cores}",
                "write a smaller launch.nproc_per_node or hydra.launcher.cpus_per_task",
            )
        return num_nodes, per_node

    def rank_cores(self, config: Config) -> int:
        """Return the cores of a rank: cpus_per_task, or its share of a node with GPUs, or 1."""
        if self.cpus_per_task is not None:
            return self.cpus_per_task
        if self.node.num_gpus == 0 or config.backend.device == "cpu":
            return 1
        return max(1, self.node.num_cores // self.ranks_per_node(config))

    def sbatch_options(self, config: Config) -> Options:
        """Return the options of sbatch for a resolved job.

        Slurm requeues a preempted job, and sends SIGUSR1 before the time limit.
        """
        (num_nodes, per_node), needs = self.layout(config), mode_needs(config.parallelism)
        gpus = 0
        if config.backend.device != "cpu":
            gpus = per_node * needs.devices_per_rank
            gpus = self.node.num_gpus if needs.data_parallel else gpus
        options = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "time": self.timeout_min,
            "mem": f"{round(self.mem_gb * 1024)}M" if self.mem_gb else None,
            "nodes": num_nodes,
            "ntasks_per_node": per_node,
            "cpus_per_task": self.rank_cores(config),
            "gpus_per_node": gpus or None,
            "signal": f"USR1@{self.signal_delay_s}",
            "requeue": True,
            "open_mode": "append",
        }
        extra = {key.replace("-", "_"): value for key, value in self.additional_parameters.items()}
        # 0 is a value, for example of nice.
        return {k: v for k, v in {**options, **extra}.items() if v is not None and v is not False}


def slurm_settings(launcher: DictConfig) -> SlurmSettings | None:
    """Return the settings in the node ``hydra.launcher``; None if the jobs run on this machine.

    Raises:
        UserError: a value has the wrong type or range, or the launcher is of another package.
    """
    values: Any = OmegaConf.to_container(launcher, resolve=True)
    target = values.pop("_target_", None)
    if target == LOCAL:
        return None
    if target != OURS:
        raise UserError(
            f"hydra/launcher: {target} is of another package, and a sweep needs "
            "hydra/launcher=ddp_runner or hydra/launcher=slurm",
            "leave hydra/launcher out",
        )
    try:
        merged = OmegaConf.merge(OmegaConf.structured(SlurmSettings), values)
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = str(error.full_key).partition(".")[0].partition("[")[0]
        kinds: dict[str, Any] = {item.name: item.type for item in fields(SlurmSettings)}
        if key not in kinds:
            raise UserError(f"hydra.launcher.{key} is not a key of hydra/launcher=slurm") from None
        kind = KINDS.get(get_args(kinds[key] | None)[0], "a list or mapping, as in its YAML")
        raise UserError(f"hydra.launcher.{key} ({in_yaml(values[key])}) must be {kind}") from None
    assert isinstance(settings, SlurmSettings)
    for key, value in vars(settings).items():
        if type(value) in (int, float):
            rule = Rule(least=0 if key in NOT_NEGATIVE else 1)
            validate_value(f"hydra.launcher.{key}", value, rule)
    for key in settings.additional_parameters:
        if key.replace("-", "_") in SWEEP_OPTIONS:
            raise UserError(
                f"hydra.launcher.additional_parameters.{key} is set by the sweep", "leave it out"
            )
    return settings


def _nodes(partition: str | None) -> list[tuple[int, int]]:
    """Return the cores and GPUs of each kind of node in a partition; None: Slurm's default."""
    options = ["--partition", partition] if partition else []
    lines = run_slurm("sinfo", "--noheader", "--exact", "--format=%P|%c|%G", *options).splitlines()
    nodes = []
    for name, cores, resources in (line.split("|") for line in lines if line.count("|") == 2):
        if partition or name.endswith("*"):
            gpus = re.findall(r"\bgpu:(?:[^:,(]+:)?(\d+)", resources)  # gpu:8 and gpu:a100:8(S:0-1)
            nodes.append((int(cores), sum(map(int, gpus))))
    if not nodes:
        label = f"partition {partition}" if partition else "default partition"
        raise UserError(
            f"Slurm has no {label}", "write hydra.launcher.partition=NAME, with a name from sinfo"
        )
    return nodes
