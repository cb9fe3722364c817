"""The section ``plan``: the GPUs and links that ``task=plan`` assumes. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ddp_runner.config.fields import key
from ddp_runner.errors import UserError

# From the makers' data sheets: dense TFLOP/s by train.precision; GB/s in one direction.
_HOPPER = {"fp32": 67.0, "tf32": 494.0, "bf16": 989.0, "fp16": 989.0}
TFLOPS: Mapping[str, Mapping[str, float]] = {
    "h100": _HOPPER,
    "h200": _HOPPER,
    "a100": {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0},
}
_NODE = {"ranks_per_node": 8, "latency_us": 10.0}
FIGURES: Mapping[str, Mapping[str, float]] = {
    "h100": _NODE | {"memory_gib": 80.0, "node_gb_s": 450.0, "net_gb_s": 50.0},
    "h200": _NODE | {"memory_gib": 140.0, "node_gb_s": 450.0, "net_gb_s": 50.0},
    "a100": _NODE | {"memory_gib": 80.0, "node_gb_s": 300.0, "net_gb_s": 25.0},
}


def _validate_gpu(name: str) -> None:
    if name not in FIGURES:
        raise UserError(
            f"plan.gpu ({name}) must be {', '.join(FIGURES)} or null",
            "for another GPU leave it out, and write plan.tflops=N plan.memory_gib=N "
            "plan.ranks_per_node=N plan.node_gb_s=N plan.net_gb_s=N plan.latency_us=N",
        )


@dataclass
class PlanConfig:
    """The GPUs of task=plan. Without figures it has no times and no verdict."""

    gpu: str | None = key(
        None,
        "h100, h200 or a100: fills in the keys below that are null, but efficiency",
        validate=_validate_gpu,
    )
    tflops: float | None = key(None, "peak TFLOP/s of a GPU in train.precision", above=0)
    memory_gib: float | None = key(None, "memory of a GPU", unit="GiB", above=0)
    ranks_per_node: int | None = key(None, "GPUs of a machine", above=0)
    node_gb_s: float | None = key(
        None, "GB/s that a GPU sends to those of its machine", unit="GB/s", above=0
    )
    net_gb_s: float | None = key(
        None,
        "GB/s that a GPU sends to other machines, over a link of its own",
        unit="GB/s",
        above=0,
    )
    latency_us: float | None = key(None, "of a hop of a collective", unit="microseconds", least=0)
    efficiency: float = key(
        0.4, "share of tflops that the run reaches; perf/mfu measures it", above=0, most=1
    )
    rank: int = key(0, "the rank to trace", least=0)


def filled_in(plan: PlanConfig, *, precision: str) -> PlanConfig:
    """Return the section with the figures of its gpu where it has none of its own."""
    if plan.gpu is None:
        return plan
    figures: dict[str, Any] = {**FIGURES[plan.gpu], "tflops": TFLOPS[plan.gpu][precision]}
    return replace(plan, **{name: figures[name] for name in missing(plan)})


def missing(plan: PlanConfig) -> list[str]:
    """Return the keys of the figures that are null."""
    names = [item.name for item in fields(plan) if item.name != "gpu"]
    return [name for name in names if getattr(plan, name) is None]
