"""The rules between the keys of a config. Torch-free: an invalid config is reported at once.

Each function raises a UserError for the first broken rule. Rules for single values are in
``validate``; rules for a task or a mode of parallelism are in ``task_rules`` and ``modes``.
"""

import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ddp_runner.config.modes import validate_clashes, validate_mode
from ddp_runner.config.monitors import validate_monitors
from ddp_runner.config.schema import Config, RunConfig, has_own_loop, num_shares
from ddp_runner.config.sections import INFERENCE, SAMPLE
from ddp_runner.config.task_rules import validate_task
from ddp_runner.config.training import traced_steps
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError

OFFLINE = "ddp_runner.data.sources.offline."  # generated and bundled datasets
# W&B limits the length. Names in MLflow have no empty part, and its own tags have these prefixes.
TAG = re.compile(r"(?!(?:mlflow|ddp_runner|version)\.)[\w:-][\w .:-]{0,63}")


def validate_config(config: Config, *, chosen: Collection[str]) -> None:
    """Reject keys that do not fit each other, on any number of ranks.

    `chosen` holds the keys given on the command line.
    """
    if config.task != SAMPLE and config.data_root != "data" and not Path(config.data_root).is_dir():
        raise UserError(
            f"data_root ({config.data_root}) is not a folder",
            "give the folder of the datasets, or dataset=digits, which is bundled",
        )
    if config.resume is not None and "model.weights" in chosen:
        raise UserError(
            f"resume={config.resume} continues with that run's weights",
            "leave model.weights out, or start a new run without resume",
        )
    if odd := [tag for tag in config.tags if not TAG.fullmatch(tag)]:
        raise UserError(
            f"tags ({odd[0]}): a tag is up to 64 letters, digits and any of _ - : . and spaces, "
            "and must not begin with mlflow., ddp_runner. or version",
            "write tags=[baseline,lr-study]",
        )
    validate_task(config, chosen=chosen)
    validate_monitors(config)
    if not has_own_loop(config.task):
        _validate_optimizing(config)
        _validate_model(config)
    _validate_dataset(config.dataset)
    validate_clashes(config)


def validate_ranks(config: Config, env: DistEnv | None) -> None:
    """Reject keys that do not fit the resolved number of ranks and backend.

    `env` holds this rank's facts if the ranks run already.
    """
    if config.task == "collectives" and config.world_size < 2:
        raise UserError(
            "task=collectives measures messages between ranks and world_size is "
            f"{config.world_size}",
            "write world_size=2 or more",
        )
    _validate_init_method(config, env)
    validate_mode(config)
    # A rank validates the other datasets once it knows their samples.
    name, samples = config.dataset.get("name"), config.dataset.get("num_samples")
    is_offline = config.dataset["_target_"].startswith(OFFLINE)
    if is_offline and config.task in ("train", "check") and isinstance(samples, int):
        ranks = num_shares(config, config.world_size)
        validate_num_samples(name, samples, ranks=ranks, virtual=config.batch.virtual_ranks)


def validate_num_samples(
    name: str | None, count: int, *, ranks: int, virtual: int | None = None
) -> None:
    """Reject a dataset with fewer samples than ranks; `virtual` is batch.virtual_ranks."""
    if count < ranks:
        key, most = "world_size", count
        if virtual is not None:
            key, most = "batch.virtual_ranks", 2 ** (count.bit_length() - 1)
        raise UserError(
            f"dataset={name} has {count} training samples and {key} is {ranks}",
            f"use {key}={most} or less",
        )


def validate_warmup(warmup: int, *, total_steps: int) -> None:
    """Reject a warm-up that does not fit in the schedule."""
    if not 0 <= warmup <= total_steps:
        raise UserError(
            f"scheduler.warmup_steps ({warmup}) must be from 0 to the total steps ({total_steps})",
            "use fewer warm-up steps, or more total steps",
        )


def validate_steps(config: RunConfig) -> None:
    """Reject a warm-up or a profile beyond the end of a run with a resolved batch."""
    warmup, steps = config.scheduler.get("warmup_steps"), known_steps(config)
    if steps is None or config.task in INFERENCE:
        return
    if isinstance(warmup, int):
        scheduled = config.scheduler.get("total_steps")  # may be more or less than the run's
        validate_warmup(warmup, total_steps=scheduled if isinstance(scheduled, int) else steps)
    profile = config.train.profile
    if profile is None or config.task != "train":
        return
    if (last := traced_steps(profile)[-1]) > steps:
        raise UserError(
            f"train.profile={profile} traces steps up to {last}, and the run has {steps}",
            "train longer, or name earlier steps: train.profile=FIRST-LAST",
        )


def known_steps(config: RunConfig) -> int | None:
    """Return the optimizer steps of a run; None if the number of samples is not known."""
    steps, samples = config.train.max_steps, config.dataset.get("num_samples")
    if steps is None and isinstance(samples, int):
        steps = config.train.epochs * math.ceil(samples / config.batch.global_size)
    return steps


