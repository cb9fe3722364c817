"""Loss parity: with one seed and one global batch, every mode takes the same steps.

They are the same up to rounding: a sum in another order differs in its last digit, and training
amplifies the difference step by step. So even two equal runs may end percents apart. What separates
them from unequal runs is how the difference starts and how fast it grows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_runner.compare.recorded_run import RecordedRun
from ddp_runner.compare.settings import identity

LOSS = "train/loss"
# Keys that may differ between runs whose losses must not.
MAY_DIFFER = ("world_size", "num_devices", "batch.per_rank", "parallel_jobs", "parallelism.")
# Relative difference that rounding may cause with equal weights. float32 gets a large margin, for
# sums over deep networks; the half precisions accumulate in float32 and get one or two units.
ROUNDING = {"fp32": 1e-5, "tf32": 1e-4, "fp16": 1e-3, "bf16": 8e-3}
GROWTH = 1.5  # factor per step by which rounding may grow
SPIKE = 30  # additional factor between two lines, for a spike of the loss
MAX_STEPS = 100  # counted since the start: 1.5 ** 100 allows any difference
MAX_STEPS_PER_LINE = 10  # counted between two lines; more would allow any difference


@dataclass(frozen=True)
class Parity:
    """The losses of a run compared with its reference: the simplest mode on the fewest ranks."""

    run: RecordedRun
    reference: RecordedRun
    num_steps: int  # that both have logged
    largest: float  # largest relative difference
    first_break: int | None  # first step that rounding does not explain; None if parity holds
    verdict: str  # in words: ok; ok, rounding grows to 1.1%; breaks at step 45; …


def parities(runs: Sequence[RecordedRun], *, tolerance: float) -> list[Parity]:
    """Compare the losses of runs that differ only in mode, devices and world size.

    A relative difference up to `tolerance` is fine, however it started.
    """
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        has_losses = run.setting.get("batch.global_size") is not None and run.values(LOSS)
        if has_losses and promises_parity(run):
            key = f"{run.seed!r}\n{identity(run.setting, without=MAY_DIFFER)}"
            groups.setdefault(key, []).append(run)
    results = []
    for group in groups.values():
        reference = min(group, key=_simplicity)
        same = identity(reference.setting, without=("parallel_jobs",))
        for run in group:
            if identity(run.setting, without=("parallel_jobs",)) != same:
                results.append(_compare(run, reference, tolerance=tolerance))
    return [parity for parity in results if parity.num_steps]


def promises_parity(run: RecordedRun) -> bool:
    """Return whether a run takes the steps of one process.

    Asynchronous modes do not, nor do hooks, which send rounded gradients or do what the runner does
    not know, nor the steps of a stream, which its ranks split.
    """
    if run.config.get("parallelism.mode") == "async" or run.comm_hook is not None:
        return False
    return run.record.get("trains_on_stream") is not True


def _simplicity(run: RecordedRun) -> tuple[int, int, str]:
    """Return a key that sorts few ranks, then modes with few options, such as `single`, first."""
    options = [key for key in run.setting if key.startswith("parallelism.")]
    return run.world_size, len(options), str(run.setting.get("parallelism.name"))


def _compare(run: RecordedRun, reference: RecordedRun, *, tolerance: float) -> Parity:
    ours, theirs = (
        {line["step"]: line[LOSS] for line in lines if LOSS in line}
        for lines in (run.lines, reference.lines)
    )
    differences = {
        int(step or 0): _difference(ours[step], theirs[step])
        for step in sorted(ours.keys() & theirs.keys(), key=lambda step: step or 0)
    }
    largest, first_break, verdict = max(differences.values(), default=0.0), None, "ok"
    if largest > tolerance:
        first_break = _first_break(differences, rounding=_rounding(run))
        verdict = f"ok, rounding grows to {largest:.1%}"
    if first_break is not None:
        verdict = f"breaks at step {first_break}"
        if first_break == min(differences):
            verdict = f"differs from the first line on (step {first_break})"
    return Parity(run, reference, len(differences), largest, first_break, verdict)


def _first_break(differences: Mapping[int, float], *, rounding: float) -> int | None:
    """Return the first step at which rounding does not explain the difference; None: it does.

    A difference counts as rounding if it passes two bounds: at most `rounding` times ``GROWTH``
    to the power of the steps since the start; and at most ``SPIKE`` times the largest difference so
    far, times ``GROWTH`` to the power of the steps since the line before. So a difference that
    exists from the start, or that appears at once, is a break. A fault that begins when rounding
    is already as large goes unnoticed.

    Both bounds are measured (SGD, momentum and Adam, networks with and without BatchNorm, weights
    perturbed by 1e-7): rounding reached 0.8 of the first and 0.7 of the second. It exceeded them
    only where the training itself was about to diverge.
    """
    largest, previous, spike = rounding, 1, 1
    for step, difference in differences.items():
        since_line = min(step - previous, MAX_STEPS_PER_LINE)
        since_start = min(step - 1, MAX_STEPS)
        if difference > min(largest * spike * GROWTH**since_line, rounding * GROWTH**since_start):
            return step
        largest, previous, spike = max(largest, difference), step, SPIKE
    return None


def _rounding(run: RecordedRun) -> float:
    return ROUNDING.get(str(run.config.get("train.precision")), ROUNDING["fp32"])


def _difference(loss: float | None, other: float | None) -> float:
    """Return the relative difference of two losses; None stands for a loss that is not finite."""
    if loss is None or other is None:
        return 0.0 if loss is other else float("inf")
    return abs(loss - other) / (max(abs(loss), abs(other)) or 1.0)
