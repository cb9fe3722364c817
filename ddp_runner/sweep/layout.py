"""Where a job of a sweep will run: on this machine, or on nodes of Slurm. Torch-free."""

from dataclasses import dataclass

from ddp_runner.dist_env import DistEnv
from ddp_runner.host.hardware import Hardware


@dataclass(frozen=True)
class NodeLayout:
    """How many nodes a job takes, with as many ranks on each."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        """The world size."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True)
class JobHardware:
    """What a job may use, as far as its config depends on it."""

    hardware: Hardware  # of a node
    env: DistEnv | None = None  # the facts of its rank 0, where our launcher does not start it
