"""A row of a comparison: what the runs of one setting measured, and how far to trust its speed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ddp_runner.compare.parity import Parity
from ddp_runner.compare.run import Run, Stat
from ddp_runner.compare.settings import Setting, missing_keys
from ddp_runner.errors import counted, listed

SUPERLINEAR = 1.1  # the additional devices alone cannot explain an efficiency above it
BUSY = 0.1  # share of the cores' time that other work may use


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


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a row, beside the measured step."""

    samples_per_s: float
    speedup: float  # over the baseline
    parts_ms: Mapping[str, float]  # predicted
    measured_ms: Mapping[str, float]  # the same parts


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """The runs of one setting, which differ only in their seeds; or a single run."""

    label: str  # its setting in a few words
    setting: Setting  # values of Comparison.keys
    world_size: int
    num_devices: int
    runs: tuple[Run, ...]
    samples_per_s: Stat | None
    strong: Scaling | None = None
    weak: Scaling | None = None
    predicted: Mapping[str, Prediction] = field(default_factory=dict)  # from the baseline's step
    time_to_target_s: Stat | None
    metrics: Mapping[str, Stat]  # last values
    peak_memory_gib: Stat | None
    comm_share: Stat | None  # of the step time, 0 to 1
    skew_ms: Stat | None  # a step, that the others waited for one rank
    mfu: Stat | None  # model FLOP utilisation, 0 to 1
    startup_s: Stat | None  # of the first session of a resumed run
    wall_s: Stat | None  # of all sessions
    num_sessions: Stat | None
    step_time_ms: Stat | None
    step_parts_ms: Mapping[str, float]  # means
    parity: tuple[Parity, ...]  # one per run that was compared with a reference

    @property
    def scalings(self) -> Mapping[str, Scaling]:
        """Its scalings: strong, weak, both or none."""
        kinds = {"strong": self.strong, "weak": self.weak}
        return {kind: scaling for kind, scaling in kinds.items() if scaling is not None}

    @property
    def speed_remark(self) -> str | None:
        """In a few words why its speed is doubtful; None if it is not."""
        efficiencies = [scaling.efficiency for scaling in self.scalings.values()]
        words = ["superlinear"] if max(efficiencies, default=0.0) > SUPERLINEAR else []
        # Parallel jobs keep each other busy.
        shares = [run.busy_share or 0.0 for run in self.runs if not run.is_parallel_job]
        words += ["busy machine"] if max(shares, default=0.0) > BUSY else []
        return ", ".join(words) or None


def warnings_about(rows: Sequence[ComparisonRow], runs: Sequence[Run]) -> Iterator[str]:
    """Yield why the runs of rows may not be comparable, and which speeds are doubtful."""
    origins = {
        "hosts": [run.record.get("host") for run in runs],
        "torch versions": [run.field("versions", "torch") for run in runs],
        "git revisions": [run.record.get("git_revision") for run in runs],
    }
    for name, values in origins.items():
        different = sorted({str(value) for value in values})
        if len(different) > 1:
            yield f"the runs used {len(different)} {name} ({listed(different)})"
    if missing := missing_keys([run.setting for run in runs]):
        yield f"some runs, written by another version, lack keys ({listed(missing)})"
    yield from _different_metrics(runs)
    if doubtful := [f"{row.label}: {row.speed_remark}" for row in rows if row.speed_remark]:
        which = listed(doubtful, separator="; ")
        speeds = counted(len(doubtful), "doubtful speed")
        yield f"{speeds} ({which}); measure again, with the baseline"


def _different_metrics(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the metrics of which one name means different things in different runs."""
    meanings: dict[str, set[str]] = {}
    for run in runs:
        own: dict[str, list[str]] = {}
        for key, value in run.config.items():
            if key.startswith("metrics."):
                own.setdefault(key.split(".")[1], []).append(f"{key}={value}")
        for name, keys in own.items():
            meanings.setdefault(name, set()).add(", ".join(sorted(keys)))
    for name, different in meanings.items():
        if len(different) > 1:
            which = listed(sorted(different), separator=" or ")
            yield f"eval/{name} is not the same metric in all runs: {which}; do not compare it"
