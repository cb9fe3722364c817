"""Validates that a checkpoint belongs to the run: this program, model, order and data."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.config.schema import RunConfig, leaves
from ddp_runner.data.batches import ORDER_VERSION
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.streams import num_samples
from ddp_runner.errors import UserError
from ddp_runner.train.state import Position, Setup
from ddp_runner.train.stream_batches import StreamBatches

# Keys of the dataset that are groups or lists, and say which samples it has.
NESTED = (
    *("train", "eval", "data_files", "columns", "transform"),
    *("train_transform", "eval_transform", "decode"),
)
HOW_LOADED = ("prepared", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
SNAPSHOT_PARTS = {
    *("model", "optimizer", "scheduler", "scaler", "position", "model_ranks", "made_of"),
    *("data", "order_version"),
}


def identity(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """Return what a resumed run must keep: keys of the config, the samples and their order."""
    groups = {
        f"{group}.{key}": value
        for group, keys in (("model", config.model), ("dataset", config.dataset))
        for key, value in keys.items()
        if isinstance(value, str | int | float | bool) and not key.startswith("_")
    }
    # A model and its _mp form have the same parameters, so each can resume the other.
    groups.pop("model.num_stages", None)
    groups.pop("model.weights", None)  # only read at step 0
    for key in HOW_LOADED:
        groups.pop(f"dataset.{key}", None)
    own = {key: config.dataset[key] for key in NESTED if config.dataset.get(key)}
    step = config.train.step
    keys = {
        **groups,
        **{f"dataset.{key}": value for key, value in leaves(own)},
        "train.step": step["_target_"] if isinstance(step, Mapping) else step,
        "batch.count": config.batch.count,
        "model.name": str(config.model.get("name")).removesuffix("_mp"),
        "optimizer.name": config.optimizer.get("name"),
        "scheduler.name": config.scheduler.get("name"),
        "seed": config.seed,
        "batch.global_size": config.batch.global_size,
        **_of_optimizing(config),
    }
    samples = {
        "train_samples": num_samples(dataset.train),
        "eval_samples": num_samples(dataset.eval),
    }
    return {
        # Values from the environment are not saved; they may differ when a run is resumed.
        "made_of": {key: value for key, value in keys.items() if "${" not in str(value)},
        "data": {**samples, "digest": dataset.digest},
        "order_version": ORDER_VERSION,
    }


def _of_optimizing(config: RunConfig) -> dict[str, Any]:
    """Return the keys that decide which parameter's state is where; None for one that is not used.

    The optimizer's state belongs to groups. A resumed run may change the values in a group, as it
    may change those of the optimizer, but not which keys a group has.
    """
    params = config.params
    groups = [
        f"{group['match']} ({', '.join(sorted({*group} - {'match'}))})" for group in params.groups
    ]
    return {
        "params.freeze": list(params.freeze) or None,
        "params.no_decay": params.no_decay or None,
        "params.groups": groups or None,
        "ema.decay": config.ema.decay,
    }


def read_position(content: Any, path: Path) -> Position:
    """Return the position in a checkpoint's content, with the metrics of its manifest.

    Raises:
        UserError: ``snapshot`` did not make the content, even if its checksum is right.
    """
    manifest = read_manifest(path)
    if not isinstance(content, dict) or not content.keys() >= SNAPSHOT_PARTS:
        fault = f"it is not a mapping with {', '.join(sorted(SNAPSHOT_PARTS))}"
    elif not isinstance(content["made_of"], dict):
        fault = "its made_of is not a mapping"
    else:
        fault = f"its position is {str(content['position'])[:200]}"
        metrics = {name: value for name, value in manifest.metrics.items() if value is not None}
        with suppress(TypeError):  # no mapping, or of other fields
            position = Position(**content["position"], metrics=metrics)
            counts = (position.epoch, position.step, position.step_in_epoch, *position.outstanding)
            counts += (position.bad_evaluations,)
            are_whole = all(type(count) is int and count >= 0 for count in counts)
            has_best = isinstance(position.best, float | None) and isinstance(position.watched, str)
            if position.step == manifest.step and are_whole and has_best:
                return position
    raise UserError(
        f"checkpoint {path} is not from a training run: {fault}; use a checkpoint that this "
        "program wrote"
    )


def validate_same_run(
    content: dict[str, Any], position: Position, setup: Setup, config: RunConfig, path: Path
) -> None:
    """Validate that a run can continue from a checkpoint's content, at its position.

    Raises:
        UserError: the checkpoint has another model, optimizer or dataset, stands at a place that
            the order of samples does not have, or the samples changed.
    """
    saved = dict(content["made_of"])
    is_amid_epoch = position.step_in_epoch > 0 or bool(position.outstanding)
    if not is_amid_epoch:
        saved["batch.global_size"] = config.batch.global_size  # it may change between epochs
    now = identity(config, setup.dataset)
    # A value that came from the environment was not saved.
    changed = [key for key, value in now["made_of"].items() if saved.get(key, value) != value]
    is_of_optimizing = {*changed} <= _of_optimizing(config).keys()
    if changed:
        raise UserError(
            f"checkpoint {path} was made with "
            + ", ".join(f"{key}={saved.get(key)}" for key in changed)
            + ", this run has "
            + ", ".join(f"{key}={now['made_of'][key]}" for key in changed)
            + "; leave these keys as they were"
            + (f", or start a new run with model.weights={path}" if is_of_optimizing else "")
        )
    steps_per_epoch = setup.batches.steps_per_epoch
    if steps_per_epoch is None:
        if is_amid_epoch:
            _validate_same_readers(content, setup, path)
    elif position.step_in_epoch > steps_per_epoch:
        raise UserError(
            f"checkpoint {path} stands at step {position.step_in_epoch} of an epoch that has "
            f"{steps_per_epoch}; use a checkpoint that this program wrote"
        )
    if is_amid_epoch and content["order_version"] != now["order_version"]:
        raise UserError(
            f"checkpoint {path} was saved amid epoch {position.epoch + 1} by a version of "
            "ddp_runner that puts the samples in another order, so that some would be used twice "
            "and others never; finish the epoch with that version, or resume from a checkpoint "
            "between epochs"
        )
    _validate_same_data(content["data"], now["data"], setup.dataset.name, path)


def _validate_same_readers(content: dict[str, Any], setup: Setup, path: Path) -> None:
    """Validate that a stream is read as it was when it was saved amid an epoch."""
    states, batches = content.get("stream"), setup.batches
    if not isinstance(states, list) or not all(isinstance(one, dict) for one in states):
        raise UserError(
            f"checkpoint {path} was saved amid an epoch of samples that were no stream; resume "
            "with the dataset as it was, or start a new run"
        )
    assert isinstance(batches, StreamBatches)
    then = len(states), states[0]["num_workers"], states[0]["batch_size"]
    now = setup.env.world_size, batches.split.num_workers, batches.micro_size
    if then != now:
        (ranks, workers, size), (ranks_now, workers_now, size_now) = then, now
        raise UserError(
            f"checkpoint {path} was saved amid an epoch of a stream that {ranks} ranks with "
            f"{workers} workers read in batches of {size}, and this run has {ranks_now} with "
            f"{workers_now} in batches of {size_now}; resume with world_size={ranks} "
            f"dataset.num_workers={workers} and as many micro-steps, or from a checkpoint between "
            "epochs"
        )


def _validate_same_data(
    saved: dict[str, Any], current: dict[str, Any], name: str, path: Path
) -> None:
    """Validate that the samples did not change: the order of an epoch depends on their number."""
    nouns = {"train_samples": "training samples", "eval_samples": "evaluation samples"}
    changed = [
        f"{_shown(saved.get(key))} {noun} then, {_shown(current[key])} now"
        for key, noun in nouns.items()
        if saved.get(key) != current[key]
    ]
    digests = [str(one["digest"]) for one in (saved, current) if one.get("digest") is not None]
    # A run whose pictures were prepared may go on with those in their files.
    kinds = {one.rpartition(":")[0] for one in digests}
    if not changed and len(set(digests)) > 1 and len(kinds) == 1:
        changed = [
            f"{current['train_samples']:,} training samples then and now, but different ones"
        ]
    if changed:
        raise UserError(
            f"the data changed since checkpoint {path}: {'; '.join(changed)}; put the data of "
            f"dataset={name} back as it was, or start a new run"
        )


def _shown(count: int | None) -> str:
    return "a stream of" if count is None else f"{count:,}"
