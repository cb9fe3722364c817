"""Loss parity: runs of one seed and one global batch take the same steps in every mode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.comparison.runs import Run
from ddp_runner.comparison.settings import Setting, identity

LOSS = "train/loss"
# All that may differ where the losses may not.
FREE = ("world_size", "batch.per_rank", "packed", "parallelism.")


@dataclass(frozen=True)
class Parity:
    """One run's losses against those of the reference: the plainest mode at the fewest ranks."""

    run: Run
    reference: Run
    num_steps: int  # that both have logged
    largest: float  # difference, as a part of the loss
    first_break: int | None  # the first step with more than the tolerance; None: parity holds


def parities(
    runs: Sequence[Run], *, settings: Mapping[Path, Setting], tolerance: float
) -> tuple[Parity, ...]:
    """Return how far runs agree that differ by mode and world size alone.

    Args:
        runs: that can be compared.
        settings: of each, by folder.
        tolerance: the part of itself by which a loss may differ.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        setting = settings[run.folder]
        if setting.get("batch.global_size") is not None and run.values(LOSS):
            groups.setdefault(f"{run.seed!r}\n{identity(setting, without=FREE)}", []).append(run)

    found = []
    for group in groups.values():
        reference = min(group, key=lambda run: (run.world_size, *_plainness(settings[run.folder])))
        same = identity(settings[reference.folder], without=("packed",))
        for run in group:
            if identity(settings[run.folder], without=("packed",)) != same:
                parity = _compare(run, reference, tolerance=tolerance)
                found += [parity] if parity.num_steps else []
    return tuple(found)


def _plainness(setting: Setting) -> tuple[int, str]:
    """Return fewer for a mode with fewer keys: one without any way to talk to others is first."""
    mode = [key for key in setting if key.startswith("parallelism.")]
    return len(mode), str(setting.get("parallelism.name"))


def _compare(run: Run, reference: Run, *, tolerance: float) -> Parity:
    ours, theirs = (
        {line["step"]: line[LOSS] for line in one.lines if LOSS in line} for one in (run, reference)
    )
    differences = {
        int(step or 0): _difference(loss, theirs[step])
        for step, loss in ours.items()
        if step in theirs
    }
    breaks = [step for step, difference in differences.items() if difference > tolerance]
    return Parity(
        run=run,
        reference=reference,
        num_steps=len(differences),
        largest=max(differences.values(), default=0.0),
        first_break=min(breaks, default=None),
    )


def _difference(one: float | None, other: float | None) -> float:
    """Return the difference of two losses as a part of the larger; None is one not finite."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)
