"""How many ranks a config starts, and how its global batch is split among them. Torch-free."""

from collections.abc import Collection

from ddp_runner.config.schema import Batch, Config, mode_needs, num_shares
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.host.accelerators import FOR_CPU
from ddp_runner.host.hardware import Hardware

MOST_RANKS_A_CORE = 64  # a rank takes some 100 MiB, and a collective waits for the slowest rank


def num_ranks(config: Config, hardware: Hardware, env: DistEnv | None) -> int:
    """Return the number of ranks over all machines.

    Raises:
        UserError: it is no number, or not that of the ranks that run already.
    """
    asked, launch = config.world_size, config.launch
    if asked != "auto" and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
        raise UserError(f"world_size ({asked}) must be a whole number of ranks from 1 up, or auto")
    if env is not None:
        if asked not in ("auto", env.world_size):
            raise UserError(
                f"world_size ({asked}) differs from the {env.world_size} ranks that were launched; "
                "leave it out, or launch as many"
            )
        return env.world_size
    if asked != "auto":
        return int(asked)
    if launch.nproc_per_node is not None:
        return launch.nproc_per_node * launch.nnodes
    needs = mode_needs(config.parallelism)
    if needs.max_ranks is not None:
        return needs.max_ranks
    alone = hardware.backend in FOR_CPU  # no tensor of theirs travels between ranks
    gpus = 0 if alone or config.backend.device == "cpu" else hardware.num_gpus
    per_node = gpus // needs.devices_per_rank
    return max(needs.min_ranks, (per_node or min(2, hardware.num_cores)) * launch.nnodes)


def num_local_ranks(config: Config, hardware: Hardware, ranks: int) -> int:
    """Return the number of ranks of each machine.

    Raises:
        UserError: the machines cannot share the ranks equally, or would never meet.
    """
    launch, num_nodes = config.launch, config.launch.nnodes
    if num_nodes > 1 and launch.rdzv_endpoint is None:
        raise UserError(
            f"launch.nnodes ({launch.nnodes}) needs launch.rdzv_endpoint=HOST:PORT, "
            "the same on every machine"
        )
    nproc = launch.nproc_per_node or ranks // num_nodes
    most = MOST_RANKS_A_CORE * hardware.num_cores
    if nproc > most:
        raise UserError(
            f"{nproc} ranks on a machine of {hardware.num_cores} cores would never meet; write "
            f"world_size={most * num_nodes} or less"
        )
    if nproc * num_nodes != ranks:
        raise UserError(
            f"launch.nnodes ({num_nodes}) times launch.nproc_per_node ({nproc}) is not "
            f"world_size ({ranks}); leave world_size out, or make them agree"
        )
    return nproc


def resolve_batch(config: Config, ranks: int, chosen: Collection[str] = ()) -> Batch:
    """Return the batch sizes with both filled in.

    Raises:
        UserError: neither or both sizes are given, or the ranks do not divide the global size.
    """
    total, per_rank = config.batch.global_size, config.batch.per_rank
    if total is not None and per_rank is not None:
        # The key that the user wrote wins over the default or an experiment's choice.
        explicit = {"batch.global_size", "batch.per_rank"} & set(chosen)
        if len(explicit) == 2:
            raise UserError(
                f"batch.global_size ({total}) and batch.per_rank ({per_rank}) exclude each other; "
                "give one, the other follows"
            )
        if explicit == {"batch.per_rank"}:
            total = None
    shares = num_shares(config.parallelism, ranks)
    num_micro_steps = config.train.grad_accum_steps
    parts = shares * num_micro_steps
    if total is None:
        if per_rank is None:
            raise UserError("batch.global_size and batch.per_rank are both null; give one of them")
        total = per_rank * parts
        return Batch(**vars(config.batch) | {"global_size": total, "per_rank": per_rank})
    if total % parts:
        below, above = total // parts * parts, (total // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        divisor = f"{_who(config, ranks, shares)} ({shares})"
        if num_micro_steps > 1:
            divisor += f" x train.grad_accum_steps ({num_micro_steps})"
        raise UserError(f"batch.global_size ({total}) is not divisible by {divisor}; use {nearest}")
    return Batch(**vars(config.batch) | {"global_size": total, "per_rank": total // parts})


def _who(config: Config, ranks: int, shares: int) -> str:
    """Return what a global batch is split among, in the words of the mode."""
    if mode_needs(config.parallelism).num_servers:
        return "trainers"
    return "world_size" if shares == ranks else "the ranks with samples of their own"
