"""Saves and restores what differs by rank: the states that ``parallelism.rank_state`` describes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ddp_runner.data.trees import to_device
from ddp_runner.parallelism.rank_state import rank_state
from ddp_runner.train.state import TrainState

CPU = torch.device("cpu")


def rank_states(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint holds of all ranks; most modes have nothing. Collective.

    Only rank 0, which writes the checkpoint, gets the states.
    """
    own, env, group = rank_state(state.model), state.setup.env, state.setup.group
    if own is None:
        return {}
    content: dict[str, Any] = {"settings": dict(own.settings), "state": own.state_dict()}
    if own.replicas_differ:
        content["model"] = state.module.state_dict()
        content["optimizer"] = state.optimizer.state_dict()
    gathered: list[Any] | None = [None] * env.world_size if env.is_rank_zero else None
    dist.gather_object(to_device(content, CPU), gathered, dst=0, group=group)
    return {"ranks": gathered}


def load_rank_state(
    state: TrainState, content: Mapping[str, Any], *, step: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Load this rank's state from a checkpoint's content, or begin anew at the step.

    Returns:
        The content, with the model and the optimizer of this rank if they are its own.
    """
    own, saved, world_size = (
        rank_state(state.model),
        content.get("ranks"),
        state.setup.env.world_size,
    )
    if own is None:
        if saved is not None and state.setup.env.is_rank_zero:
            log("the checkpoint's states by rank are dropped: this run has none")
        return dict(content)
    reason = ""
    if saved is None:
        reason = "the checkpoint has no state of it"
    elif len(saved) != world_size:
        reason = f"the checkpoint is of world_size={len(saved)} and this run has {world_size}"
    elif saved[0]["settings"] != own.settings:
        reason = (
            f"the checkpoint has {_words(saved[0]['settings'])}, this run {_words(own.settings)}"
        )
    if reason or saved is None:
        own.begin_at(step)
        if state.setup.env.is_rank_zero:
            log(f"{own.lost}: {reason}")
        return dict(content)
    mine = saved[state.setup.env.rank]
    own.load_state_dict(mine["state"])
    return {**content, **{key: mine[key] for key in ("model", "optimizer") if key in mine}}


def _words(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "other settings"
