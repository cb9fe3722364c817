"""Speedup and efficiency: what more devices make of the speed of the fewest."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.compare.settings import BATCH, Setting, identity, place

SUPERLINEAR = 1.1  # an efficiency above it asks for an explanation


@dataclass(frozen=True)
class Speed:
    """How fast one setting is."""

    setting: Setting
    samples_per_s: float | None
    sd: float | None = None  # of samples_per_s, over the setting's runs


@dataclass(frozen=True)
class Scaling:
    """A setting's speed against that of its baseline."""

    batch: int  # the size that is equal: global for strong, per rank for weak scaling
    base: str  # in words
    base_index: int  # among the speeds
    base_num_devices: int
    speedup: float  # samples a second, as a multiple of the baseline's
    speedup_sd: float | None  # over the setting's runs; the baseline's mean is taken as exact
    efficiency: float  # the speedup over the ratio of the devices: 1 is ideal

    @property
    def is_superlinear(self) -> bool:
        """Whether it is more than the devices explain."""
        return self.efficiency > SUPERLINEAR


def scalings(
    speeds: Sequence[Speed], *, batch_key: str, include_packed: bool
) -> list[Scaling | None]:
    """Return each setting's scaling among those that differ by ranks and devices alone.

    The baseline is the same setting on the fewest devices. Where that is more than one device and
    another mode ran on one with all else equal, it is that run: the fastest, if several did.

    Args:
        speeds: of the settings.
        batch_key: the batch size that is equal: the global one for strong, that of a rank for weak
            scaling.
        include_packed: take packed runs as if they had run alone.
    """
    loose = ("world_size", "num_devices", *BATCH, *(("packed",) if include_packed else ()))

    def family(setting: Setting, *more: str) -> tuple[str, str]:
        return identity(setting, without=(*loose, *more)), repr(setting[batch_key])

    members: dict[tuple[str, str], list[int]] = {}
    one_device: dict[tuple[str, str], dict[tuple[str, str], list[int]]] = {}
    for index, speed in enumerate(speeds):
        setting = speed.setting
        is_left_out = setting["packed"] and not include_packed
        if speed.samples_per_s and setting.get(batch_key) is not None and not is_left_out:
            members.setdefault(family(setting), []).append(index)
            if setting["num_devices"] == 1:
                modes = one_device.setdefault(family(setting, "parallelism."), {})
                modes.setdefault(family(setting), []).append(index)

    def mean(indices: Sequence[int]) -> float:
        return statistics.fmean(speeds[index].samples_per_s or 0.0 for index in indices)

    found: list[Scaling | None] = [None] * len(speeds)
    for indices in members.values():
        sizes = {index: int(speeds[index].setting["num_devices"]) for index in indices}
        base_size = min(sizes.values())
        base = [index for index in indices if sizes[index] == base_size]
        mode = ""
        others = one_device.get(family(speeds[base[0]].setting, "parallelism."), {})
        if base_size > 1 and others:
            base, base_size = max(others.values(), key=mean), 1
            mode = f"{speeds[base[0]].setting.get('parallelism.name')}, "
        elif len(set(sizes.values())) == 1:
            continue
        base_speed, name = mean(base), mode + place(speeds[base[0]].setting)
        for index in {*indices, *base}:
            one = speeds[index]
            speedup = (one.samples_per_s or 0.0) / base_speed
            scaling = Scaling(
                batch=int(one.setting[batch_key]),
                base=name,
                base_index=base[0],
                base_num_devices=base_size,
                speedup=speedup,
                speedup_sd=None if one.sd is None else one.sd / base_speed,
                efficiency=speedup * base_size / one.setting["num_devices"],
            )
            found[index] = found[index] or scaling
    return found
