"""The rendezvous of a run on several machines: torch's c10d, with an order and a plain wait.

Torch decides who takes part in a round. The machines then tell each other what they are, and the
first of them has rank 0: the one with launch.node_rank=0, else one that has the run's folder, else
the one of launch.rdzv_endpoint.

Of torch's handler it uses two private names, which torch 2.11 and 2.15 have: the state of the
rendezvous, and this node in it.
"""

import json
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch.distributed.elastic.rendezvous as rdzv
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from ddp_runner import __version__
from ddp_runner.config.sections import LaunchConfig
from ddp_runner.errors import UserError
from ddp_runner.host.patience import patiently
from ddp_runner.launch.machine import Machine, rank_order, validate_equal
from ddp_runner.launch.meeting import STORES, Meeting, open_meeting
from ddp_runner.launch.reports import LOST, Reports, store_is_lost

INTRODUCTION_S = 20.0  # torch forgets after 15 s a machine that has left while it waited
GOODBYE_S = 5.0


class Machines(rdzv.RendezvousHandler):
    """The rendezvous of several machines; its methods may block, see ``patience``.

    Args:
        launch: how they meet.
        num_ranks: of this machine; None: as many as the first machine.
        sees_run: whether this machine has the folder of the run that goes on; asked each round.
    """

    def __init__(
        self,
        launch: LaunchConfig,
        *,
        num_ranks: int | None,
        sees_run: Callable[[], bool],
    ) -> None:
        self._launch, self.num_ranks, self._sees_run = launch, num_ranks, sees_run
        self._meeting: Meeting | None = None
        self._handler: Any = None
        self._unreachable = ""  # why the store cannot be reached yet
        self.reports: Reports | None = None  # of this round

    def next_rendezvous(self) -> rdzv.RendezvousInfo:
        """Meet the other machines, and return this one's place among them.

        Raises:
            UserError: they do not fit together, or this machine cannot hold the store.
            TimeoutError, RendezvousError, RuntimeError: see ``why_not_met``.
        """
        self._end_round()
        deadline = time.monotonic() + self._launch.join_timeout_s
        if self._handler is None:
            self._open(deadline)
        while (info := self._introduced(self._handler.next_rendezvous())) is None:
            if time.monotonic() > deadline:
                raise TimeoutError
        return info

    def why_not_met(self, error: BaseException) -> str:
        """Return why the machines did not meet, for the user."""
        launch, again = self._launch, "start the same command on each machine"
        if isinstance(error, TimeoutError | rdzv.RendezvousTimeoutError):
            return (
                f"waited {launch.join_timeout_s:g} s (launch.join_timeout_s) for "
                f"{self._awaited()}, in vain; {again}"
            )
        if isinstance(error, rdzv.RendezvousGracefulExitError):
            return (
                f"the run that meets at {launch.rdzv_endpoint} was over on its other machines "
                f"before it needed this one; {again}"
            )
        if isinstance(error, rdzv.RendezvousClosedError):
            return f"the run that meets at {launch.rdzv_endpoint} has ended; {again}"
        return store_is_lost(launch)

    def waiting(self) -> str:
        """Return what this machine waits for, for the user; nothing if it has met the others."""
        if self._handler is not None:
            state = self._handler._state_holder.state
            if state.complete and self._handler._this_node in state.participants:
                return ""
        return (
            f"waiting for {self._awaited()}, up to {self._launch.join_timeout_s:g} s; start the "
            "same command on each machine"
        )

    def _awaited(self) -> str:
        launch, endpoint = self._launch, self._launch.rdzv_endpoint
        if self._handler is None:
            reason = f" ({self._unreachable})" if self._unreachable else ""
            return f"{endpoint}, where the {launch.nnodes} machines of the run meet{reason}"
        state = self._handler._state_holder.state
        num_here = max(1, len(state.participants))  # torch removes this machine at the end
        if num_here >= launch.nnodes:
            return f"a place at {endpoint}, where a run has its {num_here} machines"
        return f"{launch.nnodes - num_here} of {launch.nnodes} machines at {endpoint}"

    def _open(self, deadline: float) -> None:
        launch = self._launch
        self._meeting = open_meeting(launch, deadline=deadline, note=self._note)
        parameters = rdzv.RendezvousParameters(
            backend="c10d",
            endpoint=launch.rdzv_endpoint or "",
            run_id=launch.rdzv_id,
            min_nodes=launch.nnodes,
            max_nodes=launch.nnodes,
            # Torch knows a node by this, and containers may have one host name and process id 1.
            local_addr=f"{socket.gethostname()}/{uuid.uuid4().hex}",
            join_timeout=int(launch.join_timeout_s),
        )
        store = self._meeting.store
        before = store.compare_set(f"nnodes/{launch.rdzv_id}", "", str(launch.nnodes)).decode()
        if before != str(launch.nnodes):
            raise UserError(
                f"launch.nnodes is {launch.nnodes} here and {before} on the machines that came "
                "before; start the same command on each machine"
            )
        backend = C10dRendezvousBackend(store, launch.rdzv_id)
        self._handler = create_handler(store, backend, parameters)

    def _note(self, reason: str) -> None:
        self._unreachable = reason

    def _introduced(self, info: rdzv.RendezvousInfo) -> rdzv.RendezvousInfo | None:
        """Tell the machines of a round of each other; None: one of them has left meanwhile."""
        assert self._meeting is not None
        own = Machine(
            host=socket.gethostname(),
            address=self._meeting.address,
            num_ranks=self.num_ranks,
            number=self._launch.node_rank,
            serves=self._meeting.is_served_here,
            sees_run=self._sees_run(),
            version=__version__,
        )
        keys = [f"machine/{place}" for place in range(info.world_size)]
        info.store.set(keys[info.rank], json.dumps(asdict(own)))
        try:
            info.store.wait(keys, timedelta(seconds=INTRODUCTION_S))
        except STORES.DistStoreError:
            return None
        facts = [json.loads(info.store.get(key)) for key in keys]
        for one in facts:
            if one.get("version") != own.version:
                raise UserError(
                    f"{own.host} runs ddp_runner {own.version} and {one['host']} "
                    f"{one.get('version', 'another')}; install the same version on each machine"
                )
        machines = [Machine(**one) for one in facts]
        order = rank_order(machines)
        self.num_ranks = machines[order[0]].num_ranks or 1  # if it is unknown, no rank will go on
        machines = [replace(one, num_ranks=one.num_ranks or self.num_ranks) for one in machines]
        validate_equal(machines)
        place = order.index(info.rank)
        ordered = [machines[one] for one in order]
        self.reports = Reports(ordered, place, store=info.store, launch=self._launch)
        meeting_point = rdzv.RendezvousStoreInfo.build(
            place, STORES.PrefixStore("ranks", info.store), local_addr=own.address
        )
        return rdzv.RendezvousInfo(info.store, place, info.world_size, meeting_point)

    @property
    def use_agent_store(self) -> bool:
        """Return False: the ranks meet at a store of rank 0, a new one each round."""
        return False

    def num_nodes_waiting(self) -> int:
        """Return 0: torch's agent would restart the ranks for a spare machine."""
        return 0

    def get_backend(self) -> str:
        """Return the name of the rendezvous."""
        return "c10d"

    def get_run_id(self) -> str:
        """Return launch.rdzv_id."""
        return self._launch.rdzv_id

    def is_closed(self) -> bool:
        """Return whether the run has ended on all machines."""
        return bool(self._handler.is_closed()) if self._handler else False

    def set_closed(self) -> None:
        """Let no machine join any more."""
        if self._handler is not None:
            self._handler.set_closed()

    def shutdown(self) -> bool:
        """End the rendezvous for all machines."""
        self._end_round()
        if self._handler is not None:
            with suppress(*LOST):  # the store is gone: nothing is left to end
                patiently(self._handler.shutdown, limit_s=GOODBYE_S)
        return True

    def _end_round(self) -> None:
        if self.reports is not None:
            self.reports.close()
        self.reports = None
