"""Loss parity: runs of one seed and one global batch take the same steps in every mode.

Up to rounding: sums that are added up in another order differ in their last digit, and training
makes that larger, step by step. So two equal runs may part by percents in the end, and what tells
them from two unequal ones is how their difference began and grew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.compare.run import Run
from ddp_runner.compare.settings import Setting, identity

LOSS = "train/loss"
# All that may differ where the losses may not.
FREE = ("world_size", "num_devices", "batch.per_rank", "packed", "parallelism.")
# What two losses of equal weights may differ by, as a part of the loss. float32 is left much room,
# for sums over deep networks; half precisions add up in float32 and are left one or two units.
ROUNDING = {"fp32": 1e-5, "tf32": 1e-4, "fp16": 1e-3, "bf16": 8e-3}
# How fast that may grow.
GROWTH = 1.5  # times a step
SURGE = 30  # times, on top of that, between two lines: a spike of the loss
MOST_STEPS = 100  # since the start: 1.5 to that power allows anything
LONGEST = 10  # steps before a line that count, lest lines far apart allow anything


@dataclass(frozen=True)
class Parity:
    """One run's losses against those of the reference: the plainest mode at the fewest ranks."""

    run: Run
    reference: Run
    num_steps: int  # that both have logged
    largest: float  # difference, as a part of the loss
    first_break: int | None  # the first step that rounding does not explain; None: parity holds
    verdict: str  # in words: ok; ok, rounding grows to 1.1%; breaks at step 45; …


def parities(
    runs: Sequence[Run], *, settings: Mapping[Path, Setting], tolerance: float
) -> tuple[Parity, ...]:
    """Return how far runs agree that differ by mode, devices and world size alone.

    Args:
        runs: that can be compared.
        settings: of each, by folder.
        tolerance: the part of itself by which a loss may differ, however the difference began.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        setting = settings[run.folder]
        has_losses = setting.get("batch.global_size") is not None and run.values(LOSS)
        if has_losses and promises_parity(run):
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


def promises_parity(run: Run) -> bool:
    """Return whether a run's mode takes the steps of one process: an asynchronous one does not."""
    return run.config.get("parallelism.mode") != "async"


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
        for step, loss in sorted(ours.items(), key=lambda item: item[0] or 0)
        if step in theirs
    }
    largest, first_break, verdict = max(differences.values(), default=0.0), None, "ok"
    if largest > tolerance:
        first_break = _first_break(differences, rounding=_rounding(run))
        verdict = f"ok, rounding grows to {largest:.1%}"
    if first_break is not None:
        is_first = first_break == min(differences)
        verdict = f"breaks at step {first_break}"
        verdict = f"differs from the first line on (step {first_break})" if is_first else verdict
    return Parity(run, reference, len(differences), largest, first_break, verdict)


def _first_break(differences: Mapping[int, float], *, rounding: float) -> int | None:
    """Return the first step at which the losses differ by more than rounding explains.

    A difference is rounding as long as it is no larger than ``ROUNDING`` times ``GROWTH`` to the
    power of the steps taken, and no line has more than ``SURGE`` times ``GROWTH`` to the power of
    the steps since the line before of the largest difference until then. So a difference that is
    there from the start, or all at once, is none; one that comes when rounding has grown as large
    cannot be told from it. Both bounds are measured (SGD, momentum and Adam, networks with and
    without BatchNorm, weights perturbed by 1e-7): rounding came to 0.8 of the first and 0.7 of the
    second. It went beyond only where training itself was about to diverge.

    Args:
        differences: of the losses as parts of themselves, by step, ascending.
        rounding: what they may differ by at step 1, whose loss is that of the initial weights.
    """
    seen, previous, surge = rounding, 1, 1
    for step, difference in differences.items():
        since_line, since_start = min(step - previous, LONGEST), min(step - 1, MOST_STEPS)
        most = min(seen * surge * GROWTH**since_line, rounding * GROWTH**since_start)
        if difference > most:
            return step
        seen, previous, surge = max(seen, difference), step, SURGE
    return None


def _rounding(run: Run) -> float:
    precision = run.config.get("train.precision")
    # cuDNN convolves float32 in TF32, with as many digits as float16, unless it is told not to.
    usual = "tf32" if "cuda" in str(run.record.get("devices")) else "fp32"
    return ROUNDING[precision if precision in ("fp16", "bf16") else usual]


def _difference(one: float | None, other: float | None) -> float:
    """Return the difference of two losses as a part of the larger; None is one not finite."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)
