"""The machines of one attempt, and the torchrun variables that each rank gets."""

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_runner.errors import counted, listed
from ddp_runner.job import Failure, Job

ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True)
class Group:
    """The machines that take part in one attempt, in the order of their ranks."""

    hosts: Sequence[str]
    index: int  # this machine's position in `hosts`
    num_ranks: int  # per machine
    address: str = "localhost"  # of the machine with rank 0
    port: int = 0  # where rank 0 serves the store; on one machine ranks meet at a file

    def ranks(self, index: int) -> range:
        """Return the ranks of a machine."""
        return range(index * self.num_ranks, (index + 1) * self.num_ranks)

    def described(self, index: int) -> str:
        """Return a machine's name and ranks, for the user."""
        numbers = listed(list(map(str, self.ranks(index))))
        return f"{self.hosts[index]} (rank{'s' * (self.num_ranks > 1)} {numbers})"

    def with_host(self, sentence: str, rank: int) -> str:
        """Return the sentence about a rank's failure, with the rank's machine."""
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
            "GROUP_RANK": self.index,
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
        strings = {key: str(value) for key, value in shared.items()}
        return [
            {**strings, "RANK": str(rank), "LOCAL_RANK": str(rank % self.num_ranks)}
            for rank in self.ranks(self.index)
        ]


@dataclass(frozen=True)
class MachineFacts:
    """What a machine tells the hub when it joins."""

    host: str
    nnodes: int  # this and the next two are keys of its launch section
    rdzv_id: str
    node_rank: int | None
    num_ranks: int | None  # that it starts; None: it lacks the run to resume
    sees_run: bool  # whether it sees the run's folder
    serves: bool  # whether it serves the hub
    port: int  # where the ranks meet if it has rank 0


def mismatch(machines: Sequence[MachineFacts]) -> str | None:
    """Return how the facts of two machines contradict each other, and the fix."""
    first = next((facts for facts in machines if facts.num_ranks), machines[0])
    hosts = dict[int, str]()  # by launch.node_rank
    for facts in machines:
        if facts.num_ranks not in (None, first.num_ranks):
            return (
                f"{first.host} starts {counted(first.num_ranks or 0, 'rank')} and {facts.host} "
                f"{facts.num_ranks}; give each machine the same launch.nproc_per_node"
            )
        if facts.node_rank in hosts:
            return (
                f"{hosts[facts.node_rank]} and {facts.host} both have "
                f"launch.node_rank={facts.node_rank}; give each machine its own number, or none"
            )
        if facts.node_rank is not None:
            hosts[facts.node_rank] = facts.host
    return None


class OneMachine:
    """The only machine of a run: it waits for no other.

    Attributes:
        must_end: ranks of another machine have failed, or contact with the machines is lost.
        timed_out: some of those ranks timed out waiting for a peer.
        has_ended: the ranks of another machine have ended well.
    """

    must_end = timed_out = has_ended = False

    def __init__(self, job: Job) -> None:
        self._job = job

    def join(self, is_stopped: Callable[[], bool]) -> Group | None:
        """Return the machines of the next attempt; None if a stop was requested first."""
        return Group([socket.gethostname()], 0, self._job.config.num_processes)

    def all_ended(self) -> bool | None:
        """Return whether all ranks of the run ended well; None: wait. This machine's have."""
        return True

    def agree_on_failure(self, failure: Failure) -> Failure:
        """Return the run's first failure, given the first failure on this machine."""
        return failure

    def close(self) -> None:
        """Leave the other machines."""
