"""Collectives that tasks use, and agreement between ranks; over gloo, on the CPU."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.device import device_uuid
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import FOR_CPU

T = TypeVar("T")
VOTE_S, MOST_STEPS = 0.25, 16  # from one vote on stopping to the next, at most


def loop_group(*, takes_part: bool) -> dist.ProcessGroup | None:
    """Return the group of a loop; None if all ranks take part, or this does not. Collective."""
    flags = gather_objects(takes_part)
    if all(flags):
        return None
    group = dist.new_group([rank for rank, flag in enumerate(flags) if flag])
    return group if isinstance(group, dist.ProcessGroup) else None


def share_group(model_ranks: int, *, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group with this rank and its counterpart in every other share. Collective.

    `model_ranks` neighbouring ranks compute a share together. `group` is the loop's ranks, all of
    them if ``model_ranks`` is not 1.
    """
    if model_ranks == 1:
        return group
    ranks = range(dist.get_world_size())
    groups = [list(ranks[first::model_ranks]) for first in range(model_ranks)]
    subgroup, _ = dist.new_subgroups_by_enumeration(groups)
    assert isinstance(subgroup, dist.ProcessGroup)
    return subgroup


def sum_over_ranks(
    values: Sequence[float], *, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return each value summed over the group's ranks, in float64; None: all ranks. Collective."""
    totals: list[float] = add_over_ranks(torch.tensor(values, dtype=torch.float64), group).tolist()
    return totals


def add_over_ranks(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return counts summed over the group's ranks, on the CPU; None: all ranks. Collective."""
    total = counts.to("cpu", copy=True)
    dist.all_reduce(total, group=group)
    return total


def gather_objects(value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all the group's ranks on each rank; None: all ranks. Collective."""
    box: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(box, value, group=group)
    return box


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Copy the first rank's tensors to the group, a broadcast per dtype and device. Collective."""
    by_kind = defaultdict[object, list[Tensor]](list)
    for tensor in tensors:
        by_kind[tensor.device, tensor.dtype].append(tensor)
    for tensors_of_kind in by_kind.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors_of_kind])
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
        sizes = [tensor.numel() for tensor in tensors_of_kind]
        for tensor, part in zip(tensors_of_kind, flat.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))


def from_rank_zero(compute: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's result on all the group's ranks; None: all ranks. Collective.

    Raises:
        UserError: on every rank, if rank 0 raised it.
    """
    box: list[T | UserError | None] = [None]
    if dist.get_rank() == 0:
        try:
            box = [compute()]
        except UserError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    if isinstance(box[0], UserError):
        raise box[0]
    return cast(T, box[0])


def ensure_agreement(
    facts: Mapping[str, object], *, optional: Mapping[str, object] | None = None
) -> None:
    """Check that facts are equal on every rank. Collective: every rank must call.

    The `optional` facts are reported last, and there None agrees with any value.

    Raises:
        UserError: on every rank, naming the first key that differs, its values and their ranks.
    """
    optional = optional or {}
    present = {key: value for key, value in optional.items() if value is not None}
    by_rank = gather_objects({**facts, **present})
    for key in sorted(set().union(*by_rank), key=lambda key: (key in optional, key)):
        values = {
            rank: str(values_of_rank.get(key))
            for rank, values_of_rank in enumerate(by_rank)
            if key in values_of_rank or key not in optional
        }
        first = min(values)
        for rank, value in values.items():
            if value != values[first]:
                raise UserError(
                    f"ranks were launched differently: {key} is {values[first]} on rank {first} "
                    f"and {value} on rank {rank}",
                    "start every rank with the same command and code",
                )


def ensure_own_devices(devices: Sequence[torch.device], *, backend: str) -> None:
    """Check that no two ranks share a GPU, if GPUs have a UUID. Collective: every rank.

    Raises:
        UserError: on every rank, naming two ranks that share a GPU.
    """
    if backend in FOR_CPU:
        return
    owners: dict[str, int] = {}
    uuids = [uuid for uuid in map(device_uuid, devices) if uuid is not None]
    for rank, uuids_of_rank in enumerate(gather_objects(uuids)):
        for uuid in set(uuids_of_rank):
            if owners.setdefault(uuid, rank) != rank:
                raise UserError(
                    f"ranks {owners[uuid]} and {rank} both have GPU {uuid}, which backend="
                    f"{backend} does not support",
                    "start as many ranks as there are GPUs, or "
                    "write backend=gloo backend.device=cpu",
                )


class StopVote:
    """Lets all ranks stop at the same step.

    A vote takes a tenth of a short step, so several short steps share one. It is counted a step
    later, so the collective overlaps with the step's computation.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._is_alone = group, dist.get_world_size(group) == 1
        self._began, self._steps = time.perf_counter(), 0  # of the last vote, and since then
        self._ballot = torch.zeros(2, dtype=torch.float64)  # wants to stop; seconds of a step
        self._pending: dist.Work | None = None
        self._every = 1  # steps from one vote to the next, the same on all ranks

    def agreed(self, stop_requested: Callable[[], bool]) -> bool:
        """Return True on all ranks once any rank wants to stop. Collective, at every step."""
        self._steps += 1
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            wants_stop, step_s = self._ballot.tolist()
            self._every = min(MOST_STEPS, max(1, int(VOTE_S / step_s)))
            if wants_stop:
                return True
        if self._is_alone:
            return stop_requested()
        if self._steps >= self._every:
            now = time.perf_counter()
            ballot = [stop_requested(), (now - self._began) / self._steps]
            self._ballot = torch.tensor(ballot, dtype=torch.float64)
            self._began, self._steps = now, 0
            self._pending = dist.all_reduce(
                self._ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True
            )
        return False

    def settle(self) -> None:
        """Wait for the last vote, so that no collective is left running. Collective: every rank."""
        if self._pending is not None:
            self._pending.wait()
