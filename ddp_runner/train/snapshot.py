"""What a checkpoint holds and how a run takes it up again; called by ``worker``."""

from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.checkpoint.plain_data import refuse_sharded
from ddp_runner.checkpoint.store import latest_checkpoint, load_checkpoint
from ddp_runner.config.moved import present_name
from ddp_runner.config.schema import Config
from ddp_runner.data.batches import ORDER_VERSION
from ddp_runner.distributed import from_rank_zero, gather_objects
from ddp_runner.errors import UserError
from ddp_runner.rank.cuda import rng_states, set_rng_states
from ddp_runner.train.loop import Position
from ddp_runner.train.snapshot_checks import checked_position, data_facts, refuse_other_data
from ddp_runner.train.step import Trainee, rehearse


def snapshot(trainee: Trainee, position: Position, config: Config) -> dict[str, Any]:
    """Return all that the next step depends on. Collective: every rank must call.

    Args:
        trainee: of this rank.
        position: of the loop.
        config: as it may be written down; see ``Secrets.written``.

    Raises:
        UserError: a parameter is NaN or infinite, or a tensor is only this rank's part of one;
            such a state is never saved.
    """
    tensors = {"model": trainee.module.state_dict(), "optimizer": trainee.optimizer.state_dict()}
    refuse_sharded(tensors)
    validate_finite(trainee, position)
    return {
        **tensors,
        "scheduler": trainee.scheduler.state_dict(),
        "scaler": trainee.scaler.state_dict(),
        "position": _saved_position(trainee, position),
        "order_version": ORDER_VERSION,
        "rng": gather_objects(_rng_state(trainee.devices[0]), group=trainee.group),
        "made_of": _made_of(config),
        "data": data_facts(trainee.dataset),
    }


def restore(
    trainee: Trainee,
    position: Position,
    config: Config,
    folder: Path,
    *,
    log: Callable[[str], None],
) -> int | None:
    """Load the newest whole checkpoint of `folder` into the trainee and position, if there is one.

    Every rank loads onto its own devices. Collective: every rank must call.

    Returns:
        The step that the run goes on from; None where it begins anew.

    Raises:
        UserError: on every rank alike: the checkpoint belongs to another model, optimizer or
            dataset, or every checkpoint is damaged.
    """
    path = from_rank_zero(lambda: latest_checkpoint(folder, log=log))
    if path is None:
        if config.resume is not None:
            log(f"{folder} holds no checkpoint: the run begins at step 0")
        return None
    # On the CPU: load_state_dict copies each tensor to its own device, and leaves Adam's step
    # counts on the CPU, where a step reads them without waiting for a GPU.
    state = load_checkpoint(path, map_location="cpu")
    saved, current = checked_position(state, path), _made_of(config)
    # A loss may have moved to another module since.
    made_of = {key: present_name(value) for key, value in state["made_of"].items()}
    differing = [key for key, value in current.items() if made_of.get(key) != value]
    at_epoch_end = saved.step_in_epoch == 0 and not saved.outstanding
    schedule_step = None
    if at_epoch_end and "batch.global_size" in differing:
        differing.remove("batch.global_size")  # between two epochs it may change
        if config.train.max_steps is None:
            # The epochs are the measure of the run: our schedules go on as if all of them had had
            # batches of this size.
            schedule_step = saved.epoch * trainee.batches.steps_per_epoch
    if differing:
        raise UserError(
            f"checkpoint {path} was made with "
            + ", ".join(f"{key}={state['made_of'].get(key)}" for key in differing)
            + ", this run has "
            + ", ".join(f"{key}={current[key]}" for key in differing)
            + "; leave these keys as they were"
        )
    if saved.step_in_epoch > trainee.batches.steps_per_epoch:
        raise UserError(
            f"checkpoint {path} stands at step {saved.step_in_epoch} of an epoch that has "
            f"{trainee.batches.steps_per_epoch}; use a checkpoint that this program wrote"
        )
    if not at_epoch_end and state.get("order_version", 1) != ORDER_VERSION:
        raise UserError(
            f"checkpoint {path} was saved amid epoch {saved.epoch + 1} by a version of ddp_runner "
            "that puts the samples in another order, so that some would be used twice and others "
            "never; finish the epoch with that version, or resume from a checkpoint between epochs"
        )
    refuse_other_data(state.get("data"), trainee.dataset, path)
    rehearse(trainee)
    try:
        trainee.module.load_state_dict(state["model"])
        _restore_optimizer(trainee, state, keys=config.optimizer, schedule_step=schedule_step)
        if state["scaler"]:  # empty where the run's precision scaled no loss
            trainee.scaler.load_state_dict(state["scaler"])
        if len(state["rng"]) == trainee.env.world_size:
            _set_rng_state(state["rng"][trainee.env.rank], trainee.devices[0])
        elif trainee.env.is_rank_zero:
            log("the world size differs from the checkpoint's: dropout draws new random numbers")
    # Of any kind: what a foreign state makes of torch's loaders.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"checkpoint {path} does not fit this model: {reason}") from error
    position.epoch, position.step = saved.epoch, saved.step
    position.step_in_epoch, position.outstanding = saved.step_in_epoch, saved.outstanding
    told = read_manifest(path).metrics
    position.metrics.update({name: one for name, one in told.items() if one is not None})
    log(f"resumed from {path}, step {position.step}")
    return position.step


