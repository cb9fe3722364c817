"""Speedup and efficiency: what more ranks make of the speed of the fewest."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.comparison.settings import BATCH, Setting, identity, label, ranks


@dataclass(frozen=True)
class Speed:
    """How fast one setting is."""

    setting: Setting
    samples_per_s: float | None


@dataclass(frozen=True)
class Scaling:
    """A setting's speed against that of its baseline."""

    batch: int  # the size that is equal: global for strong, per rank for weak scaling
    base: str  # in words
    base_index: int  # among the speeds
    base_world_size: int
    speedup: float  # samples a second, as a multiple of the baseline's
    efficiency: float  # the speedup over that of the ranks: 1 is ideal


def scalings(
    speeds: Sequence[Speed], *, batch_key: str, include_packed: bool
) -> list[Scaling | None]:
    """Return each setting's scaling among those that differ by world size alone.

    The baseline is the smallest world size of the same setting. Where that is more than one rank
    and another mode ran in one process with all else equal, it is that run: the fastest, if
    several did.

    Args:
        speeds: of the settings.
        batch_key: the batch size that is equal: the global one for strong, that of a rank for weak
            scaling.
        include_packed: take packed runs as if they had run alone.
    """
    loose = ("world_size", *BATCH, *(("packed",) if include_packed else ()))

    def family(setting: Setting, *more: str) -> tuple[str, str]:
        return identity(setting, without=(*loose, *more)), repr(setting[batch_key])

    members: dict[tuple[str, str], list[int]] = {}
    one_process: dict[tuple[str, str], dict[tuple[str, str], list[int]]] = {}
    for index, speed in enumerate(speeds):
        setting = speed.setting
        is_left_out = setting["packed"] and not include_packed
        if speed.samples_per_s and setting.get(batch_key) is not None and not is_left_out:
            members.setdefault(family(setting), []).append(index)
            if setting["world_size"] == 1:
                modes = one_process.setdefault(family(setting, "parallelism."), {})
                modes.setdefault(family(setting), []).append(index)

    def mean(indices: Sequence[int]) -> float:
        return statistics.fmean(speeds[index].samples_per_s or 0.0 for index in indices)

    found: list[Scaling | None] = [None] * len(speeds)
    for indices in members.values():
        sizes = {index: int(speeds[index].setting["world_size"]) for index in indices}
        base_size = min(sizes.values())
        base = [index for index in indices if sizes[index] == base_size]
        name = ranks(base_size)
        others = one_process.get(family(speeds[base[0]].setting, "parallelism."), {})
        if base_size > 1 and others:
            base, base_size = max(others.values(), key=mean), 1
            name = label(speeds[base[0]].setting, ("parallelism.name", "world_size"))
        elif len(set(sizes.values())) == 1:
            continue
        base_speed = mean(base)
        for index in {*indices, *base}:
            speedup = (speeds[index].samples_per_s or 0.0) / base_speed
            ideal = speeds[index].setting["world_size"] / base_size
            batch = int(speeds[index].setting[batch_key])
            scaling = Scaling(batch, name, base[0], base_size, speedup, speedup / ideal)
            found[index] = found[index] or scaling
    return found
