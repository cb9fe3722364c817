"""The machines for a job of a sweep. Torch-free."""

from dataclasses import dataclass

from ddp_runner.dist_env import DistEnv
from ddp_runner.host.hardware import Hardware


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a job, each with the same number of ranks."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        """The world size."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True)
class JobHardware:
    """The hardware on which a job's config depends."""

    hardware: Hardware  # of one node
    env: DistEnv | None = None  # of rank 0, if srun starts the ranks
