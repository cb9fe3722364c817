"""Builds, for a loop of the user's own, from the groups of a resolved config."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ddp_runner.checkpoint.optimizer_state import settings_of
from ddp_runner.checkpoint.state import Saver
from ddp_runner.checkpoint.weights import load_weights, starting_weights
from ddp_runner.own_loop.wrapping import validate_objects
from ddp_runner.parallelism.single import Single
from ddp_runner.rank.session import Session
from ddp_runner.train.build_model import place_model


def build_model(session: Session, **arguments: Any) -> nn.Module:
    """Return the config's model on this rank's devices; see ``Run.model``."""
    config, devices, found = session.config, session.devices, None
    # ``wrap`` places it; a model of several stages places itself.
    mode = session.mode if len(devices) > 1 else Single("single")
    module = place_model(config, mode, {}, devices, **arguments)
    if config.model.get("weights") is not None:
        if session.env.is_rank_zero:
            found = starting_weights(config, session.run_dir.checkpoints, log=session.log)
        load_weights(module, found)
    return module


def build_saver(session: Session, objects: Mapping[str, Any]) -> Saver:
    """Return what saves and restores the objects; see ``validate_objects``."""
    validate_objects(objects)
    return Saver(
        objects,
        settings_of(objects),
        task=session.config.task,
        num_shares=session.mode.layout(session.env).num_shares,
        rank=session.env.rank,
        num_ranks=session.env.world_size,
        compares_buffers=True,
    )
