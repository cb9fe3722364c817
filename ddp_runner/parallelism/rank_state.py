"""What a rank keeps beside the model and the optimizer, and what the next step depends on.

A communication hook of DDP may keep some: PowerSGD the errors of this rank, post-local SGD a model
of its own. The mode attaches it to the model that it wraps.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn

ATTRIBUTE = "rank_state"  # of the wrapped model


class RankState(Protocol):
    """The state of one rank. It is saved for each rank, and given back if nothing has changed."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return what must be as it was for a saved state to fit: plain values."""

    @property
    def replicas_differ(self) -> bool:
        """Return whether this rank's model and optimizer are a part of its state."""

    @property
    def lost(self) -> str:
        """Return, as a clause, what a run does that cannot go on with a saved state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same rank and settings."""

    def begin_at(self, step: int) -> None:
        """Begin anew, at a step of the run."""

    def step_done(self) -> None:
        """Do what is due after an optimizer step. Collective: every rank must call."""

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model is the same on all ranks. Collective."""


def attach(model: nn.Module, state: RankState) -> None:
    """Keep a rank's state with its wrapped model."""
    vars(model)[ATTRIBUTE] = state


def rank_state(model: nn.Module) -> RankState | None:
    """Return what was attached to a wrapped model; None: nothing, as with most modes."""
    found: RankState | None = vars(model).get(ATTRIBUTE)
    return found


def step_done(model: nn.Module) -> None:
    """Do what the mode has to do after an optimizer step. Collective: every rank must call."""
    if (state := rank_state(model)) is not None:
        state.step_done()


def averaged(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the bare model has the mean of the ranks' weights.

    With most modes they are equal anyway. Collective: every rank must enter.
    """
    state = rank_state(model)
    return nullcontext() if state is None else state.averaged()
