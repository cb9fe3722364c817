"""The schema of the config: every plain key with its type, default, unit and meaning. Torch-free.

The comments beside or above the fields are printed by --help: see ``keys``. What must hold between
the keys is in ``validate``.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddp_runner.config.inference import InferenceConfig
from ddp_runner.config.launching import LaunchConfig
from ddp_runner.config.measuring import CollectivesConfig
from ddp_runner.config.training import (
    CheckpointConfig,
    EarlyStopConfig,
    EmaConfig,
    ParamsConfig,
    TrainConfig,
)

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel conf/ lies inside the package, in a checkout beside it.
CONFIG_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
# The words for the types of keys, in messages and in --help.
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
# The keys of a group that the runner reads itself; the others are arguments of its ``_target_``.
RUNNER_KEYS: Mapping[str, tuple[str, ...]] = {
    "model": (
        *("name", "loss", "num_stages", "channels_last", "weights"),
        *("meta_init", "blocks", "tensor_parallel"),  # of its modules; see conf/model/gpt.yaml
    ),
    "dataset": ("shuffle",),
    "parallelism": ("needs",),
    "optimizer": ("name",),
    "scheduler": ("name",),
}
LIST_GROUPS = ("metrics", "trackers")  # of which a run takes as many options as it likes
AUTO = "auto"  # of resume: this config's newest unfinished run; of a number: the runner finds it
OF_RANKS = ("world_size", "batch.global_size", "batch.per_rank")  # they follow from the ranks


@dataclass(frozen=True)
class ModeNeeds:
    """What a form of parallelism needs: the block `needs` of its YAML."""

    devices_per_rank: int = 1
    max_ranks: int | None = None  # None: any number
    min_ranks: int = 1
    num_replicas: int = 1  # of which each is split over equally many ranks
    model_ranks: int | None = 1  # ranks that compute the same samples together; None: all
    num_servers: int = 0  # ranks that hold parameters and compute no gradients
    splits_parameters: bool = False  # each rank holds a part of each
    data_parallel: bool = False  # one rank drives all GPUs of its machine


def mode_needs(mode: Mapping[str, Any]) -> ModeNeeds:
    """Return what the keys of the group `parallelism`, which ``values`` validates, need."""
    return ModeNeeds(**mode.get("needs", {}))


def num_shares(mode: Mapping[str, Any], ranks: int) -> int:
    """Return the parts into which the ranks of a mode split a global batch."""
    needs = mode_needs(mode)
    if needs.num_servers > 0 and mode.get("mode") == "async":
        return 1  # each trainer computes whole batches
    return (ranks - needs.num_servers) // (needs.model_ranks or ranks)


@dataclass
class BatchConfig:
    """Set exactly one of global_size and per_rank; the other follows from it."""

    global_size: int | None = None  # samples of one optimizer step, over all ranks: strong scaling
    per_rank: int | None = 100  # samples of one micro-step of one rank: weak scaling
    eval_per_rank: int | None = None  # samples of one evaluation step of one rank; null: per_rank
    # what the loss is divided by: samples, or tokens, which the training step counts
    count: str = "samples"


@dataclass
class Batch(BatchConfig):
    """The batch sizes of a resolved config: both are known."""

    global_size: int
    per_rank: int

    @property
    def eval_size(self) -> int:
        """Samples of one evaluation step of one rank."""
        return self.eval_per_rank or self.per_rank


@dataclass
class BackendConfig:
    """Which library carries the collectives."""

    name: str = "auto"  # auto, gloo, mpi, or the one of the GPUs: nccl, xccl, ...
    timeout_s: float = 300.0  # seconds after which a collective fails the run
    device: str = "auto"  # where the ranks compute: auto, cpu, or GPUs by kind: cuda, xpu, mps, ...


@dataclass
class SweepConfig:
    """How a sweep (-m) runs its jobs. These keys do not change what a job computes."""

    retry: str | None = None  # failed: run the jobs again that failed before
    fail_fast: bool = False  # stop at the first failure
    max_failures: int | None = None  # stop at this many failures; null: run every job
    skip_invalid: bool = False  # skip jobs with an invalid config instead of failing them
    dry_run: bool = False  # list the jobs and what is wrong with them; start none
    parallel_jobs: int = 1  # jobs that run at the same time, each on its own cores and GPUs
    calibrate: bool = False  # first measure all_reduce for each world size and backend
    report: bool = False  # at the end compare the runs, on the terminal and in the folder report
    objective: str | None = None  # the metric that a search (Optuna) optimizes


@dataclass
class Config:
    """One run. A mapping is a group whose keys its option's YAML gives: see RUNNER_KEYS."""

    # train; evaluate, predict or export a run's model, or sample a text from it; check (what DDP
    # guarantees); collectives (measure them); or your own function
    task: str = "train"
    loop: dict[str, Any] = field(default_factory=dict)  # arguments of that function
    user: dict[str, Any] = field(default_factory=dict)  # of your own, to name in interpolations
    world_size: Any = "auto"  # ranks over all machines; auto: visible GPUs, else min(2, cores)
    seed: int = 0  # of the weights, the order of the samples, dropout and augmentation
    # first part of the run folder's name; null: model-dataset-parallelism-wsN
    name: str | None = None
    tags: list[str] = field(default_factory=list)  # words to find the run by; they change nothing
    notes: str | None = None  # why the run was made, in words of your own
    verbose: bool = False  # at the start, explain rank, local rank and node rank; also -v
    data_root: str = "data"  # folder of the datasets; also by the variable DDP_RUNNER_DATA_ROOT
    # A run folder: go on exactly where it stopped. last: the newest run. auto: the newest
    # unfinished run of the same config, else a new run, for jobs that a scheduler starts again.
    resume: str | None = None
    # packages of your own that a config may name
    allowed_targets: list[str] = field(default_factory=list)
    batch: BatchConfig = field(default_factory=BatchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    params: ParamsConfig = field(default_factory=ParamsConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    model: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    parallelism: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)  # of evaluations: NAME -> its _target_
    trackers: dict[str, Any] = field(default_factory=dict)  # show the run: NAME -> its _target_


@dataclass(kw_only=True)
class RunConfig(Config):
    """A resolved config: what a run does, with nothing left for the machine to decide.

    It has the keys of ``Config``, with narrower types.
    """

    world_size: int
    batch: Batch


def config_hash(config: RunConfig) -> str:
    """Return the identity of a resolved config: equal for runs that do the same work."""
    return digest(flatten(config))


def digest(values: Any) -> str:
    """Return a short hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return dotted keys and values, without those that change nothing that a run computes."""
    return {
        key: value
        for key, value in leaves(asdict(config))
        if key not in ("resume", "data_root", "verbose", "tags", "notes", "train.profile")
        and not key.startswith(("launch.", "sweep.", "trackers.", "allowed_targets"))
    }


def work_hash(config: RunConfig) -> str:
    """Return the identity of what a resolved config does, on however many ranks.

    Neither batch size counts, since each follows from the other and the number of ranks. A resumed
    run keeps its own global batch.
    """
    return digest({key: one for key, one in flatten(config).items() if key not in OF_RANKS})


def leaves(
    tree: Mapping[Any, Any], prefix: str = "", *, whole_lists: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested config and their values; items of a list by their number.

    A list of plain values is one value, and so is any list with `whole_lists`.
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.", whole_lists=whole_lists)
        elif not whole_lists and _is_nested(value):
            yield from leaves({str(i): item for i, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value)
