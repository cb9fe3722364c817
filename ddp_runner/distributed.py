"""The process group and the few collectives that the loop needs; called by worker and train."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.config.schema import BackendConfig
from ddp_runner.dist_env import FROM_ENVIRONMENT, DistEnv, check_rendezvous
from ddp_runner.errors import UserError
from ddp_runner.rank.agent_store import fresh_store, serves_ranks
from ddp_runner.rank.loopback_store import loopback_store

T = TypeVar("T")

_outliving_groups: list[dist.ProcessGroup | None] = []


@contextmanager
def process_group(
    env: DistEnv, *, backend: BackendConfig, init_method: str | None = None
) -> Iterator[None]:
    """Hold the default process group open. Collective: every rank must call.

    On CUDA the group has two backends, so that small facts travel as CPU tensors over gloo and
    never wait for a kernel.

    Raises:
        UserError: this torch was built without the backend.
    """
    if backend.name == "mpi" and not dist.is_mpi_available():
        raise UserError(
            "backend=mpi needs a torch built with MPI, and this one is not (PyPI's wheels never "
            "are); write backend=gloo, or build torch from source beside an MPI library"
        )
    check_rendezvous(env, init_method=init_method, backend=backend.name)
    is_local = False
    if env.num_nodes == 1:
        # One machine's traffic needs no other interface than loopback, and listens on no other.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        is_local = os.environ["GLOO_SOCKET_IFNAME"] == loopback  # whoever set another knows better
    timeout = timedelta(seconds=backend.timeout_s)
    store = None
    if init_method == FROM_ENVIRONMENT and serves_ranks():
        store = fresh_store(env, timeout=timeout)
    elif is_local and backend.name != "mpi":
        store = loopback_store(env, init_method=init_method, timeout=timeout)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend.name == "nccl" else backend.name,
            init_method=None if store is not None else init_method,
            store=store,
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        if "Unable to find address for" not in str(error):
            raise
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "of this machine")
        raise UserError(
            f"the network interface {interface} (GLOO_SOCKET_IFNAME) has no address; "
            f"bring it up (ip link set {interface} up), or set the variable to one that has"
        ) from error
    # The group's threads take the GIL to let go of the last collective's tensors. Were the group to
    # end with DDP's reducer, which joins these threads while it holds the GIL, both would wait for
    # ever. So the group outlives the model, to the end of the process.
    _outliving_groups.append(dist.group.WORLD)
    yield
    # On success only: a rank that fails while its peers sit in a collective must die, not wait.
    dist.destroy_process_group()


def loop_group(*, takes_part: bool) -> dist.ProcessGroup | None:
    """Return the group of the ranks that take part in the loop; None: all. Collective: every rank.

    Args:
        takes_part: whether this rank does; one that does not gets a group of no use to it.
    """
    answers = gather_objects(takes_part)
    if all(answers):
        return None
    group = dist.new_group([rank for rank, yes in enumerate(answers) if yes])
    return group if isinstance(group, dist.ProcessGroup) else None


def sum_over_ranks(
    values: Sequence[float], *, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return each value summed over the group's ranks, in float64; None: all ranks. Collective."""
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals, group=group)
    return list(map(float, totals))


def add_over_ranks(counts: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return counts summed over the group's ranks, on the CPU; None: all ranks. Collective."""
    total = counts.to("cpu", copy=True)
    dist.all_reduce(total, group=group)
    return total


def broadcast_object(value: T) -> T:
    """Return rank 0's value on every rank. Collective: every rank must call."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather_objects(value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each of the group's ranks on all of them; None: all ranks. Collective."""
    box: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(box, value, group=group)
    return box


def broadcast_buffers(module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Give the group's ranks the buffers (BatchNorm statistics) of rank 0. Collective."""
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0, group=group)


@torch.no_grad()
def broadcast_state(module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Give the group's ranks what a checkpoint of rank 0's module would hold. Collective."""
    for tensor in module.state_dict().values():
        value = tensor.contiguous()  # a channels_last weight is not
        dist.broadcast(value, src=0, group=group)
        tensor.copy_(value)


def from_rank_zero(compute: Callable[[], T]) -> T:
    """Return on every rank what rank 0 computes. Collective: every rank must call.

    Raises:
        UserError: on every rank, the one that rank 0 raised.
    """
    answer: T | UserError | None = None
    if dist.get_rank() == 0:
        try:
            answer = compute()
        except UserError as error:
            answer = error
    answer = broadcast_object(answer)
    if isinstance(answer, UserError):
        raise answer
    return cast(T, answer)


def check_agreement(
    facts: Mapping[str, object], *, optional: Mapping[str, object] | None = None
) -> None:
    """Compare what must be equal on every rank. Collective: every rank must call.

    Args:
        facts: of this rank.
        optional: more of them; a rank that does not know one (None) agrees with any.

    Raises:
        UserError: on every rank, naming the first key that differs, its values and their ranks.
    """
    known = {key: value for key, value in (optional or {}).items() if value is not None}
    for own, may_lack in ((dict(facts), False), (known, True)):
        by_rank = gather_objects(own)
        for key in sorted(set().union(*by_rank)):
            values = {
                rank: str(one.get(key))
                for rank, one in enumerate(by_rank)
                if key in one or not may_lack
            }
            first = min(values)
            for other, value in values.items():
                if value != values[first]:
                    raise UserError(
                        f"ranks were launched differently: {key} is {values[first]} on rank "
                        f"{first} and {value} on rank {other}; start every rank with the same "
                        "command and code"
                    )


def check_own_devices(devices: Sequence[torch.device], *, backend: str) -> None:
    """Compare the ranks' GPUs, of which NCCL wants another for each. Collective: every rank.

    Raises:
        UserError: on every rank, naming two ranks that have the same one.
    """
    if backend != "nccl":
        return
    owners: dict[str, int] = {}
    own = [str(torch.cuda.get_device_properties(one).uuid) for one in devices]
    for rank, uuids in enumerate(gather_objects(own)):
        for uuid in set(uuids):
            if owners.setdefault(uuid, rank) != rank:
                raise UserError(
                    f"ranks {owners[uuid]} and {rank} both have GPU {uuid}, which backend=nccl "
                    "cannot do; start as many ranks as there are GPUs, or write backend=gloo "
                    "backend.device=cpu"
                )


class StopVote:
    """Agreement of all ranks on the step at which they stop.

    The vote of one step is counted in the next, so that the collective runs beside the step's
    computation and costs the loop next to nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None

    def agreed(self, want_stop: bool) -> bool:
        """Return True on all ranks alike once any wanted it. Collective: every rank, every step."""
        if dist.get_world_size(self._group) == 1:
            return want_stop
        if self._pending is not None:
            self._pending.wait()
            if self._flag.item():
                return True
        self._flag.fill_(want_stop)
        self._pending = dist.all_reduce(
            self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return False

    def close(self) -> None:
        """Count the last vote, so that no collective is left open. Collective: every rank."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
