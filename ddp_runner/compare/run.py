"""One run folder as data: run.json, the config, the metrics, and what follows from them."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path  # the path that the user gave, or a folder below it
    reason: str | None = None  # why it cannot be compared; None if it can
    notes: tuple[str, ...] = ()  # what a reader must know about it
    record: Mapping[str, Any] = field(default_factory=dict)  # run.json
    config: Mapping[str, Any] = field(default_factory=dict)  # dotted keys and values
    lines: tuple[Mapping[str, float | None], ...] = ()  # metrics.jsonl; None: not finite

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return int(self.record["world_size"])

    @property
    def num_devices(self) -> int:
        """Number of devices on all machines; on the CPU a rank counts as one.

        Earlier versions recorded only the devices of rank 0: its distinct GPUs, times the ranks.
        """
        count = self.record.get("num_devices")
        if isinstance(count, int) and count > 0:
            return count
        names = self.record.get("devices")
        gpus = {name for name in names if name != "cpu"} if isinstance(names, list) else ()
        return max(1, len(gpus)) * self.world_size

    @property
    def sessions(self) -> list[Mapping[str, Any]]:
        """One entry for the start and one for each resume; empty for earlier versions."""
        sessions = self.record.get("sessions")
        listed = sessions if isinstance(sessions, list) else []
        return [session for session in listed if isinstance(session, dict)]

    @property
    def busy_share(self) -> float | None:
        """Share of the cores' time that other work used, other virtual machines included.

        Measured on the machine of rank 0 since the last start; None if unknown.
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
        """Seed of the weights, the order of the samples and their augmentation."""
        return self.config.get("seed")

    @property
    def is_parallel_job(self) -> bool:
        """Whether other jobs of its sweep ran on the machine meanwhile and slowed it down."""
        # Earlier versions wrote `packed`.
        return self.record.get("parallel_jobs", self.record.get("packed")) is True

    @property
    def final(self) -> dict[str, float]:
        """Last value of each metric, if it is finite."""
        metrics = self.record["metrics"].items()
        return {key: float(value) for key, value in metrics if is_finite(value)}

    def number(self, name: str) -> float | None:
        """Return a field of run.json; None if it is not a finite number."""
        value = self.record.get(name)
        return float(value) if is_finite(value) else None

    def values(self, metric: str) -> list[float]:
        """Return the finite values of a metric in the order of the steps."""
        values = (line.get(metric) for line in self.lines)
        return [value for value in values if value is not None]


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number within the range of a float."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max
