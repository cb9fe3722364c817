"""How the machines of a run meet: torch's c10d rendezvous, with a fixed number of machines.

Torch numbers the machines in the order of their names, so the name that a machine takes here says
where its ranks come: first the machine with launch.node_rank=0, else one that has the folder of the
run, else the one that serves the store.
"""

import json
import logging
import math
import os
import pickle
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed.elastic.rendezvous as rdzv
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from ddp_runner.config.sections import LaunchConfig
from ddp_runner.errors import UserError, counted, listed
from ddp_runner.host.patience import StoppedError, patiently
from ddp_runner.launch.meeting import STORES, open_store

LOST = (RuntimeError, OSError, rdzv.RendezvousError)  # of a store whose machine is gone
INTRODUCTION_S = 20.0  # torch forgets after 15 s a machine that has left while it waited
JOIN_GRACE_S = 10.0  # beyond launch.join_timeout_s, for torch to notice the time itself
GOODBYE_S = 5.0
NO_NUMBER = 2**31  # sorts after every launch.node_rank


@dataclass(frozen=True)
class Group:
    """The machines that take part in one attempt, in the order of their ranks."""

    hosts: Sequence[str]
    place: int  # of this machine
    num_ranks: int  # of each machine
    store: Any  # of this attempt
    serves: bool  # this machine holds the store

    def ranks(self, place: int) -> range:
        """Return the ranks of a machine."""
        return range(place * self.num_ranks, (place + 1) * self.num_ranks)

    def described(self, place: int) -> str:
        """Return a machine's name and ranks, for the user."""
        numbers = listed(list(map(str, self.ranks(place))))
        return f"{self.hosts[place]} (rank{'s' * (self.num_ranks > 1)} {numbers})"

    def with_host(self, sentence: str, rank: int) -> str:
        """Return why a rank failed, with its machine."""
        host, name = self.hosts[rank // self.num_ranks], f"rank {rank}"
        if name not in sentence:
            return f"on {host}: {sentence}"
        return sentence.replace(name, f"{name} on {host}", 1)


class Meeting:
    """Where this machine meets the others, again for each attempt.

    Args:
        launch: how they meet.
        num_ranks: of this machine; None: as many as the first machine that knows.
        sees_run: whether this machine has the folder of the run that is resumed.
    """

    def __init__(self, launch: LaunchConfig, *, num_ranks: int | None, sees_run: bool) -> None:
        self._launch, self._num_ranks, self._sees_run = launch, num_ranks, sees_run
        self._serves, self._name = False, ""
        self._backend: Backend | None = None
        self._handler: rdzv.RendezvousHandler | None = None
        self._unreachable: list[str] = []  # why the store could not be reached, each time

    def join(self, stop_requested: Callable[[], bool]) -> Group:
        """Wait until all machines have come, and say what is missing.

        Raises:
            StoppedError: a stop was requested meanwhile.
            UserError: the machines do not meet, or do not fit together.
        """
        limit_s = self._launch.join_timeout_s + JOIN_GRACE_S
        try:
            return patiently(
                self._join, limit_s=limit_s, stop_requested=stop_requested, notice=self._waiting
            )
        except LOST as error:
            if stop_requested():  # another machine may have ended for the same reason
                raise StoppedError from error
            raise UserError(self._why_not_met(error)) from error

    def close(self) -> None:
        """End the rendezvous for all machines."""
        if self._handler is not None:
            with suppress(*LOST):  # the store is gone: nothing is left to end
                patiently(self._handler.shutdown, limit_s=GOODBYE_S)

    def _join(self) -> Group:
        deadline = time.monotonic() + self._launch.join_timeout_s
        if self._handler is None:
            self._handler = self._open(deadline)
        while (group := self._introduced(self._handler.next_rendezvous())) is None:
            if time.monotonic() > deadline:
                raise TimeoutError
        return group

    def _open(self, deadline: float) -> rdzv.RendezvousHandler:
        launch, nnodes = self._launch, self._launch.nnodes
        store, self._serves = open_store(launch, deadline=deadline, note=self._unreachable.append)
        before = store.compare_set(f"nnodes/{launch.rdzv_id}", "", str(nnodes)).decode()
        if before != str(nnodes):
            raise UserError(
                f"launch.nnodes is {nnodes} here and {before} on the machines that came before; "
                "start the same command on each machine"
            )
        number = NO_NUMBER if launch.node_rank is None else launch.node_rank
        # Containers may have one host name and process id 1.
        unique = f"{socket.gethostname()}/{uuid.uuid4().hex}"
        self._name = f"{number:010}/{not self._sees_run:d}/{not self._serves:d}/{unique}"
        # Torch would serve one more store, at the address that the name is to it.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if "LOGLEVEL" not in os.environ:  # torch's own warning of a lost store, which we name
            logging.getLogger(create_handler.__module__).setLevel(logging.CRITICAL)
        self._backend = Backend(store, launch.rdzv_id)
        parameters = rdzv.RendezvousParameters(
            backend=self._backend.name,
            endpoint=launch.rdzv_endpoint or "",
            run_id=launch.rdzv_id,
            min_nodes=nnodes,
            max_nodes=nnodes,
            local_addr=self._name,
            join_timeout=math.ceil(launch.join_timeout_s),
        )
        return create_handler(store, self._backend, parameters)

    def _introduced(self, info: rdzv.RendezvousInfo) -> Group | None:
        """Return the machines of an attempt; None: one of them has left meanwhile."""
        own = {
            "host": socket.gethostname(),
            "number": self._launch.node_rank,
            "num_ranks": self._num_ranks,
        }
        keys = [f"machine/{place}" for place in range(info.world_size)]
        info.store.set(keys[info.rank], json.dumps(own))
        try:
            info.store.wait(keys, timedelta(seconds=INTRODUCTION_S))
        except STORES.DistStoreError:
            return None
        machines = [json.loads(info.store.get(key)) for key in keys]
        self._num_ranks = equal_ranks(machines)
        hosts = [one["host"] for one in machines]
        return Group(hosts, info.rank, self._num_ranks, info.store, self._serves)

    def _waiting(self) -> str:
        """Return what this machine waits for; nothing once all have come."""
        here = self._backend.here if self._backend else ()
        if len(here) >= self._launch.nnodes and self._name in here:
            return ""
        return (
            f"waiting for {self._awaited()}, up to {self._launch.join_timeout_s:g} s; start the "
            "same command on each machine"
        )

    def _awaited(self) -> str:
        nnodes, endpoint = self._launch.nnodes, self._launch.rdzv_endpoint
        if self._backend is None:
            reason = f" ({self._unreachable[-1]})" if self._unreachable else ""
            return f"{endpoint}, where the {nnodes} machines of the run meet{reason}"
        num_here = max(1, len(self._backend.here))  # torch removes this machine at the end
        if num_here >= nnodes:
            return f"a place at {endpoint}, where a run has its {nnodes} machines"
        return f"{nnodes - num_here} of {nnodes} machines at {endpoint}"

    def _why_not_met(self, error: BaseException) -> str:
        launch, again = self._launch, "start the same command on each machine"
        if isinstance(error, TimeoutError | rdzv.RendezvousTimeoutError):
            return (
                f"waited {launch.join_timeout_s:g} s (launch.join_timeout_s) for "
                f"{self._awaited()}, and they did not come; {again}"
            )
        if isinstance(error, rdzv.RendezvousClosedError | rdzv.RendezvousGracefulExitError):
            return f"the run that meets at {launch.rdzv_endpoint} has ended; {again}"
        return store_is_lost(launch)


class Backend(C10dRendezvousBackend):
    """Torch's state of the rendezvous, which also notes the names of the machines that are here."""

    here: Sequence[str] = ()

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state, as torch asks for it while it waits."""
        found = super().get_state()
        if found is not None:
            self.here = [node.addr for node in pickle.loads(found[0]).participants]
        return found


def store_is_lost(launch: LaunchConfig) -> str:
    """Return that this machine does not reach the store any more, for the user."""
    return (
        f"{launch.rdzv_endpoint}, where the machines meet, is lost: its machine was switched off, "
        "its launcher has ended, or the network is down"
    )


def equal_ranks(machines: Sequence[Mapping[str, Any]]) -> int:
    """Return how many ranks each machine starts.

    Raises:
        UserError: two machines do not fit together; both are named.
    """
    first = next((one for one in machines if one["num_ranks"]), machines[0])
    numbers = dict[int | None, str]()
    for one in machines:
        if one["num_ranks"] not in (None, first["num_ranks"]):
            raise UserError(
                f"{first['host']} starts {counted(first['num_ranks'], 'rank')} and {one['host']} "
                f"{one['num_ranks']}; give each machine the same launch.nproc_per_node"
            )
        if one["number"] is not None and one["number"] in numbers:
            raise UserError(
                f"{numbers[one['number']]} and {one['host']} both have "
                f"launch.node_rank={one['number']}; give each machine its own number, or none"
            )
        numbers[one["number"]] = one["host"]
    return first["num_ranks"] or 1  # no machine knows: none has the run, and the ranks say so
