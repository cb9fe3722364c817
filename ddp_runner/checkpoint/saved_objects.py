"""Saves objects by their names and restores them: those of a training, or of a user's own loop.

The content of a checkpoint, plain data and whole tensors:

- ``objects``: each object's state. An optimizer's is by parameter names, so it fits parameters that
  are grouped in another way.
- ``by_rank``: for objects that differ between ranks, the state of each rank.
- ``task``, ``step`` and ``num_shares``, the parts that a global batch had.

Settings are not progress: what an optimizer or a scheduler holds as it did when it was built came
from the config, so the config of the run that resumes wins.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ddp_runner.checkpoint.between_ranks import digest_of, on_cpu, on_every_machine
from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.checkpoint.model_file import fitting_tensors
from ddp_runner.checkpoint.optimizer_state import (
    by_names,
    groups_of,
    is_scheduler,
    load_optimizer,
    load_scheduler,
    parameter_names,
    scheduler_state,
)
from ddp_runner.checkpoint.plain_data import reject_sharded
from ddp_runner.checkpoint.store import latest_checkpoint, load_checkpoint
from ddp_runner.distributed import from_rank_zero, gather_objects
from ddp_runner.errors import UserError, listed, typed
from ddp_runner.parallelism.shards import first_not_finite, gathered, is_shard, load_module

PARTS = {"task", "step", "num_shares", "objects", "by_rank"}


class Saved(Protocol):
    """What has a state of its own: a loader, a scaler."""

    def state_dict(self) -> Any:
        """Return the state: plain data and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Continue from a state."""


class Restored(NamedTuple):
    """The checkpoint that a run continues from."""

    step: int  # steps taken
    metrics: dict[str, float]  # of this step


Objects = Mapping[str, nn.Module | Optimizer | Saved | dict[Any, Any]]


@dataclass(frozen=True)
class Saver:
    """Saves objects, and restores them. Each method is collective: every rank must call."""

    objects: Objects  # by the names that a checkpoint has
    settings: Mapping[str, Any]  # of ``settings_of`` before the first step
    task: str  # of the run
    num_shares: int  # the parts of a global batch
    rank: int  # of those that have the objects
    num_ranks: int  # how many they are
    group: ProcessGroup | None = None  # these ranks; None: all
    compares_buffers: bool = False  # modules may have other buffers on each rank, to be saved
    takes_all: bool = True  # else a checkpoint may have more objects

    def snapshot(self, step: int, *, copies: set[int] | None = None) -> dict[str, Any]:
        """Return what a checkpoint holds; on ranks other than 0 without split tensors.

        Args:
            step: steps taken.
            copies: takes the addresses of tensors that are copies already, as ``gathered``.

        Raises:
            UserError: a parameter is NaN or infinite, or a tensor is a shard but no DTensor.
        """
        for name, value in self.objects.items():
            _validate_finite(name, value, step)
        names, states, own = parameter_names(self.objects), dict[str, Any](), dict[str, Any]()
        for name, value in self.objects.items():
            states[name] = _state(value, self.settings.get(name), names)
            own[name] = _own(value, states[name], compares_buffers=self.compares_buffers)
        digests = gather_objects({name: digest_of(own[name]) for name in own}, group=self.group)
        differ = [name for name in own if len({of_rank[name] for of_rank in digests}) > 1]
        by_rank: list[Any] = []
        if differ:
            parts = {name: on_cpu(own[name]) for name in differ}
            by_rank = [None] * self.num_ranks if self.rank == 0 else []
            dist.gather_object(parts, by_rank or None, dst=0, group=self.group)
        reject_sharded(found := gathered(states, keep=self.rank == 0, copies=copies))
        content = {"task": self.task, "step": step, "num_shares": self.num_shares}
        return {**content, "objects": found, "by_rank": by_rank}

    def restore(
        self,
        folder: Path,
        *,
        is_resumed: bool,
        log: Callable[[str], None],
        before: Callable[[], object] = object,
    ) -> "Restored | None":
        """Load a folder's newest valid checkpoint into the objects; a dict is updated in place.

        Args:
            folder: the run's checkpoints; it need not exist.
            is_resumed: the user has asked to resume a run.
            log: takes a sentence for the user.
            before: called before anything is loaded, if there is a checkpoint.

        Returns:
            What was loaded; None if there is no checkpoint.

        Raises:
            UserError: the checkpoint does not fit, or every checkpoint is damaged. All ranks raise.
        """
        path = from_rank_zero(lambda: latest_checkpoint(folder, log=log))
        if path is None:
            if is_resumed:
                log(f"{folder} holds no checkpoint: the run begins at step 0")
            return None
        with on_every_machine(path) as found:
            content: Any = load_checkpoint(found, is_mapped=True)  # a rank may need only shards
        self._validate(content, path)
        before()
        names = parameter_names(self.objects)
        # A scheduler, which may set its optimizer's rate, comes after it.
        for name, value in sorted(self.objects.items(), key=lambda item: is_scheduler(item[1])):
            with _named(path, name):
                state, own = content["objects"][name], self.settings.get(name)
                if is_scheduler(value):
                    load_scheduler(value, state, own, groups_of(value, self.objects, self.settings))
                else:
                    _load(value, state, own, names)
        self._load_by_rank(content, path, log=log)
        log(f"resumed from {path}, step {content['step']}")
        metrics = from_rank_zero(lambda: read_manifest(path).metrics)
        known = {name: value for name, value in metrics.items() if value is not None}
        return Restored(int(content["step"]), known)

    def _validate(self, content: Any, path: Path) -> None:
        """Reject the content of a checkpoint that is not of this run.

        Raises:
            UserError: it is of another task or has other objects, or ``snapshot`` did not make it.
        """
        if not isinstance(content, dict) or not content.keys() >= PARTS:
            raise UserError(
                f"checkpoint {path} is not from a run: it is not a mapping with "
                f"{', '.join(sorted(PARTS))}; use a checkpoint that this program wrote"
            )
        if content["task"] != self.task:
            raise UserError(
                f"checkpoint {path} was made by task={content['task']}, and this is "
                f"task={self.task}; resume with the task that it was made with"
            )
        saved, own = content["objects"], self.objects.keys()
        is_whole = isinstance(saved, dict) and saved.keys() >= own
        if not is_whole or (self.takes_all and saved.keys() > own):
            raise UserError(
                f"checkpoint {path} has {', '.join(sorted(map(str, saved))) or 'nothing'}, and "
                f"this run restores {', '.join(sorted(own)) or 'nothing'}; give it the same, or "
                f"start a new run with model.weights={path}"
            )

    def _load_by_rank(
        self, content: Mapping[str, Any], path: Path, *, log: Callable[[str], None]
    ) -> None:
        if not (by_rank := content["by_rank"]):
            return
        if content["num_shares"] != self.num_shares:
            log(
                f"{listed(list(by_rank[0]))} differed between {len(by_rank)} ranks in checkpoint "
                f"{path}, and this run has {self.num_ranks}: all take rank 0's"
            )
            return
        # Neighbours that compute one share have the same.
        for name, state in by_rank[self.rank * len(by_rank) // self.num_ranks].items():
            with _named(path, name):
                _load_own(self.objects[name], state)


def _validate_finite(name: str, value: Any, step: int) -> None:
    named = value.named_parameters() if isinstance(value, nn.Module) else ()
    if (key := first_not_finite(named)) is not None:
        raise UserError(
            f"parameter {name}.{key} became NaN or infinite by step {step}; it was not saved: "
            "start again with a smaller optimizer.lr, or resume from a checkpoint whose loss was "
            "still small"
        )


def _state(value: Any, settings: Any, names: Mapping[int, str]) -> Any:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, Optimizer):
        return {**by_names(value, names), "settings": settings}
    if is_scheduler(value):
        return {"state": scheduler_state(value), "settings": settings}
    return value.state_dict()


def _own(value: Any, state: Any, *, compares_buffers: bool) -> Any:
    """Return the part of a state that may differ between ranks."""
    if isinstance(value, Optimizer) or is_scheduler(value):
        return None
    if not isinstance(value, nn.Module):
        return state
    if not compares_buffers:
        return None
    return {name: one for name, one in value.named_buffers() if name in state and not is_shard(one)}


def _load(value: Any, state: Any, settings: Any, names: Mapping[int, str]) -> None:
    if isinstance(value, nn.Module):
        load_module(value, fitting_tensors(value, state, named="its state"))
    elif isinstance(value, Optimizer):
        load_optimizer(value, state, settings, names)
    else:
        _load_own(value, state)


def _load_own(value: Any, state: Any) -> None:
    if isinstance(value, nn.Module):
        with torch.no_grad():
            for name, own in value.named_buffers():
                if name in state:
                    own.copy_(state[name])
        return
    state = copy.deepcopy(state)  # the object may change it, and the file is mapped
    if isinstance(value, dict):
        value.clear()
        value.update(state)
    elif not (isinstance(value, torch.amp.GradScaler) and not state):  # it scaled no loss then
        value.load_state_dict(state)


@contextmanager
def _named(path: Path, name: str) -> Iterator[None]:
    """Turn any error in the block into one about an object of a checkpoint."""
    try:
        yield
    except Exception as error:  # anybody's class raises any kind
        reason = str(error) if isinstance(error, UserError) else typed(error)
        raise UserError(f"checkpoint {path} does not fit {name}: {reason}") from error
