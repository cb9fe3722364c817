"""How a global batch is divided between the ranks. Torch-free."""

from collections.abc import Collection
from dataclasses import replace

from ddp_runner.config.needs import mode_needs
from ddp_runner.config.schema import BatchConfig, Config
from ddp_runner.errors import UserError


def num_shares(config: Config, ranks: int) -> int:
    """Return into how many parts a global batch is divided."""
    mode = config.parallelism
    servers = mode_needs(mode).num_servers
    if not servers:
        return ranks
    name = mode.get("name")
    if config.task == "check":
        raise UserError(f"task=check compares equal ranks, not parallelism={name}; write ddp")
    if servers != 1:
        raise UserError(f"parallelism.needs.num_servers ({servers}) must be 1; there is one server")
    if mode.get("mode") not in ("sync", "async"):
        raise UserError(f"parallelism.mode ({mode.get('mode')}) must be sync or async")
    if ranks < 2:
        raise UserError(
            f"parallelism={name} needs a server and a trainer, world_size is {ranks}; use 2 or more"
        )
    if config.train.precision == "fp16":
        raise UserError(f"parallelism={name} has no scaled loss; write train.precision=bf16")
    return ranks - servers if mode["mode"] == "sync" else 1


def validate_num_samples(name: object, count: int, *, ranks: int) -> None:
    """Refuse a dataset with fewer samples than ranks.

    Raises:
        UserError: some ranks would have no sample.
    """
    if count < ranks:
        raise UserError(
            f"dataset={name} has {count} training samples and world_size is {ranks}; use "
            f"world_size={count} or less"
        )


def resolve_batch(config: Config, shares: int, chosen: Collection[str]) -> BatchConfig:
    """Return the batch sizes with both filled in.

    Raises:
        UserError: neither or both sizes are given, or the shares do not divide the global size.
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
        else:
            per_rank = None
    parts = shares * config.train.grad_accum_steps
    if total is None:
        if per_rank is None:
            raise UserError("batch.global_size and batch.per_rank are both null; give one of them")
        return replace(config.batch, global_size=per_rank * parts, per_rank=per_rank)
    if total % parts:
        below, above = total // parts * parts, (total // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        has_servers = mode_needs(config.parallelism).num_servers > 0
        divisor = f"{'trainers' if has_servers else 'world_size'} ({shares})"
        if config.train.grad_accum_steps > 1:
            divisor += f" x train.grad_accum_steps ({config.train.grad_accum_steps})"
        raise UserError(f"batch.global_size ({total}) is not divisible by {divisor}; use {nearest}")
    return replace(config.batch, global_size=total, per_rank=total // parts)
