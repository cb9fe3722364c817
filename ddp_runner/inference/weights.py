"""Finds the weights of a run that ``inference.weights`` asks for: exported, or in a checkpoint.

It also loads them into the run's model in this very process, without ranks or a process group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.checkpoint.store import checkpoints_by_step, load_checkpoint
from ddp_runner.checkpoint.weights import best_or_newest, load_tensors, read_export
from ddp_runner.config.allowed_targets import validate_targets
from ddp_runner.config.foreign import foreign_keys
from ddp_runner.config.inference import Asked
from ddp_runner.config.load import frozen_config, to_config
from ddp_runner.config.own_loop import has_own_loop
from ddp_runner.config.schema import Config
from ddp_runner.config.validate_inference import validate_weights
from ddp_runner.errors import UserError, one_line, os_errors
from ddp_runner.files import file_sha256, is_missing
from ddp_runner.inference.run_files import model_arguments
from ddp_runner.job import Status
from ddp_runner.seeds import seed_all
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record
from ddp_runner.train.build_model import place_alone
from ddp_runner.train.export import model_state

UNUSED = ("trackers", "metrics", "loop", "optimizer", "scheduler", "dataset", "launch", "sweep")
TRIES = 5  # a run that goes on deletes a checkpoint while it is read


@dataclass(frozen=True)
class Weights:
    """A model's state_dict, and where it comes from."""

    tensors: Mapping[str, Tensor]  # on the CPU
    step: int  # optimizer steps that made it
    path: Path  # model.safetensors, or the folder of a checkpoint


def find_weights(
    run_dir: RunDir, config: Config, asked: Asked, *, log: Callable[[str], None]
) -> Weights:
    """Return the weights that a run's evaluations have used: averaged ones with ema.evaluate.

    Args:
        run_dir: of the run.
        config: of the run.
        asked: best, last, or the step of a checkpoint; see ``InferenceConfig``.
        log: takes a sentence about each damaged checkpoint that is passed over.

    Raises:
        UserError: the run has no such weights, or they are damaged or cannot be read.
    """
    validate_weights(asked)
    if is_missing(run_dir.path):
        raise UserError(
            f"the run's folder {run_dir} does not exist; write task={config.task} resume=RUN with "
            "the folder where it is now"
        )
    is_own = "uses" in read_run_record(run_dir, missing_ok=True)  # a loop of the user's own
    is_average = config.ema.decay is not None and config.ema.evaluate and not is_own
    if asked == "best":
        found = _exported(run_dir, is_average=is_average, log=log)
        if found is not None:
            return found
    for is_last_try in (*[False] * (TRIES - 1), True):
        checkpoint = _checkpoint(run_dir, config, asked, log=log)
        try:
            content, step = load_checkpoint(checkpoint), read_manifest(checkpoint).step
        except UserError:
            if checkpoint.exists() or is_last_try:
                raise
        else:
            state = model_state(content, is_average=is_average)
            if isinstance(state, Mapping):
                return Weights(state, step, checkpoint)
            fix = "call run.export in its loop" if is_own else "name another checkpoint by its step"
            raise UserError(f"{checkpoint} holds no model; {fix}")
    raise AssertionError("the last try returns or raises")


def _exported(run_dir: RunDir, *, is_average: bool, log: Callable[[str], None]) -> Weights | None:
    """Return what a run has exported; None if it has trained on since, or exported another kind."""
    path = run_dir.export
    if is_missing(path):
        return None
    record = {} if is_missing(run_dir.record) else read_run_record(run_dir)
    is_completed, wanted = record.get("status") == Status.COMPLETED, record.get("export_sha256")
    fix = "make it readable, or write inference.weights=last"
    with os_errors(f"{path} cannot be read", fix=fix):
        sha256 = file_sha256(path)
    if wanted is not None and sha256 != wanted and not is_completed:
        # The file is replaced before its checksum, and a kill may come in between.
        log(f"{path} is passed over: the run has not completed since it wrote the file")
        return None
    if wanted is not None and sha256 != wanted:
        raise UserError(
            f"{path} is damaged: its checksum differs from that in {run_dir.record.name}; restore "
            "it, or write inference.weights=last"
        )
    tensors, facts = read_export(path, named=str(path))
    step = int(facts["step"]) if facts.get("step", "").isdecimal() else 0
    later = max(checkpoints_by_step(run_dir.checkpoints), default=0)
    has_gone_on = not is_completed and later > step
    if has_gone_on or (facts.get("weights") == "ema") != is_average:
        return None
    return Weights(tensors, step, path)


def _checkpoint(
    run_dir: RunDir, config: Config, asked: Asked, *, log: Callable[[str], None]
) -> Path:
    """Return the folder of a checkpoint that is asked for."""
    folder, settings = run_dir.checkpoints, config.checkpoint
    by_step = checkpoints_by_step(folder)
    if isinstance(asked, int):
        if asked not in by_step:
            raise UserError(
                f"inference.weights ({asked}): {run_dir} has no checkpoint of that step; it has "
                f"{', '.join(map(str, by_step)) or 'none'}"
            )
        return by_step[asked]
    monitor = settings.monitor if asked == "best" else None
    found = best_or_newest(folder, monitor=monitor, mode=settings.mode, log=log)
    if found is None:
        raise UserError(
            f"{run_dir} has no undamaged checkpoint, and no {run_dir.export.name} of these "
            "weights; name another run"
        )
    return found


def load_model(
    run: Path,
    *,
    weights: str | int,
    device: str | torch.device,
    allowed_targets: Sequence[str],
    log: Callable[[str], None] = print,
) -> tuple[nn.Module, Weights]:
    """Return the model of a run, in evaluation mode, and its weights; see ``notebook.load``."""
    place = torch.empty(0, device=device).device
    run_dir = RunDir(run)
    if is_missing(run_dir.config):
        raise UserError(f"{run} is not a run folder: it has no {run_dir.config.name} in .hydra")
    frozen = frozen_config(run_dir.config)
    # A config that came with somebody else's run must not allow itself to run code.
    frozen.allowed_targets = list(allowed_targets)
    if has_own_loop(frozen.task):  # which is not called here
        frozen.task, frozen.loop = "train", {}
    config = _resolved(frozen)
    validate_targets(config)
    if config.task != "train":
        raise UserError(f"{run} is a run of task={config.task}; give a run of task=train")
    found = find_weights(run_dir, config, weights, log=log)
    seed_all(config.seed)  # equal buffers that no file keeps
    module = place_alone(config, model_arguments(run_dir), place)
    load_tensors(module, found.tensors, named=str(found.path))
    return module.eval(), found


def _resolved(frozen: DictConfig) -> Config:
    """Return a frozen config as the schema's object.

    What reads the environment, or names an address, is left out of groups that the model does not
    need. In others it is rejected: a run may be anybody's.
    """
    plain: Any = OmegaConf.to_container(frozen)
    for group in UNUSED:
        keys = plain[group].items()
        plain[group] = {key: one for key, one in keys if not foreign_keys({group: {key: one}}, {})}
    if found := foreign_keys(plain, {}):
        key, value = next(iter(found.items()))
        raise UserError(
            f"{key} ({value}) of the run reads the environment or names an address, and whoever "
            "made the run may have chosen it; write the value itself into the run's config"
        )
    try:
        return to_config(OmegaConf.create(plain))
    except OmegaConfBaseException as error:
        raise UserError(
            f"the run's config is damaged or of another version ({one_line(error)}); restore it"
        ) from error
