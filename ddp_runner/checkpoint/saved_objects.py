"""Saves and restores the objects of a training or of a user's own loop, by name.

A checkpoint holds plain data and whole tensors:

- ``objects``: the state of each object. Optimizer states go by parameter name, so they fit another
  grouping of the parameters.
- ``by_rank``: the state on each rank of objects that differ between ranks.
- ``task``, ``step`` and ``num_shares``, the parts of a global batch.

A setting that an optimizer or scheduler never changed came from the config, so the resuming run
uses its own setting.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ddp_runner.checkpoint.between_ranks import agreed_checkpoint, digest_of, on_every_machine
from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.checkpoint.model_file import load_tensors
from ddp_runner.checkpoint.optimizer_state import (
    by_names,
    groups_of,
    is_scheduler,
    load_optimizer,
    load_scheduler,
    parameter_names,
    scheduler_state,
)
from ddp_runner.checkpoint.state_parts import gathered, of_all_stages, reject_sharded, split_off
from ddp_runner.checkpoint.store import load_verified
from ddp_runner.distributed import from_rank_zero, gather_objects
from ddp_runner.errors import UserError, listed, typed
from ddp_runner.parallelism.shards import first_not_finite, has_stages, is_shard, map_leaves

PARTS = {"task", "step", "num_shares", "objects", "by_rank"}


@dataclass(frozen=True)
class Saver:
    """Saves and restores objects. Each method is collective: every rank must call."""

    objects: Mapping[str, Any]  # by their names in a checkpoint; each a dict, or with a state_dict
    settings: Mapping[str, Any]  # ``settings_of(objects)`` before the first step
    task: str
    num_shares: int  # parts of a global batch
    group: ProcessGroup | None = None  # ranks that have the objects; None: all
    is_sharded: bool = False  # each rank saves its parts of modules and optimizers
    compares_buffers: bool = False  # save module buffers of each rank where they differ
    takes_all: bool = True  # reject a checkpoint with further objects

    @torch.no_grad()  # a shard's part then costs nothing
    def snapshot(self, step: int, *, copies: set[int] | None = None) -> dict[str, Any]:
        """Return a checkpoint's content, which is whole on rank 0 alone.

        If ``is_sharded``, modules and optimizers have specs in place of their tensors, and
        ``parts`` holds what this rank saves of them; see ``split_off``. `copies` receives the
        addresses of tensors that are copies already; see ``gathered``.

        Raises:
            UserError: a parameter is NaN or infinite, or a shard is not a DTensor.
        """
        names, states, local = parameter_names(self.objects), dict[str, Any](), dict[str, Any]()
        modules = {key: one for key, one in self.objects.items() if isinstance(one, nn.Module)}
        firsts = ((name, first_not_finite(module)) for name, module in modules.items())
        bad = next((f"{name}.{key}" for name, key in firsts if key is not None), None)
        rank = dist.get_rank(self.group)
        for name, value in self.objects.items():
            states[name] = _state(value, self.settings.get(name), names)
            local[name] = _local_part(value, states[name], compares_buffers=self.compares_buffers)
        mark = bad, {name: digest_of(local[name]) for name in local}
        all_bad, digests = zip(*gather_objects(mark, group=self.group), strict=True)
        if (first := next(filter(None, all_bad), None)) is not None:
            raise UserError(
                f"parameter {first} became NaN or infinite by step {step}",
                "it was not saved: start again with a smaller optimizer.lr, or resume from a "
                "checkpoint whose loss was still small",
            )
        differing = [name for name in local if len({digest[name] for digest in digests}) > 1]
        by_rank: list[Any] = []
        if differing:
            parts = map_leaves(_on_cpu, {name: local[name] for name in differing})
            by_rank = [None] * dist.get_world_size(self.group) if rank == 0 else []
            dist.gather_object(parts, by_rank or None, dst=0, group=self.group)
        split: Any = {
            name: states[name]
            for name, value in self.objects.items()
            if isinstance(value, nn.Module | Optimizer)
        }
        holders = dict[str, int]()
        if any(map(has_stages, modules.values())):
            split, holders = of_all_stages(split, group=self.group)
        content = {"task": self.task, "step": step, "num_shares": self.num_shares}
        if self.is_sharded:
            split, content["parts"] = split_off(split, holders, rank=rank)
        else:
            copies = set() if copies is None else copies
            split = gathered(split, holders, keep=rank == 0, copies=copies, group=self.group)
        objects = states | split
        reject_sharded(objects)
        return {**content, "objects": objects, "by_rank": by_rank}

    def restore(
        self,
        folder: Path,
        *,
        is_resumed: bool,
        log: Callable[[str], None],
        before: Callable[[], object] = object,
    ) -> tuple[int, dict[str, float]] | None:
        """Load a folder's newest valid checkpoint into the objects; update a dict in place.

        Return the steps taken and the metrics of the last; None without a checkpoint, or folder.
        `is_resumed`: the user asked to resume a run. `before` is called before anything is loaded.

        Raises:
            UserError: the checkpoint does not fit, or every checkpoint is damaged. All ranks raise.
        """
        path = agreed_checkpoint(folder, log=log)
        if path is None:
            if is_resumed:
                log(f"{folder} has no checkpoint: the run begins at step 0")
            return None
        with on_every_machine(path) as copy_here:
            # Mapped, since a rank may need only its shards.
            content: Any = load_verified(copy_here, is_mapped=True)
        self._validate(content, path)
        before()
        names = parameter_names(self.objects)
        # Schedulers last: they may set their optimizer's rate.
        for name, value in sorted(self.objects.items(), key=lambda item: is_scheduler(item[1])):
            with _errors_name(path, name):
                self._load(name, value, content["objects"][name], names)
        self._load_by_rank(content, path, log=log)
        log(f"resumed from {path}, step {content['step']}")
        metrics = from_rank_zero(lambda: read_manifest(path).metrics)
        finite = {name: value for name, value in metrics.items() if value is not None}
        return int(content["step"]), finite

    def _validate(self, content: Any, path: Path) -> None:
        """Reject a checkpoint of another task, with other objects, or not from ``snapshot``."""
        if not isinstance(content, dict) or not content.keys() >= PARTS:
            raise UserError(
                f"checkpoint {path} is not from a run: it lacks some of {', '.join(sorted(PARTS))}",
                "use a checkpoint that this program wrote",
            )
        if content["task"] != self.task:
            raise UserError(
                f"checkpoint {path} was made by task={content['task']}, and this is "
                f"task={self.task}",
                f"resume with task={content['task']}",
            )
        saved, expected = content["objects"], self.objects.keys()
        is_complete = isinstance(saved, dict) and saved.keys() >= expected
        if not is_complete or (self.takes_all and saved.keys() > expected):
            raise UserError(
                f"checkpoint {path} has {', '.join(sorted(map(str, saved))) or 'nothing'}, and "
                f"this run restores {', '.join(sorted(expected)) or 'nothing'}",
                f"use the same objects, or start a new run with model.weights={path}",
            )

    def _load(self, name: str, value: Any, state: Any, names: Mapping[int, str]) -> None:
        """Load an object; for `names` see ``parameter_names``."""
        if is_scheduler(value):
            groups = groups_of(value, self.objects, self.settings)
            load_scheduler(value, state, self.settings[name], groups)
        elif isinstance(value, nn.Module):
            load_tensors(value, state, named="its state")
        elif isinstance(value, Optimizer):
            load_optimizer(value, state, self.settings[name], names)
        else:
            _load_local_part(value, state)

    def _load_by_rank(
        self, content: Mapping[str, Any], path: Path, *, log: Callable[[str], None]
    ) -> None:
        if not (by_rank := content["by_rank"]):
            return
        rank, num_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if content["num_shares"] != self.num_shares:
            log(
                f"{listed(list(by_rank[0]))} differed between {len(by_rank)} ranks in checkpoint "
                f"{path}, and this run has {num_ranks}: all take rank 0's"
            )
            return
        # Neighbouring ranks that compute the same share have equal states.
        for name, state in by_rank[rank * len(by_rank) // num_ranks].items():
            with _errors_name(path, name):
                _load_local_part(self.objects[name], state)


def _on_cpu(_: str, value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _state(value: Any, settings: Any, names: Mapping[int, str]) -> Any:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, Optimizer):
        return {**by_names(value, names), "settings": settings}
    if is_scheduler(value):
        return {"state": scheduler_state(value), "settings": settings}
    return value.state_dict()


def _local_part(value: Any, state: Any, *, compares_buffers: bool) -> Any:
    """Return the part of a state that may differ between ranks."""
    if isinstance(value, nn.Module) and compares_buffers:
        buffers = value.named_buffers()
        return {name: part for name, part in buffers if name in state and not is_shard(part)}
    if isinstance(value, nn.Module | Optimizer) or is_scheduler(value):
        return None
    return state


def _load_local_part(value: Any, state: Any) -> None:
    if isinstance(value, nn.Module):
        with torch.no_grad():
            for name, buffer in value.named_buffers():
                if name in state:
                    buffer.copy_(state[name])
        return
    state = copy.deepcopy(state)  # the object may change it, and the file is mapped
    if isinstance(value, dict):
        value.clear()
        value.update(state)
    elif not isinstance(value, torch.amp.GradScaler) or state:  # {}: it had scaled no loss
        value.load_state_dict(state)


@contextmanager
def _errors_name(path: Path, name: str) -> Iterator[None]:
    """Turn any error in the block into a UserError about an object of a checkpoint."""
    try:
        yield
    except Exception as error:  # a user's class may raise anything
        reason = str(error) if isinstance(error, UserError) else typed(error)
        raise UserError(f"checkpoint {path} does not fit {name}: {reason}") from error
