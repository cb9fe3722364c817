"""What ``task=collectives`` may be asked for; called by ``rules``, hence torch-free.

The operations themselves are in ``collective_ops``.
"""

import difflib
from collections.abc import Sequence

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError

OPS = (
    *("broadcast", "scatter", "gather", "reduce", "all_reduce", "all_gather"),
    *("reduce_scatter", "all_to_all", "send_recv", "barrier"),
)
REDUCE_OPS = ("sum", "mean", "max", "min", "product")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")


def validate_collectives(config: Config, *, num_ranks: int) -> None:
    """Refuse values that the collectives benchmark cannot measure.

    Raises:
        UserError: a number is out of range, a name is unknown, or there is no rank to talk to.
    """
    asked = config.collectives
    for key, value, least in (
        ("min_bytes", asked.min_bytes, 1),
        ("max_bytes", asked.max_bytes, 1),
        ("size_factor", asked.size_factor, 2),
        ("steps", asked.steps, 1),
        ("warmup_steps", asked.warmup_steps, 0),
    ):
        if value < least:
            raise UserError(f"collectives.{key} ({value}) must be {least} or greater")
    if asked.min_bytes > asked.max_bytes:
        raise UserError(
            f"collectives.min_bytes ({asked.min_bytes}) is greater than collectives.max_bytes "
            f"({asked.max_bytes}); give both, the smaller as min_bytes"
        )
    _validate_names("ops", asked.ops, OPS)
    _validate_names("dtypes", asked.dtypes, DTYPES)
    _validate_names("reduce_ops", asked.reduce_ops, REDUCE_OPS)
    if config.task == "collectives" and num_ranks < 2:
        raise UserError(
            f"task=collectives measures what ranks send each other, world_size is {num_ranks}; "
            "write world_size=2 or more"
        )


def message_sizes(config: Config) -> list[int]:
    """Return the sizes in bytes that are asked for, ascending; max_bytes is always among them."""
    asked, sizes = config.collectives, []
    size = asked.min_bytes
    while size < asked.max_bytes:
        sizes.append(size)
        size *= asked.size_factor
    return [*sizes, asked.max_bytes]


def _validate_names(key: str, names: Sequence[str] | None, known: Sequence[str]) -> None:
    if names is None:
        return
    for name in names:
        if name not in known:
            matches = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {matches[0]}?" if matches else ""
            raise UserError(f"collectives.{key} ({name}) must be among {', '.join(known)}{hint}")
    if not names or len(set(names)) < len(names):
        raise UserError(
            f"collectives.{key} ([{', '.join(names)}]) must name at least one, and none twice; "
            f"choose from {', '.join(known)}"
        )
