"""The schema of the config: each plain key with type, default, meaning and rule. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_runner.config.fields import Rule, key
from ddp_runner.config.planned_gpus import PlanConfig
from ddp_runner.config.sections import (
    AUTO,
    PLAN,
    TASKS,
    BackendConfig,
    CollectivesConfig,
    InferenceConfig,
    LaunchConfig,
    SweepConfig,
)
from ddp_runner.config.training import (
    BatchConfig,
    CheckpointConfig,
    EarlyStopConfig,
    EmaConfig,
    ParamsConfig,
    ResolvedBatch,
    TrainConfig,
)
from ddp_runner.errors import UserError, nearest

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel conf/ lies inside the package, in a checkout beside it.
CONFIG_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
# The keys of a group that the runner reads itself, with their plain types; the other keys are
# arguments of its ``_target_``.
RUNNER_KEYS: Mapping[str, Mapping[str, type | None]] = {
    "model": {
        **{"name": None, "requires": None, "loss": None, "num_stages": int, "weights": str},
        "weight_names": dict,
        # conf/model/gpt.yaml explains these
        **{"channels_last": bool, "meta_init": bool, "blocks": list, "tensor_parallel": dict},
        "pipeline": dict,
    },
    "dataset": {"requires": None, "shuffle": bool},
    "parallelism": {"requires": None, "needs": None},
    "optimizer": {"name": None, "requires": None},
    "scheduler": {"name": None, "requires": None},
}
LIST_GROUPS = ("metrics", "trackers")  # groups with any number of options
# A scheduler's names for the optimizer steps of the whole run, in torch, Hugging Face and others.
TOTAL_STEPS = ("total_steps", "T_max", "num_training_steps", "num_steps", "max_steps", "max_iters")


# The rules of keys in an option's YAML, which are not in the schema. Without a rule, numbers of our
# own classes and of torch's schedulers must be 0 or greater.
GROUP_KEYS: Mapping[str, Rule] = {
    **dict.fromkeys(("dataset.mean", "scheduler.last_epoch"), Rule()),  # these may be negative
    "parallelism.schedule": Rule(choices=("1f1b", "gpipe", "interleaved")),
    "dataset.eval_fraction": Rule(above=0, below=1),
    "trackers.wandb.mode": Rule(choices=(None, "online", "offline")),
    **dict.fromkeys(
        (
            # torch silently accepts negative values of these three
            *("optimizer.dampening", "optimizer.ns_steps", "optimizer.t0"),
            *("optimizer.weight_decay", "optimizer.momentum", "scheduler.warmup_steps"),
            "dataset.num_workers",
        ),
        Rule(least=0),
    ),
    **dict.fromkeys(
        (
            *("optimizer.lr", "model.num_stages", "dataset.num_samples", "dataset.num_classes"),
            *("dataset.channels", "dataset.height", "dataset.width", "dataset.prefetch_factor"),
            *("parallelism.devices_per_rank", "parallelism.num_replicas"),
            *("parallelism.tensor_parallel_size", "scheduler.every_epochs"),
            *("parallelism.pipeline_size", "parallelism.stages_per_rank"),
            *("trackers.mlflow.timeout_s", "trackers.mlflow.wait_s"),
            *("trackers.wandb.timeout_s", "trackers.wandb.wait_s"),
        ),
        Rule(above=0),
    ),
}


def runner_keys(owner: str) -> Mapping[str, type | None]:
    """Return the keys that the runner reads of a group or an option such as `metrics.NAME`."""
    is_option = owner.partition(".")[0] in LIST_GROUPS
    return {"requires": None} if is_option else RUNNER_KEYS.get(owner, {})


def has_own_loop(task: str) -> bool:
    """Return whether a task is a function of the user's own: only these have dotted names."""
    return "." in task


