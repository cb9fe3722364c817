"""Speedup and efficiency: the speed on more devices relative to the speed on the fewest."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.compare.rows import ComparisonRow, Scaling
from ddp_runner.compare.run import Stat
from ddp_runner.compare.settings import BATCH_SIZES, Setting, counted, identity


@dataclass(frozen=True)
class _Speed:
    index: int  # of the row
    setting: Setting
    num_devices: int
    samples_per_s: Stat


def scalings(
    rows: Sequence[ComparisonRow], *, batch_key: str, include_parallel_jobs: bool
) -> list[Scaling | None]:
    """Return the scaling of each row among those that differ in ranks and devices alone.

    Args:
        rows: Without scalings.
        batch_key: The constant batch size: global for strong, per rank for weak scaling.
        include_parallel_jobs: Count runs that shared the machine with parallel jobs.
    """
    free = ["world_size", "num_devices", *BATCH_SIZES]
    free += ["parallel_jobs"] if include_parallel_jobs else []
    # The speeds by everything except the mode, then by the mode.
    groups: dict[str, dict[str, list[_Speed]]] = {}
    for index, row in enumerate(rows):
        setting, stat = row.runs[0].setting, row.samples_per_s
        is_left_out = setting["parallel_jobs"] and not include_parallel_jobs
        if stat and stat.mean and setting.get(batch_key) is not None and not is_left_out:
            same = f"{identity(setting, without=[*free, 'parallelism.'])}\n{setting[batch_key]!r}"
            modes = groups.setdefault(same, {})
            speeds = modes.setdefault(identity(setting, without=free), [])
            speeds.append(_Speed(index, setting, row.num_devices, stat))

    results: list[Scaling | None] = [None] * len(rows)
    for modes in groups.values():
        on_one_device = [_on(1, speeds) for speeds in modes.values()]
        for speeds in modes.values():
            base = _on(min(speed.num_devices for speed in speeds), speeds)
            mode = ""
            if base[0].num_devices > 1 and any(on_one_device):
                base = max(filter(None, on_one_device), key=_mean)
                mode = f"{base[0].setting.get('parallelism.name')}, "
            if any(speed.num_devices != base[0].num_devices for speed in speeds):
                for speed in (*speeds, *base):
                    scaling = _scaling(speed, base, mode, int(speed.setting[batch_key]))
                    results[speed.index] = results[speed.index] or scaling
    return results


def _on(num_devices: int, speeds: Sequence[_Speed]) -> list[_Speed]:
    return [speed for speed in speeds if speed.num_devices == num_devices]


def _scaling(speed: _Speed, base: Sequence[_Speed], mode: str, batch: int) -> Scaling:
    """Return the scaling over the mean of a baseline, whose name begins with `mode`."""
    world_size, num_devices = base[0].setting["world_size"], base[0].num_devices
    devices = "" if world_size == num_devices else f", {counted(num_devices, 'device')}"
    base_speed, sd = _mean(base), speed.samples_per_s.sd
    speedup = speed.samples_per_s.mean / base_speed
    return Scaling(
        batch=batch,
        base=f"{mode}{counted(world_size, 'rank')}{devices}",
        base_index=base[0].index,
        base_num_devices=num_devices,
        speedup=speedup,
        speedup_sd=None if sd is None else sd / base_speed,
        efficiency=speedup * num_devices / speed.num_devices,
    )


def _mean(speeds: Sequence[_Speed]) -> float:
    return statistics.fmean(speed.samples_per_s.mean for speed in speeds)
