"""The configuration's schema: every plain key with its type, default, unit and meaning.

What must hold between the keys is in ``rules``. Torch-free.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel conf/ lies inside the package, in a checkout beside it.
CONFIG_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
OF_RANKS = ("world_size", "batch.global_size", "batch.per_rank")  # what follows from the ranks


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
    max_steps: int | None = None  # optimizer steps of the whole run; null: `epochs` decide
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
    load_best: bool = False  # after the last step load the best one and evaluate it once more


@dataclass
class LaunchConfig:
    """How the gang of ranks starts. Ignored under torchrun, which has its own flags."""

    nnodes: int = 1  # machines
    nproc_per_node: int | None = None  # ranks a machine; null: world_size / nnodes
    node_rank: int | None = None  # this machine's place, for static rendezvous; null: c10d decides
    rdzv_endpoint: str | None = None  # HOST:PORT of the rendezvous; needed when nnodes > 1
    rdzv_id: str = "ddp_runner"  # the same on every machine of one run
    max_restarts: int = 0  # restarts of all ranks, each from the last checkpoint
    # tcp://HOST:PORT or file:///PATH in place of the rendezvous's; file://NAME: in the run folder.
    # Of the present command alone: never taken from a run that is resumed. torchrun has its own.
    init_method: str | None = None
    # From the first Ctrl-C or SIGTERM to SIGKILL; ten times as long while a checkpoint is written.
    shutdown_timeout_s: float = 30.0


@dataclass
class BackendConfig:
    """Which library carries the collectives."""

    name: str = "auto"  # auto, gloo, nccl, mpi
    timeout_s: float = 300.0  # a collective that takes longer fails the run
    device: str = "auto"  # auto, cpu, cuda: where the ranks compute


@dataclass
class CollectivesConfig:
    """What `task=collectives` measures."""

    ops: list[str] | None = None  # broadcast, all_reduce, send_recv, …; null: all there are
    reduce_ops: list[str] | None = None  # null: those of sum, mean, max that the backend has
    dtypes: list[str] = field(default_factory=lambda: ["float32"])  # of the messages
    min_bytes: int = 1024  # smallest message: the whole of it, over all ranks
    max_bytes: int = 64 * 2**20  # largest message, in bytes; always measured
    size_factor: int = 16  # from one size to the next
    warmup_steps: int = 2  # calls of each size that are not timed
    steps: int = 10  # timed calls of each size


@dataclass
class SweepConfig:
    """What a sweep (-m) does about its jobs; no part of any job's identity."""

    retry: str | None = None  # failed: run those again that failed when the sweep was last started
    fail_fast: bool = False  # stop at the first failure
    max_failures: int | None = None  # stop at so many failures; null: run every job
    skip_invalid: bool = False  # leave out jobs that break a rule, in place of failing them
    parallel_jobs: int = 1  # jobs side by side, each on cores and GPUs of its own
    calibrate: bool = False  # first measure all_reduce for each world size and backend of the jobs
    report: bool = False  # at the end compare the runs, also in the sweep's folder report
    objective: str | None = None  # the metric that a sweeper which searches (Optuna) looks at


@dataclass
class Config:
    """One run. The mappings are free-form groups: ``_target_`` and its keyword arguments."""

    task: str = "train"
    world_size: Any = "auto"  # ranks over all machines; auto: visible GPUs, else min(2, cores)
    seed: int = 0
    name: str | None = None  # the run folder's first part; null: model-dataset-parallelism-wsN
    verbose: bool = False  # at the start, also what rank, local rank and node rank are; -v
    data_root: str = "data"
    # A run folder: go on exactly where it stopped. last: the newest run. auto: the newest
    # unfinished run of this very config, else a new one: for jobs that are queued again.
    resume: str | None = None
    allowed_targets: list[str] = field(default_factory=list)  # your own packages
    batch: BatchConfig = field(default_factory=BatchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    model: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    parallelism: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)


def config_hash(config: Config) -> str:
    """Return the identity of a resolved config: equal for runs that do the same work."""
    return digest(flatten(config))


def digest(values: Mapping[str, Any]) -> str:
    """Return a short hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def flatten(config: Config) -> dict[str, Any]:
    """Return dotted keys and values, without those that only say where and how a gang starts."""
    return {
        key: value
        for key, value in leaves(asdict(config))
        if key not in ("resume", "data_root", "verbose")
        and not key.startswith(("launch.", "sweep."))
    }


def work_hash(config: Config) -> str:
    """Return the identity of what a resolved config does, on however many ranks.

    Of the two batch sizes one follows from the other and the number of ranks, so that neither
    counts; a run that goes on keeps its own global batch.
    """
    return digest({key: one for key, one in flatten(config).items() if key not in OF_RANKS})


def leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested config and their values; items of a list by their number.

    A list of plain values is one value.
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
            yield from leaves({str(i): item for i, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value
