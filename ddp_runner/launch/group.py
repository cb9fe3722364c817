"""The machines of one attempt, and what each of their ranks is told, in torchrun's variables."""

import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_runner.errors import UserError, counted, listed
from ddp_runner.job import Failure, Job

ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True)
class Group:
    """The machines that take part in one attempt, in the order of their ranks."""

    hosts: Sequence[str]
    place: int  # of this machine
    num_ranks: int  # of each machine
    address: str = "localhost"  # of the machine with rank 0
    port: int = 0  # where rank 0 serves the store; on one machine ranks meet at a file

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

    def environs(self, job: Job) -> list[dict[str, str]]:
        """Return the variables that torchrun sets, for each rank of this machine."""
        launch = job.config.launch
        shared = {
            "WORLD_SIZE": len(self.hosts) * self.num_ranks,
            "LOCAL_WORLD_SIZE": self.num_ranks,
            "GROUP_RANK": self.place,
            "GROUP_WORLD_SIZE": len(self.hosts),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "TORCHELASTIC_RESTART_COUNT": len(job.earlier),
            "TORCHELASTIC_MAX_RESTARTS": launch.max_restarts,
            "TORCHELASTIC_RUN_ID": launch.rdzv_id if launch.nnodes > 1 else uuid.uuid4().hex,
            "TORCHELASTIC_USE_AGENT_STORE": False,
            # Torch's agent sets it too: a rank that waits too long in NCCL is aborted.
            ASYNC_ERROR_HANDLING: os.environ.get(ASYNC_ERROR_HANDLING, "1"),
        }
        own = [
            {"RANK": rank, "LOCAL_RANK": rank % self.num_ranks} for rank in self.ranks(self.place)
        ]
        return [{key: str(value) for key, value in {**shared, **one}.items()} for one in own]


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


class OneMachine:
    """The machines of a run that has one: it waits for nobody.

    Attributes:
        must_end: ranks of another machine have failed, or contact with the machines is lost.
        timed_out: some of those ranks have waited in vain.
        has_ended: the ranks of another machine have ended well.
    """

    must_end = timed_out = has_ended = False

    def __init__(self, job: Job) -> None:
        self._job = job

    def join(self, is_stopped: Callable[[], bool]) -> Group | None:
        """Return the machines of the next attempt; None: it was stopped meanwhile."""
        return Group([socket.gethostname()], 0, self._job.config.world_size)

    def all_ended(self) -> bool | None:
        """Return whether all ranks of the run have ended well; None: wait.

        Those of this machine have.
        """
        return True

    def first_failure(self, own: Failure) -> Failure:
        """Return what failed first, given what did on this machine."""
        return own

    def close(self) -> None:
        """Leave the others."""