def _validate_optimizing(config: Config) -> None:
    """Reject keys of the optimizer and of clipping that do not fit each other.

    A rank validates the rules about the parameters and the optimizer's class.
    """
    train, optimizer = config.train, config.optimizer
    if optimizer["_target_"] == "torch.optim.LBFGS":
        raise UserError(
            f"optimizer={optimizer.get('name')} (torch.optim.LBFGS) computes the loss several "
            "times in a step, and the training loop computes it once",
            "write your own loop, as in docs/your_own_loop.md#lbfgs, or optimizer=adamw",
        )
    if train.clip_norm is not None and train.clip_value is not None:
        raise UserError(
            f"train.clip_norm ({train.clip_norm:g}) and train.clip_value ({train.clip_value:g}) "
            "exclude each other",
            "write train.clip_norm=null or train.clip_value=null",
        )
    for index, group in enumerate(config.params.groups):
        if not isinstance(group.get("match"), str) or "params" in group:
            raise UserError(
                f"params.groups.{index} ({group}) must have `match`, a pattern of parameter names, "
                "and keys of the optimizer",
                "write params.groups=[{match:head.*,lr:0.01}]",
            )


def _validate_model(config: Config) -> None:
    """Reject a model with other channels, fewer classes or other tokens than the dataset."""
    model, dataset = config.model, config.dataset
    in_channels, channels = model.get("in_channels"), dataset.get("channels")
    if None not in (in_channels, channels) and in_channels != channels:
        raise UserError(
            f"model.in_channels ({in_channels}) differs from dataset.channels ({channels})",
            "leave it out: it follows the dataset",
        )
    outputs, classes = model.get("num_classes"), dataset.get("num_classes")
    if isinstance(outputs, int) and isinstance(classes, int) and outputs < classes:
        raise UserError(
            f"model.num_classes ({outputs}) is less than dataset.num_classes ({classes})",
            "leave it out: it follows the dataset",
        )
    pretrained = model.get("pretrained")
    if pretrained is not None and dataset.get("tokenizer", "") is None:
        raise UserError(
            f"model.pretrained ({pretrained}) knows only its own tokens",
            "leave out dataset.tokenizer, which follows it, or name its folder",
        )


def _validate_dataset(dataset: Mapping[str, Any]) -> None:
    """Reject keys of a dataset that exclude each other."""
    changes = dataset.get("augmentation")
    if changes is not None and not (isinstance(changes, Mapping) and "_target_" in changes):
        raise UserError(
            f"dataset.augmentation ({changes}) must be a mapping with a _target_",
            "write dataset.augmentation=null, or dataset.augmentation.KEY=VALUE",
        )
    if not dataset.keys() >= {"prepare", "shuffle_buffer"}:
        return  # neither a TorchDataset nor a subclass
    channels, mean = dataset.get("channels"), dataset.get("mean")
    for key in ("mean", "std"):
        value = dataset.get(key)
        if isinstance(value, list) and len(value) != (channels or len(value)):
            raise UserError(
                f"dataset.{key} ({value}) must be one number, or a number for each of the "
                f"dataset.channels ({channels})"
            )
    if changes is not None and mean is None:
        raise UserError(
            f"dataset.augmentation ({changes['_target_']}) changes pictures that dataset.mean and "
            "dataset.std normalise",
            "write dataset.mean=0 dataset.std=1",
        )
    fraction, folder = dataset.get("eval_fraction"), dataset.get("folder")
    if fraction is not None and dataset.get("eval") is not None:
        raise UserError(
            f"dataset.eval_fraction ({fraction}) splits dataset.train, but dataset.eval is set",
            "write dataset.eval=null, or leave the fraction out",
        )
    if dataset.get("prepare") and folder is None:
        raise UserError(
            "dataset.prepare=true needs dataset.folder to notice changed files",
            "name the folder of the samples under data_root",
        )


def validate_trackers(config: Config) -> None:
    """Reject MLflow without a server: its own default needs the whole package, with SQLAlchemy."""
    for name, keys in config.trackers.items():
        uri = keys.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or ""
        is_mlflow = keys["_target_"] == "ddp_runner.tracking.trackers.mlflow.MLflow"
        if is_mlflow and "://" not in uri and uri != "databricks":  # a password: do not print it
            raise UserError(
                f"trackers.{name}.tracking_uri, or else the variable MLFLOW_TRACKING_URI, "
                "must name a server",
                f"write trackers.{name}.tracking_uri=http://HOST:PORT",
            )


def _validate_init_method(config: Config, env: DistEnv | None) -> None:
    """Reject an address that some machines, or the ranks after a restart, could not use."""
    method, launch = config.launch.init_method, config.launch
    if method is None:
        return
    # One launcher alone may use file://NAME, which is in its own temporary folder.
    is_shared = env is not None or launch.nnodes > 1
    if not re.match(rf"tcp://.+:\d+$|file://{'/' if is_shared else ''}", method):
        raise UserError(
            f"launch.init_method ({method}) must be tcp://HOST:PORT, or file:///PATH in a folder "
            "that all machines share"
        )
    if method.startswith("file:") and launch.nnodes > 1 and launch.max_restarts:
        raise UserError(
            f"launch.init_method ({method}) works for one start and launch.max_restarts is "
            f"{launch.max_restarts}",
            "leave init_method out: launch.rdzv_endpoint is enough",
        )