def _saved_position(trainee: Trainee, position: Position) -> dict[str, Any]:
    """Return a position as a checkpoint keeps it; its metrics are in the manifest."""
    fields = asdict(replace(position, outstanding=_outstanding(trainee, position)))
    return {name: value for name, value in fields.items() if name != "metrics"}


def _outstanding(trainee: Trainee, position: Position) -> tuple[int, ...]:
    """Return the batches before the position that have not been computed."""
    if trainee.gradients is not None:
        return trainee.gradients.outstanding()
    here = position.epoch * trainee.batches.steps_per_epoch + position.step_in_epoch
    return tuple(batch for place, batch in trainee.batches.instead.items() if place >= here)


def _restore_optimizer(
    trainee: Trainee, state: dict[str, Any], *, keys: Collection[str], schedule_step: int | None
) -> None:
    """Take up the moments and the schedule's step; the rates are those of this run's config.

    So the way out of a diverged run works: resuming it with a smaller optimizer.lr. What else an
    optimizer has in its groups is state: some count their steps there.

    Args:
        trainee: of this rank.
        state: of the checkpoint.
        keys: of the config's optimizer.
        schedule_step: where a closed formula goes on; None: where it stood.
    """
    optimizer, scheduler = trainee.optimizer, trainee.scheduler.scheduler
    chosen = [
        {k: v for k, v in one.items() if k in (*keys, "initial_lr")}
        for one in optimizer.param_groups
    ]
    optimizer.load_state_dict(state["optimizer"])
    if not isinstance(scheduler, LambdaLR):  # it may have changed the rates as it went
        initial_rates = [one["initial_lr"] for one in chosen]
        trainee.scheduler.load_state_dict(state["scheduler"], initial_rates=initial_rates)
        return
    saved_step = state["scheduler"]["last_epoch"]
    scheduler.last_epoch = saved_step if schedule_step is None else schedule_step
    scheduler._step_count = state["scheduler"]["_step_count"]
    for group, own, factor in zip(
        optimizer.param_groups, chosen, scheduler.lr_lambdas, strict=True
    ):
        group.update(own)
        group["lr"] = own["initial_lr"] * factor(scheduler.last_epoch)


def validate_finite(trainee: Trainee, position: Position) -> None:
    """Refuse to go on with broken parameters; they are equal on all ranks, so all refuse alike.

    Raises:
        UserError: a parameter is NaN or infinite.
    """
    for name, parameter in trainee.module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(
                f"parameter {name} became NaN or infinite by step {position.step}; it was not "
                "saved: start again with a smaller optimizer.lr, or resume from a checkpoint whose "
                "loss was still small"
            )


def _made_of(config: Config) -> dict[str, Any]:
    """Return what a checkpoint cannot be resumed without."""
    groups = {
        f"{group}.{key}": value
        for group, keys in (("model", config.model), ("dataset", config.dataset))
        for key, value in keys.items()
        if isinstance(value, str | int | float | bool) and not key.startswith("_")
    }
    # A model and its split form share their parameters: one resumes what the other left.
    groups.pop("model.num_stages", None)
    groups.pop("model.weights", None)  # read once, when the run began
    made_of = {
        **groups,
        "model.name": str(config.model.get("name")).removesuffix("_mp"),
        "optimizer.name": config.optimizer.get("name"),
        "scheduler.name": config.scheduler.get("name"),
        "seed": config.seed,
        "batch.global_size": config.batch.global_size,
    }
    # What comes from the environment is not written down; it may differ when a run is resumed.
    return {key: value for key, value in made_of.items() if "${" not in str(value)}


def _rng_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = rng_states(device)
    return state


def _set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        saved = state["cuda"]  # in checkpoints of earlier versions the first device's alone
        set_rng_states([saved] if isinstance(saved, torch.Tensor) else saved, device)
