"""The keys of task=collectives, and what it can measure: a part of the schema. Torch-free."""

from dataclasses import dataclass, field

OPS = (
    "broadcast", "scatter", "gather", "reduce", "all_reduce", "all_gather", "reduce_scatter",
    "all_to_all", "send_recv", "barrier",
)  # fmt: skip
REDUCE_OPS = ("sum", "mean", "max", "min", "product")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")


@dataclass
class CollectivesConfig:
    """What task=collectives measures."""

    ops: list[str] | None = None  # broadcast, all_reduce, send_recv, …; null: all of them
    # sum, mean, max, min, product; null: sum, mean and max, where the backend has them
    reduce_ops: list[str] | None = None
    dtypes: list[str] = field(default_factory=lambda: ["float32"])  # of the messages
    min_bytes: int = 1024  # bytes of the smallest message, over all ranks
    max_bytes: int = 64 * 2**20  # bytes of the largest message, which is always measured
    size_factor: int = 16  # from each size to the next
    warmup_steps: int = 2  # calls of each size that are not timed
    steps: int = 10  # timed calls of each size
