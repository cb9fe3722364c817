"""Rank facts: who this process is among its peers, read from what the launcher set.

The only reader of RANK, WORLD_SIZE and their like from torchrun, Slurm and Open MPI. Imports no
torch, since ``__main__`` must know at once whether it is a launcher or a worker.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_runner.errors import UserError


@dataclass(frozen=True)
class DistEnv:
    """One rank's place in the gang, in torchrun's words."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int = 0
    restart_count: int = 0

    @property
    def is_rank_zero(self) -> bool:
        """True on the one rank that writes what the whole gang shares."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """Machines of the gang, each with the same number of ranks."""
        return self.world_size // self.local_world_size


def dist_env(environ: Mapping[str, str] | None = None) -> DistEnv | None:
    """Return this process's rank facts, or None where nobody launched it as a worker.

    Raises:
        UserError: a variable of the launcher's is missing or no number.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        world_size = _integer(environ, "WORLD_SIZE")
        return DistEnv(
            rank=_integer(environ, "RANK"),
            local_rank=_integer(environ, "LOCAL_RANK", environ["RANK"]),
            world_size=world_size,
            local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", str(world_size)),
            node_rank=_integer(environ, "GROUP_RANK", "0"),
            restart_count=_integer(environ, "TORCHELASTIC_RESTART_COUNT", "0"),
        )
    if "OMPI_COMM_WORLD_RANK" in environ:
        return DistEnv(
            rank=_integer(environ, "OMPI_COMM_WORLD_RANK"),
            local_rank=_integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
            world_size=_integer(environ, "OMPI_COMM_WORLD_SIZE"),
            local_world_size=_integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
            node_rank=_integer(environ, "OMPI_COMM_WORLD_NODE_RANK", "0"),
        )
    # One task is no gang: a launcher inside `salloc` or `srun --ntasks=1` starts its own workers.
    if "SLURM_PROCID" in environ and _integer(environ, "SLURM_NTASKS", "1") > 1:
        num_tasks, num_nodes = _integer(environ, "SLURM_NTASKS"), _integer(environ, "SLURM_NNODES")
        return DistEnv(
            rank=_integer(environ, "SLURM_PROCID"),
            local_rank=_integer(environ, "SLURM_LOCALID"),
            world_size=num_tasks,
            local_world_size=num_tasks // num_nodes,
            node_rank=_integer(environ, "SLURM_NODEID"),
        )
    return None


def _integer(environ: Mapping[str, str], key: str, default: str | None = None) -> int:
    value = environ.get(key, default)
    try:
        return int(value or "")
    except ValueError:
        raise UserError(
            f"{key} ({value}) must be a whole number where a launcher has set up a rank; "
            "unset RANK and WORLD_SIZE to let the runner start its own workers"
        ) from None
