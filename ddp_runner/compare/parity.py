"""Loss parity: with the same seed and global batch, every mode takes the same steps.

The steps are equal up to rounding, which training amplifies: even two equal runs may end percents
apart. Parity is judged by how the difference starts and how fast it grows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_runner.compare.recorded_run import RecordedRun
from ddp_runner.compare.settings import identity

LOSS = "train/loss"
EQUAL_BYTES = "equal bytes"
# Keys that may differ between runs with equal losses.
MAY_DIFFER = (
    *("world_size", "num_devices", "batch.per_rank", "parallel_jobs", "parallelism."),
    "checkpoint.",  # saving changes no number
)
# Relative difference that rounding may cause with equal weights. float32 gets a large margin for
# sums over deep networks; half precisions accumulate in float32 and get a unit or two.
ROUNDING = {"fp32": 1e-5, "tf32": 1e-4, "fp16": 1e-3, "bf16": 8e-3}
GROWTH = 1.5  # factor per step by which rounding may grow
SPIKE = 30  # additional factor between two lines, for a spike of the loss
MAX_STEPS = 100  # since the start: 1.5 ** 100 allows any difference
MAX_STEPS_PER_LINE = 10  # between two lines; more would allow any difference


@dataclass(frozen=True)
class Parity:
    """A run's losses compared with its reference, the simplest mode on the fewest ranks."""

    run: RecordedRun
    reference: RecordedRun
    num_steps: int  # logged by both runs
    largest: float  # largest relative difference
    first_break: int | None  # first step that rounding does not explain; None if parity holds
    verdict: str  # in words: equal bytes; ok; ok, rounding grows to 1.1%; breaks at step 45; …


def parities(runs: Sequence[RecordedRun], *, tolerance: float) -> list[Parity]:
    """Compare the losses of runs that differ only in mode, devices and world size.

    A relative difference up to `tolerance` counts as parity.
    """
    groups: dict[object, list[RecordedRun]] = {}
    for run in runs:
        has_losses = run.setting.get("batch.global_size") is not None and run.values(LOSS)
        if has_losses and promises_parity(run):
            key = repr(run.seed), identity(run.setting, without=MAY_DIFFER)
            groups.setdefault(key, []).append(run)
    results = []
    for group in filter(lambda group: len(group) > 1, groups.values()):
        reference = min(group, key=_simplicity)
        same = identity(reference.setting, without=("parallel_jobs",))
        for run in group:
            if identity(run.setting, without=("parallel_jobs",)) != same:
                results.append(_compare(run, reference, tolerance=tolerance))
    return [parity for parity in results if parity.num_steps]


def promises_parity(run: RecordedRun) -> bool:
    """Return whether a run takes the same steps as a single process.

    Asynchronous modes do not, nor do communication hooks, which may change gradients, nor streams,
    which are split over ranks.
    """
    if run.config.get("parallelism.mode") == "async" or run.comm_hook is not None:
        return False
    return run.record.get("trains_on_stream") is not True


def _simplicity(run: RecordedRun) -> tuple[int, int, str]:
    """Return a key that sorts by the number of ranks, then by the number of the mode's options."""
    options = [key for key in run.setting if key.startswith("parallelism.")]
    return run.world_size, len(options), str(run.setting.get("parallelism.name"))


def _compare(run: RecordedRun, reference: RecordedRun, *, tolerance: float) -> Parity:
    losses, expected = (
        {line["step"]: line[LOSS] for line in lines if LOSS in line}
        for lines in (run.lines, reference.lines)
    )
    differences = {
        int(step or 0): _difference(losses[step], expected[step])
        for step in sorted(losses.keys() & expected.keys(), key=lambda step: step or 0)
    }
    largest, first_break, verdict = max(differences.values(), default=0.0), None, "ok"
    if largest > tolerance:
        precision = str(run.config.get("train.precision"))
        rounding = ROUNDING.get(precision, ROUNDING["fp32"])
        first_break = _first_break(differences, rounding=rounding)
        verdict = f"ok, rounding grows to {largest:.1%}"
    if first_break is not None:
        verdict = f"breaks at step {first_break}"
        if first_break == min(differences):
            verdict = f"differs from the first line on (step {first_break})"
    hashes = [one.record.get("weights_sha256") for one in (run, reference)]
    if hashes[0] is not None and hashes[0] == hashes[1] and not largest:
        verdict = EQUAL_BYTES
    return Parity(run, reference, len(differences), largest, first_break, verdict)


def _first_break(differences: Mapping[int, float], *, rounding: float) -> int | None:
    """Return the first step whose difference rounding does not explain; None if it explains all.

    Rounding explains a difference within two bounds: `rounding` times ``GROWTH`` to the power of
    the steps since the start, and ``SPIKE`` times the largest difference so far times ``GROWTH`` to
    the power of the steps since the line before. So a difference that exists from the start, or
    appears suddenly, is a break; a fault that is smaller than the rounding so far goes unnoticed.

    Measured with SGD, momentum and Adam, with and without BatchNorm, weights perturbed by 1e-7:
    rounding reached 0.8 of the first bound and 0.7 of the second, except in diverging trainings.
    """
    largest, previous, spike = rounding, 1, 1
    for step, difference in differences.items():
        since_line = min(step - previous, MAX_STEPS_PER_LINE)
        since_start = min(step - 1, MAX_STEPS)
        if difference > min(largest * spike * GROWTH**since_line, rounding * GROWTH**since_start):
            return step
        largest, previous, spike = max(largest, difference), step, SPIKE
    return None


def _difference(loss: float | None, other: float | None) -> float:
    """Return the relative difference of two losses; None stands for a loss that is not finite."""
    if loss is None or other is None:
        return 0.0 if loss is other else float("inf")
    return abs(loss - other) / (max(abs(loss), abs(other)) or 1.0)
