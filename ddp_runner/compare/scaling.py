"""Speedup and efficiency: the speed on more devices relative to the speed on the fewest."""

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddp_runner.compare.settings import BATCH_SIZES, Setting, counted, identity
from ddp_runner.compare.stats import Stat

SUPERLINEAR = 1.1  # an efficiency above it needs an explanation


@dataclass(frozen=True)
class Scaling:
    """The speed of a setting relative to its baseline."""

    batch: int  # the constant size: global for strong scaling, per rank for weak scaling
    base: str  # in words
    base_index: int  # in the sequence of settings
    base_num_devices: int
    speedup: float  # ratio of samples per second
    speedup_sd: float | None  # over the setting's runs; takes the baseline's mean as exact
    efficiency: float  # speedup divided by the ratio of devices; 1 is ideal

    @property
    def is_superlinear(self) -> bool:
        """Whether the additional devices alone cannot explain the speedup."""
        return self.efficiency > SUPERLINEAR


@dataclass(frozen=True)
class _Speed:
    index: int  # in the sequence of settings
    setting: Setting
    samples_per_s: Stat
    num_devices: int


def scalings(
    settings: Sequence[Setting],
    samples_per_s: Sequence[Stat | None],
    *,
    batch_key: str,
    include_parallel_jobs: bool,
) -> list[Scaling | None]:
    """Return the scaling of each setting among those that differ in ranks and devices alone.

    Args:
        settings: One for each row.
        samples_per_s: Their speeds.
        batch_key: The constant batch size: global for strong, per rank for weak scaling.
        include_parallel_jobs: Count runs that shared the machine with parallel jobs.
    """
    free = ["world_size", "num_devices", *BATCH_SIZES]
    free += ["parallel_jobs"] if include_parallel_jobs else []

    def group_of(setting: Setting, *more: str) -> str:
        return f"{identity(setting, without=[*free, *more])}\n{setting[batch_key]!r}"

    groups: dict[str, list[_Speed]] = {}
    # The members on one device, by everything except the mode, then by group.
    one_device: dict[str, dict[str, list[_Speed]]] = {}
    for index, (setting, stat) in enumerate(zip(settings, samples_per_s, strict=True)):
        is_left_out = setting["parallel_jobs"] and not include_parallel_jobs
        if stat and stat.mean and setting.get(batch_key) is not None and not is_left_out:
            speed = _Speed(index, setting, stat, int(setting["num_devices"]))
            groups.setdefault(group_of(setting), []).append(speed)
            if speed.num_devices == 1:
                modes = one_device.setdefault(group_of(setting, "parallelism."), {})
                modes.setdefault(group_of(setting), []).append(speed)

    results: list[Scaling | None] = [None] * len(settings)
    for group in groups.values():
        modes = one_device.get(group_of(group[0].setting, "parallelism."), {})
        base, name = _baseline(group, modes.values())
        if any(speed.num_devices != base[0].num_devices for speed in group):
            for speed in (*group, *base):
                scaling = _scaling(speed, base, name, int(speed.setting[batch_key]))
                results[speed.index] = results[speed.index] or scaling
    return results


def _baseline(
    group: Sequence[_Speed], on_one_device: Collection[Sequence[_Speed]]
) -> tuple[Sequence[_Speed], str]:
    """Return the members of a group on the fewest devices, and their name.

    If these are several devices and other modes ran on one, the fastest of those modes instead.
    """
    fewest = min(speed.num_devices for speed in group)
    base: Sequence[_Speed] = [speed for speed in group if speed.num_devices == fewest]
    mode = ""
    if fewest > 1 and on_one_device:
        base = max(on_one_device, key=_mean)
        mode = f"{base[0].setting.get('parallelism.name')}, "
    world_size, num_devices = base[0].setting["world_size"], base[0].num_devices
    name = mode + counted(world_size, "rank")
    return base, name if world_size == num_devices else f"{name}, {counted(num_devices, 'device')}"


def _scaling(speed: _Speed, base: Sequence[_Speed], name: str, batch: int) -> Scaling:
    base_speed, base_num_devices = _mean(base), base[0].num_devices
    sd, speedup = speed.samples_per_s.sd, speed.samples_per_s.mean / base_speed
    return Scaling(
        batch=batch,
        base=name,
        base_index=base[0].index,
        base_num_devices=base_num_devices,
        speedup=speedup,
        speedup_sd=None if sd is None else sd / base_speed,
        efficiency=speedup * base_num_devices / speed.num_devices,
    )


def _mean(speeds: Sequence[_Speed]) -> float:
    return statistics.fmean(speed.samples_per_s.mean for speed in speeds)
