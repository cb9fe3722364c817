"""The schema of the config: every plain key with its type, default, meaning and rule. Torch-free.

Each field says what its value must be by itself: see ``fields``. What must hold between the keys is
in ``rules``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_runner.config.fields import Rule, key
from ddp_runner.config.sections import (
    AUTO,
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
# The keys of a group that the runner reads itself, with their kinds, if it is a plain one; the
# others are arguments of its ``_target_``.
RUNNER_KEYS: Mapping[str, Mapping[str, type | None]] = {
    "model": {
        **{"name": None, "requires": None, "loss": None, "num_stages": int, "weights": str},
        # of its modules; see conf/model/gpt.yaml
        **{"channels_last": bool, "meta_init": bool, "blocks": list, "tensor_parallel": dict},
    },
    "dataset": {"requires": None, "shuffle": bool},
    "parallelism": {"requires": None, "needs": None},
    "optimizer": {"name": None, "requires": None},
    "scheduler": {"name": None, "requires": None},
}
LIST_GROUPS = ("metrics", "trackers")  # of which a run takes as many options as it likes

# The rules of keys that only YAMLs have.
GROUP_KEYS: Mapping[str, Rule] = {
    # Numbers of our own classes and torch's schedulers are not negative, but these.
    **dict.fromkeys(("dataset.mean", "scheduler.last_epoch"), Rule()),
    # torch takes a negative one without a word.
    **dict.fromkeys(("optimizer.dampening", "optimizer.ns_steps", "optimizer.t0"), Rule(least=0)),
    "trackers.wandb.mode": Rule(choices=(None, "online", "offline")),
    **dict.fromkeys(
        (
            *("optimizer.weight_decay", "optimizer.momentum", "scheduler.warmup_steps"),
            "dataset.num_workers",
        ),
        Rule(least=0),
    ),
    **dict.fromkeys(
        (
            *("optimizer.lr", "model.num_stages", "dataset.num_samples", "dataset.num_classes"),
            *("dataset.channels", "dataset.height", "dataset.width", "dataset.prefetch_factor"),
            *("dataset.eval_fraction", "parallelism.devices_per_rank"),
            *("parallelism.num_replicas", "parallelism.tensor_parallel_size"),
            *("trackers.mlflow.timeout_s", "trackers.mlflow.wait_s"),
            *("trackers.wandb.timeout_s", "trackers.wandb.wait_s"),
        ),
        Rule(above=0),
    ),
}


def runner_keys(owner: str) -> Mapping[str, type | None]:
    """Return the keys of a group, or of an option such as `metrics.NAME`, that the runner reads."""
    is_option = owner.partition(".")[0] in LIST_GROUPS
    return {"requires": None} if is_option else RUNNER_KEYS.get(owner, {})


def has_own_loop(task: str) -> bool:
    """Return whether a task is a function of the user's own: those have dotted names."""
    return "." in task


def _validate_task(task: str) -> None:
    if task not in TASKS and not has_own_loop(task):
        hint = f"; did you mean {meant}?" if (meant := nearest(task, TASKS)) else ""
        raise UserError(
            f"task ({task}) must be one of {', '.join(TASKS)}, or a function of your own, as "
            f"PACKAGE.MODULE.FUNCTION{hint}"
        )


def _validate_world_size(asked: Any) -> None:
    if asked != AUTO and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise UserError(f"world_size ({asked}) must be a whole number of ranks from 1 up, or auto")


@dataclass(frozen=True)
class ModeNeeds:
    """What a form of parallelism needs: the block `needs` of its YAML."""

    devices_per_rank: int = key(1, "the stages that a replica is cut into", above=0)
    max_ranks: int | None = key(None, "null: any number", above=0)
    min_ranks: int = key(1, "the fewest ranks that it runs on", above=0)
    num_replicas: int = key(1, "each is split over equally many ranks", above=0)
    model_ranks: int | None = key(
        1, "ranks that compute the same samples together; null: all", above=0
    )
    num_servers: int = key(
        0, "ranks that hold parameters and compute no gradients", least=0, most=1
    )
    splits_parameters: bool = key(False, "each rank holds a part of each parameter")
    data_parallel: bool = key(False, "one rank drives all GPUs of its machine")


def mode_needs(mode: Mapping[str, Any]) -> ModeNeeds:
    """Return what the keys of the group `parallelism` need."""
    return ModeNeeds(**mode.get("needs", {}))


def num_shares(mode: Mapping[str, Any], ranks: int) -> int:
    """Return the parts into which the ranks of a mode split a global batch."""
    needs = mode_needs(mode)
    if needs.num_servers > 0 and mode.get("mode") == "async":
        return 1  # each trainer computes whole batches
    return (ranks - needs.num_servers) // (needs.model_ranks or ranks)


@dataclass
class Config:
    """One run. A mapping without a rule is a group whose keys come from its option's YAML."""

    task: str = key(
        "train",
        "train; evaluate, predict or export a run's model, or sample a text from it; check (what "
        "DDP guarantees); collectives (measure them); or your own function",
        check=_validate_task,
    )
    loop: dict[str, Any] = key({}, "arguments of that function")
    user: dict[str, Any] = key({}, "of your own, to name in interpolations")
    world_size: Any = key(
        AUTO,
        "ranks over all machines; auto: visible GPUs, else min(2, cores)",
        kind="whole number or a word",
        check=_validate_world_size,
    )
    seed: int = key(0, "of weights, order of the samples, dropout and augmentation", least=0)
    name: str | None = key(None, "of the run folder; null: model-dataset-parallelism-wsN")
    tags: list[str] = key([], "words to find the run by; they change nothing")
    notes: str | None = key(None, "why the run was made, in words of your own")
    verbose: bool = key(False, "at the start, explain rank, local rank and node rank; also -v")
    data_root: str = key("data", "folder of the datasets; the variable DDP_RUNNER_DATA_ROOT, too")
    resume: str | None = key(
        None,
        "A run folder: continue exactly where it stopped. last: the newest run. auto: the newest "
        "unfinished run of the same config, else a new run, for jobs that a scheduler restarts.",
    )
    allowed_targets: list[str] = key([], "packages of your own that a config may name")
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
    metrics: dict[str, Any] = key({}, "of evaluations: NAME -> its _target_")
    trackers: dict[str, Any] = key({}, "show the run: NAME -> its _target_")


@dataclass(kw_only=True)
class RunConfig(Config):
    """A resolved config: what a run does, with nothing left for the machine to decide.

    It has the keys of ``Config``, with narrower types.
    """

    world_size: int
    batch: ResolvedBatch
