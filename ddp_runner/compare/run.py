"""One run as it was left: run.json, its config and its metrics, and what follows from them."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path  # below the path that was given
    reason: str | None = None  # why it cannot be compared; None: it can
    notes: tuple[str, ...] = ()  # what to know about one that can
    record: Mapping[str, Any] = field(default_factory=dict)  # run.json
    config: Mapping[str, Any] = field(default_factory=dict)  # dotted keys and values
    lines: tuple[Mapping[str, float | None], ...] = ()  # metrics.jsonl; None: was not finite

    @property
    def world_size(self) -> int:
        """Ranks over all machines."""
        return int(self.record["world_size"])

    @property
    def num_devices(self) -> int:
        """Devices over all machines; on the CPU a rank counts as one.

        An older run.json names rank 0's devices alone: its different GPUs, times the ranks.
        """
        count = self.record.get("num_devices")
        if isinstance(count, int) and count > 0:
            return count
        names = self.record.get("devices")
        gpus = {name for name in names if name != "cpu"} if isinstance(names, list) else ()
        return max(1, len(gpus)) * self.world_size

    @property
    def sessions(self) -> list[Mapping[str, Any]]:
        """From each start, or resume, to its end; an older run.json says nothing of them."""
        found = self.record.get("sessions")
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []

    @property
    def busy_share(self) -> float | None:
        """The part of the cores' time that others took, other machines of a hypervisor included.

        Of rank 0's machine, since the last start; None: not known.
        """
        load = self.record.get("load")
        end = load.get("end") if isinstance(load, dict) else None
        if not isinstance(end, dict):
            return None
        shares = [end.get("busy_share_others"), end.get("steal_share")]
        known = [share for share in shares if is_finite(share)]
        return sum(known) if known else None

    @property
    def seed(self) -> Any:
        """The seed of the weights, the order of the samples and their augmentation."""
        return self.config.get("seed")

    @property
    def is_packed(self) -> bool:
        """Whether it ran beside others on the same machine, so that its times say little."""
        return self.record.get("packed") is True

    @property
    def final(self) -> dict[str, float]:
        """The last value of each metric that is a finite number."""
        metrics = self.record["metrics"].items()
        return {key: float(value) for key, value in metrics if is_finite(value)}

    def number(self, name: str) -> float | None:
        """Return a field of run.json, None where it is no finite number."""
        value = self.record.get(name)
        return float(value) if is_finite(value) else None

    def values(self, metric: str) -> list[float]:
        """Return a metric's finite values, in the order of the steps."""
        found = (line.get(metric) for line in self.lines)
        return [value for value in found if value is not None]


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
