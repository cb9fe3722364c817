"""Which ranks of a launch stand for which machine."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import listed


@dataclass(frozen=True)
class Machines:
    """The machines of a launch, each by its first rank."""

    names: Mapping[int, str]  # host names by first rank, numbered where two are equal
    env: DistEnv  # of this rank

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each machine, rank 0 first."""
        return sorted(self.names)

    @property
    def is_first(self) -> bool:
        """Whether this rank stands for its machine."""
        return self.env.rank in self.names

    def listed(self, ranks: list[int]) -> str:
        """Return the names of some machines."""
        return listed([self.names[rank] for rank in ranks])


def find_machines(env: DistEnv) -> Machines:
    """Return the machines of this launch. Collective."""
    places = gather_objects((env.node_rank, socket.gethostname()))
    first: dict[int, int] = {}  # rank by node
    for rank, (node, _) in enumerate(places):
        first.setdefault(node, rank)
    hosts = [places[rank][1] for rank in first.values()]
    names = {
        rank: host if hosts.count(host) == 1 else f"{host}#{node}"
        for (node, rank), host in zip(first.items(), hosts, strict=True)
    }
    return Machines(names, env)
