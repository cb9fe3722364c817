"""The curves of a comparison: a setting's speedup by its world size."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ddp_runner.comparison.analysis import Comparison
from ddp_runner.comparison.rows import Row
from ddp_runner.comparison.scaling import Scaling
from ddp_runner.comparison.settings import BATCH, label


@dataclass(frozen=True)
class Series:
    """One setting without its world size."""

    name: str  # in words
    base: str  # what the speedups are multiples of, in words
    speedups: Mapping[int, float]  # by world size, ascending, the baseline's first
    predicted: Mapping[int, float]  # the same; empty where nothing was predicted


def scaling_series(comparison: Comparison, kind: str) -> Iterator[Series]:
    """Yield the settings that have two world sizes or more; `kind` is strong or weak."""
    keys = [key for key in comparison.keys if key not in ("world_size", *BATCH)]
    pairs = [(row, row.strong if kind == "strong" else row.weak) for row in comparison.rows]
    found = [(row, scaling) for row, scaling in pairs if scaling is not None]
    if len({scaling.batch for _, scaling in found}) > 1:
        keys.append(BATCH[0] if kind == "strong" else BATCH[1])
    settings: dict[str, list[tuple[Row, Scaling]]] = {}
    for row, scaling in found:
        setting = {**row.setting, BATCH[0]: scaling.batch, BATCH[1]: scaling.batch}
        settings.setdefault(label(setting, keys), []).append((row, scaling))
    for name, members in settings.items():
        base = members[0][1]
        speedups = {base.base_world_size: 1.0}
        speedups |= {row.world_size: scaling.speedup for row, scaling in members}
        predicted = {
            row.world_size: row.predicted[kind].speedup
            for row, _ in members
            if kind in row.predicted
        }
        if len(speedups) > 1:
            yield Series(
                name=name,
                base=base.base,
                speedups=dict(sorted(speedups.items())),
                predicted={min(speedups): 1.0, **predicted} if predicted else {},
            )
