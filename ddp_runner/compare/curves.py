"""The curves of a comparison: a setting's speedup by its number of devices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.doubts import remark
from ddp_runner.compare.rows import Row
from ddp_runner.compare.scaling import Scaling
from ddp_runner.compare.settings import BATCH, label


@dataclass(frozen=True)
class Series:
    """One setting without its ranks and devices. Keys of mappings are devices."""

    name: str  # in words
    base: str  # what the speedups are multiples of, in words
    speedups: Mapping[int, float]  # ascending, the baseline's first
    spreads: Mapping[int, float]  # standard deviations of those, where there are several runs
    remarks: Mapping[int, str]  # why one is in doubt, in a few words
    predicted: Mapping[int, float]  # speedups; empty where nothing was predicted


def scaling_series(comparison: Comparison, kind: str) -> Iterator[Series]:
    """Yield the settings that ran on two numbers of devices or more; `kind` is strong or weak."""
    keys = [key for key in comparison.keys if key not in ("world_size", "num_devices", *BATCH)]
    found = [(row, row.scalings[kind]) for row in comparison.rows if kind in row.scalings]
    if len({scaling.batch for _, scaling in found}) > 1:
        keys.append(BATCH[0] if kind == "strong" else BATCH[1])
    settings: dict[str, list[tuple[Row, Scaling]]] = {}
    for row, scaling in found:
        setting = {**row.setting, BATCH[0]: scaling.batch, BATCH[1]: scaling.batch}
        settings.setdefault(label(setting, keys), []).append((row, scaling))
    for name, members in settings.items():
        base = members[0][1]
        speedups = {base.base_num_devices: 1.0}
        speedups |= {row.num_devices: scaling.speedup for row, scaling in members}
        spreads = {row.num_devices: scaling.speedup_sd for row, scaling in members}
        remarks = {row.num_devices: remark(row) for row, _ in members}
        predicted = {
            row.num_devices: row.predicted[kind].speedup
            for row, _ in members
            if kind in row.predicted
        }
        if len(speedups) > 1:
            yield Series(
                name=name,
                base=base.base,
                speedups=dict(sorted(speedups.items())),
                spreads={size: sd for size, sd in spreads.items() if sd is not None},
                remarks={size: words for size, words in remarks.items() if words is not None},
                predicted={min(speedups): 1.0, **predicted} if predicted else {},
            )
