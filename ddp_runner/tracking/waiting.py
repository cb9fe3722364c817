"""The sentence about the rank that the others waited for. Torch-free."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

LEAST_SHARE, LEAST_MS = 0.1, 2.0  # of a mean step; less is the noise of any machine


def waiting_line(record: Mapping[str, Any]) -> str | None:
    """Return which rank kept the others waiting, and how long; None if it hardly matters.

    Args:
        record: the fields of run.json, unchecked.
    """
    by_rank, step_ms = record.get("skew_ms_by_rank"), record.get("skew_step_ms")
    if not isinstance(by_rank, list) or not by_rank or not _is_time(step_ms):
        return None
    if not all(map(_is_time, by_rank)):
        return None
    late_ms = max(by_rank)
    if late_ms < max(LEAST_MS, LEAST_SHARE * step_ms):
        return None
    rank = by_rank.index(late_ms)
    return f"rank {rank} kept the others waiting {_ms(late_ms)} of a {_ms(step_ms)} step"


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