def _validate_task(task: str) -> None:
    if task not in TASKS and not has_own_loop(task):
        hint = f"; did you mean {match}?" if (match := nearest(task, TASKS)) else ""
        raise UserError(
            f"task ({task}) must be one of {', '.join(TASKS)}, or a function of your own, as "
            f"PACKAGE.MODULE.FUNCTION{hint}"
        )


def _validate_world_size(value: Any) -> None:
    if value != AUTO and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UserError(f"world_size ({value}) must be a whole number of ranks from 1 up, or auto")


@dataclass(frozen=True)
class ModeNeeds:
    """The needs of a mode of parallelism: the block `needs` of its YAML."""

    devices_per_rank: int = key(1, "stages of a replica", above=0)
    max_ranks: int | None = key(None, "null: any number", above=0)
    min_ranks: int = key(1, "fewest ranks", above=0)
    num_replicas: int = key(1, "replicas, each split over the same number of ranks", above=0)
    model_ranks: int | None = key(1, "ranks that compute the same samples; null: all", above=0)
    num_servers: int = key(0, "ranks that hold parameters and do not train", least=0, most=1)
    splits_parameters: bool = key(False, "each rank holds a part of each parameter")
    data_parallel: bool = key(False, "one rank drives all GPUs of its machine")


def mode_needs(mode: Mapping[str, Any]) -> ModeNeeds:
    """Return the needs of a mode, given the keys of the group `parallelism`."""
    return ModeNeeds(**mode.get("needs", {}))


def num_shares(config: "Config", ranks: int) -> int:
    """Return the number of parts into which the ranks of a config's mode split a global batch."""
    if config.batch.virtual_ranks is not None:
        return config.batch.virtual_ranks
    mode, needs = config.parallelism, mode_needs(config.parallelism)
    if needs.num_servers > 0 and mode.get("mode") == "async":
        return 1  # each trainer computes whole batches
    return (ranks - needs.num_servers) // (needs.model_ranks or ranks)


@dataclass
class Config:
    """One run. A mapping without a rule is a group: its option's YAML defines the keys."""

    task: str = key(
        "train",
        "train; evaluate, predict or export a run's model, or sample a text from it; check (the "
        "guarantees of DDP); collectives (measure them); plan (what a rank needs and costs at "
        "any world size); or a function of your own",
        validate=_validate_task,
    )
    loop: dict[str, Any] = key({}, "arguments of your own function in task")
    user: dict[str, Any] = key({}, "your own keys, for interpolations")
    world_size: Any = key(
        AUTO,
        "ranks over all machines; auto: visible GPUs, else min(2, cores)",
        kind="whole number or a word",
        validate=_validate_world_size,
    )
    seed: int = key(0, "decides weights, order of samples, dropout, augmentation", least=0)
    name: str | None = key(None, "the run folder's name; null: model-dataset-parallelism-wsN")
    tags: list[str] = key([], "labels to find the run; they do not change it")
    notes: str | None = key(None, "what the run is for, in your words")
    verbose: bool = key(False, "at the start, explain rank, local rank and node rank; also -v")
    data_root: str = key("data", "folder of the datasets; default: DDP_RUNNER_DATA_ROOT")
    resume: str | None = key(
        None,
        "a run folder: continue exactly where it stopped; last: the newest run; auto, for jobs "
        "that a scheduler restarts: the newest unfinished run of the same config, else a new run",
    )
    allowed_targets: list[str] = key([], "your own packages whose code a config may name")
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
    plan: PlanConfig = field(default_factory=PlanConfig)
    model: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    parallelism: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = key({}, "metrics of evaluations: NAME -> its _target_")
    trackers: dict[str, Any] = key({}, "services that show the run: NAME -> its _target_")


@dataclass(kw_only=True)
class RunConfig(Config):
    """A resolved config: no value is left for the machine to decide."""

    world_size: int
    batch: ResolvedBatch

    @property
    def num_processes(self) -> int:
        """The ranks that run; a plan has the ranks of another run, and one process."""
        return 1 if self.task == PLAN else self.world_size
