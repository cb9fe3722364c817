"""Builds the model of a run in this very process, as in a notebook: no ranks, no process group."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from ddp_runner.checkpoint.weights import load_tensors
from ddp_runner.config.allowed_targets import validate_targets
from ddp_runner.config.load import frozen_config, to_config
from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError, one_line
from ddp_runner.files import is_missing
from ddp_runner.inference.run_files import model_arguments
from ddp_runner.inference.weights import Weights, find_weights
from ddp_runner.seeds import seed_all
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.train.build_model import place_alone


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

    What reads the environment is left out of groups that the model does not need: a notebook need
    not have the secrets of the training.
    """
    for group in ("trackers", "metrics", "loop", "optimizer", "scheduler", "dataset"):
        plain = OmegaConf.to_container(frozen[group], resolve=False)
        assert isinstance(plain, dict)
        frozen[group] = {key: value for key, value in plain.items() if "${" not in str(value)}
    try:
        return to_config(frozen)
    except OmegaConfBaseException as error:
        raise UserError(
            f"the run's config cannot be resolved ({one_line(error)}); set the variable, or "
            "restore the config"
        ) from error
