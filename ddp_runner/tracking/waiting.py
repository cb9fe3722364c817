"""The sentence about the ranks that the others waited for. Torch-free."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

LEAST_SHARE, LEAST_MS = 0.1, 2.0  # of a mean step; less is the noise of any machine
MOST_NAMED = 4  # ranks


def waiting_line(record: Mapping[str, Any]) -> str | None:
    """Return which ranks kept the others waiting, and how long; None if it hardly matters.

    Ranks that are late together or in turns, as those of a busy machine are, are named in their
    order; of many only the latest.

    Args:
        record: the fields of run.json, unchecked.
    """
    by_rank, step_ms = record.get("skew_ms_by_rank"), record.get("skew_step_ms")
    if not isinstance(by_rank, list) or not by_rank or not _is_time(step_ms):
        return None
    if not all(map(_is_time, by_rank)):
        return None
    most_ms = max(by_rank)
    if most_ms < max(LEAST_MS, LEAST_SHARE * step_ms):
        return None
    of_a_step = f"of a step of {_ms(step_ms)}"
    late = {rank: ms for rank, ms in enumerate(by_rank) if ms >= most_ms / 2}
    if len(late) == 1:
        return f"rank {min(late)} kept the others waiting {_ms(most_ms)} {of_a_step}"
    latest = sorted(sorted(late, key=lambda rank: -late[rank])[:MOST_NAMED])
    more = ["…"] if len(late) > MOST_NAMED else []
    ranks = ", ".join([*map(str, latest), *more])
    times = ", ".join([*(_ms(late[rank]) for rank in latest), *more])
    whom = "each other" if len(late) == len(by_rank) else "the others"
    return f"ranks {ranks} kept {whom} waiting: {times} {of_a_step}"


def _is_time(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
