"""The configuration: its schema, its rules, and the derived values every rank agrees on.

Called by ``__main__`` on the composed Hydra config, before torch is imported: a mistake is
answered in one line that names the key, the value and the fix.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_runner.environment import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.hardware import Hardware

TARGET_PREFIXES = ("ddp_runner.", "torch.", "torchvision.", "transformers.")
BACKENDS = ("auto", "gloo", "nccl", "mpi")
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass
class BatchConfig:
    """Exactly one is set by the user; ``resolve`` derives the other."""

    global_size: int | None = None  # samples of one optimizer step, over all ranks: strong scaling
    per_rank: int | None = 100  # samples of one micro-step of one rank: weak scaling
    eval_per_rank: int | None = None  # samples of one evaluation step of one rank; null: per_rank


@dataclass
class TrainConfig:
    """The training loop."""

    epochs: int = 10  # passes over the training set
    max_steps: int | None = None  # optimizer steps; ends the run before `epochs` do
    log_every_steps: int = 10  # optimizer steps between two lines of metrics
    eval_every_epochs: int = 1  # 0: never; else also after the last epoch
    precision: str = "fp32"  # fp32, bf16 (autocast), fp16 (autocast, scaled loss, CUDA only)
    grad_accum_steps: int = 1  # micro-steps of one optimizer step
    clip_norm: float | None = None  # largest L2 norm of the whole gradient; null: no clipping
    compile: bool = False  # torch.compile the model, inside its parallel wrapper
    deterministic: bool = False  # refuse operations that have no deterministic form
    num_threads: int | None = None  # intra-op CPU threads of a rank; null: cores // local ranks


@dataclass
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every_epochs: int | None = 1  # null: not by epochs
    every_steps: int | None = None  # optimizer steps; null: not by steps
    keep: int = 3  # newest checkpoints that stay on disk
    monitor: str | None = None  # a metric, such as eval/accuracy: its best checkpoint stays as well
    mode: str = "max"  # max or min: which end of `monitor` is the best


@dataclass
class LaunchSettings:
    """How the gang of ranks starts. Ignored under torchrun, which has its own flags."""

    nnodes: int = 1  # machines
    nproc_per_node: int | None = None  # ranks a machine; null: world_size / nnodes
    node_rank: int | None = None  # this machine's place, for static rendezvous; null: c10d decides
    rdzv_endpoint: str | None = None  # HOST:PORT of the rendezvous; needed when nnodes > 1
    rdzv_id: str = "ddp_runner"  # the same on every machine of one run
    max_restarts: int = 0  # restarts of the whole gang, each from the last checkpoint
    init_method: str | None = None  # tcp://HOST:PORT or file:///PATH in place of the rendezvous's
    shutdown_timeout_s: float = 30.0  # from the first Ctrl-C or SIGTERM to SIGKILL


@dataclass
class BackendConfig:
    """Which library carries the collectives."""

    name: str = "auto"  # auto, gloo, nccl, mpi
    timeout_s: float = 300.0  # a collective that takes longer fails the run
    device: str = "auto"  # auto, cpu, cuda: where the ranks compute


@dataclass
class Config:
    """One run. The mappings are free-form groups: ``_target_`` and its keyword arguments."""

    task: str = "train"
    world_size: Any = "auto"  # ranks over all machines; auto: visible GPUs, else min(2, cores)
    seed: int = 0
    name: str | None = None  # the run folder's first part; null: model-dataset-parallelism-wsN
    data_root: str = "data"
    resume: str | None = None  # a run folder: go on exactly where it stopped
    allowed_targets: list[str] = field(default_factory=list)  # more prefixes for `_target_`
    batch: BatchConfig = field(default_factory=BatchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    backend: BackendConfig = field(default_factory=BackendConfig)
    model: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    parallelism: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)


def resolve(
    config: Config,
    *,
    hardware: Hardware,
    chosen: Collection[str] = (),
    env: DistEnv | None = None,
) -> tuple[Config, list[str]]:
    """Return the config with every derived value filled in, and the warnings to print once.

    Args:
        config: as composed.
        hardware: what this machine has.
        chosen: the keys given on the command line; they win over a group's own choice when two
            keys exclude each other.
        env: this rank's facts where the ranks run already (torchrun, srun, mpirun).

    Raises:
        UserError: a rule is broken.
    """
    check_targets(config)
    _check_values(config)
    ranks = _world_size(config, hardware, env.world_size if env else None)
    nproc = env.local_world_size if env else _nproc_per_node(config, ranks)
    backend = _backend(config, hardware, ranks, nproc)
    _check_mode(config, ranks, backend)
    batch = _batch(config, ranks, chosen)
    warnings = []
    if backend.device == "cpu" and nproc > hardware.num_cores:
        warnings.append(
            f"{nproc} ranks on {hardware.num_cores} cores: they take turns, expect no speedup"
        )
    if config.parallelism.get("data_parallel") and hardware.num_gpus < 2:
        warnings.append("parallelism=dp has fewer than two GPUs: it runs as one device")
    return replace(config, world_size=ranks, backend=backend, batch=batch), warnings


def config_hash(config: Config) -> str:
    """Return the identity of a resolved config: equal for runs that do the same work."""
    return hashlib.sha256(json.dumps(flatten(config), sort_keys=True).encode()).hexdigest()[:16]


def flatten(config: Config) -> dict[str, Any]:
    """Return the config as dotted keys and plain values, without the keys that only say where."""
    return {
        key: value for key, value in _leaves(asdict(config)) if key not in ("resume", "data_root")
    }


def check_targets(config: Config) -> None:
    """Refuse a ``_target_`` (or a loss) outside the allowed prefixes: it would run its code."""
    allowed = (*TARGET_PREFIXES, *(f"{prefix.rstrip('.')}." for prefix in config.allowed_targets))
    for key, value in _leaves(asdict(config)):
        is_target = key.endswith("_target_") or key == "model.loss"
        if is_target and not str(value).startswith(allowed):
            raise UserError(
                f"{key} ({value}) is not under an allowed prefix ({', '.join(allowed)}); "
                f"if you trust it, add allowed_targets=[{str(value).split('.')[0]}]"
            )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from _leaves({str(i): item for i, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def _check_values(config: Config) -> None:
    train, checkpoint, launch = config.train, config.checkpoint, config.launch
    positive = {
        "train.epochs": train.epochs,
        "train.max_steps": train.max_steps,
        "train.log_every_steps": train.log_every_steps,
        "train.grad_accum_steps": train.grad_accum_steps,
        "train.clip_norm": train.clip_norm,
        "train.num_threads": train.num_threads,
        "batch.global_size": config.batch.global_size,
        "batch.per_rank": config.batch.per_rank,
        "batch.eval_per_rank": config.batch.eval_per_rank,
        "checkpoint.every_epochs": checkpoint.every_epochs,
        "checkpoint.every_steps": checkpoint.every_steps,
        "checkpoint.keep": checkpoint.keep,
        "launch.nnodes": launch.nnodes,
        "launch.nproc_per_node": launch.nproc_per_node,
        "launch.shutdown_timeout_s": launch.shutdown_timeout_s,
        "backend.timeout_s": config.backend.timeout_s,
        "optimizer.lr": _number("optimizer.lr", config.optimizer.get("lr", 1.0)),
        "dataset.num_samples": _number("dataset.num_samples", config.dataset.get("num_samples", 1)),
    }
    for key, value in positive.items():
        if value is not None and not value > 0:
            raise UserError(f"{key} ({value}) must be greater than 0")
    not_negative = {
        "seed": config.seed,
        "train.eval_every_epochs": train.eval_every_epochs,
        "launch.max_restarts": launch.max_restarts,
        "optimizer.weight_decay": _number(
            "optimizer.weight_decay", config.optimizer.get("weight_decay", 0.0)
        ),
        "optimizer.momentum": _number("optimizer.momentum", config.optimizer.get("momentum", 0.0)),
    }
    for key, value in not_negative.items():
        if value < 0:
            raise UserError(f"{key} ({value}) must be 0 or greater")
    for key, value, options in (
        ("task", config.task, ("train",)),
        ("train.precision", train.precision, PRECISIONS),
        ("backend.name", config.backend.name, BACKENDS),
        ("backend.device", config.backend.device, ("auto", "cpu", "cuda")),
        ("checkpoint.mode", checkpoint.mode, ("max", "min")),
    ):
        if value not in options:
            raise UserError(f"{key} ({value}) must be one of {', '.join(options)}")
    if config.data_root != "data" and not Path(config.data_root).is_dir():
        raise UserError(
            f"data_root ({config.data_root}) is not a folder; give one that holds the datasets, "
            "or dataset=digits, which needs none"
        )


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{key} ({value}) must be a number")
    return value


def _world_size(config: Config, hardware: Hardware, running: int | None) -> int:
    asked, launch = config.world_size, config.launch
    if asked != "auto" and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise UserError(f"world_size ({asked}) must be a whole number of ranks from 1 up, or auto")
    if running is not None:
        if asked not in ("auto", running):
            raise UserError(
                f"world_size ({asked}) differs from the {running} ranks that were launched; "
                "leave it out, or launch as many"
            )
        return running
    if asked != "auto":
        return int(asked)
    if launch.nproc_per_node is not None:
        return launch.nproc_per_node * launch.nnodes
    if config.parallelism.get("max_ranks"):
        return int(config.parallelism["max_ranks"])
    gpus = 0 if config.backend.device == "cpu" else hardware.num_gpus
    per_node = gpus // config.parallelism.get("devices_per_rank", 1)
    return (per_node or min(2, hardware.num_cores)) * launch.nnodes


def _nproc_per_node(config: Config, ranks: int) -> int:
    launch = config.launch
    if launch.nnodes > 1 and launch.rdzv_endpoint is None:
        raise UserError(
            f"launch.nnodes ({launch.nnodes}) needs launch.rdzv_endpoint=HOST:PORT, "
            "the same on every machine"
        )
    nproc = launch.nproc_per_node or ranks // launch.nnodes
    if nproc * launch.nnodes != ranks:
        raise UserError(
            f"launch.nnodes ({launch.nnodes}) times launch.nproc_per_node ({nproc}) is not "
            f"world_size ({ranks}); leave world_size out, or make them agree"
        )
    return nproc


def _backend(config: Config, hardware: Hardware, ranks: int, nproc: int) -> BackendConfig:
    backend, gpus = config.backend, hardware.num_gpus
    needed = nproc * config.parallelism.get("devices_per_rank", 1)
    if backend.name == "nccl" and gpus == 0:
        raise UserError(
            "backend=nccl needs CUDA devices and this machine shows none; write backend=gloo"
        )
    wants_cuda = backend.device == "cuda" or backend.name == "nccl"
    if wants_cuda and backend.device == "cpu":
        raise UserError("backend=nccl moves only CUDA tensors; backend.device=cpu needs gloo")
    if wants_cuda and needed > gpus:
        raise UserError(
            f"{nproc} ranks of {needed // nproc} devices need {needed} GPUs and this machine shows "
            f"{gpus}; write world_size={max(1, gpus * nproc // needed)}, or backend=gloo "
            "backend.device=cpu"
        )
    device = backend.device
    if device == "auto":
        device = "cuda" if gpus and needed <= gpus and backend.name != "mpi" else "cpu"
    name = backend.name
    if name == "auto":
        name = "nccl" if device == "cuda" else "gloo"
    if config.train.precision == "fp16" and device == "cpu":
        raise UserError("train.precision=fp16 needs a CUDA device; on a CPU write bf16")
    return replace(backend, name=name, device=device)


def _check_mode(config: Config, ranks: int, backend: BackendConfig) -> None:
    mode, name = config.parallelism, config.parallelism.get("name")
    if mode.get("max_ranks") and ranks > mode["max_ranks"]:
        raise UserError(
            f"parallelism={name} runs {mode['max_ranks']} process, world_size is {ranks}; "
            "leave world_size out, or write parallelism=ddp"
        )
    stages, wanted = config.model.get("num_stages", 1), mode.get("devices_per_rank", 1)
    if stages > wanted:
        raise UserError(
            f"model={config.model.get('name')} is cut into {stages} stages and parallelism={name} "
            f"gives a replica {wanted} device; write parallelism=ddp_mp"
        )
    if stages < wanted:
        raise UserError(
            f"parallelism={name} spreads a replica over {wanted} devices and "
            f"model={config.model.get('name')} has {stages} stage; "
            "take a model cut in two (toy_mp, convnet_mp, mnist_net_mp)"
        )
    if mode.get("static_graph") and config.train.grad_accum_steps > 1:
        raise UserError(
            "parallelism.static_graph=true cannot skip gradient syncs, which "
            f"train.grad_accum_steps ({config.train.grad_accum_steps}) does; turn one of them off"
        )
    if mode.get("sync_batchnorm") and backend.device == "cpu":
        raise UserError("parallelism.sync_batchnorm=true exists on CUDA only; set it to false")


def _batch(config: Config, ranks: int, chosen: Collection[str]) -> BatchConfig:
    total, per_rank = config.batch.global_size, config.batch.per_rank
    if total is not None and per_rank is not None:
        # A default or an experiment's choice gives way to the key that the user wrote.
        explicit = {"batch.global_size", "batch.per_rank"} & set(chosen)
        if len(explicit) == 2:
            raise UserError(
                f"batch.global_size ({total}) and batch.per_rank ({per_rank}) exclude each other; "
                "give one, the other follows"
            )
        if explicit == {"batch.per_rank"}:
            total = None
        else:
            per_rank = None
    parts = ranks * config.train.grad_accum_steps
    if total is None:
        if per_rank is None:
            raise UserError("batch.global_size and batch.per_rank are both null; give one of them")
        return replace(config.batch, global_size=per_rank * parts, per_rank=per_rank)
    if total % parts:
        below, above = total // parts * parts, (total // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        divisor = f"world_size ({ranks})"
        if config.train.grad_accum_steps > 1:
            divisor += f" x train.grad_accum_steps ({config.train.grad_accum_steps})"
        raise UserError(f"batch.global_size ({total}) is not divisible by {divisor}; use {nearest}")
    return replace(config.batch, global_size=total, per_rank=total // parts)
