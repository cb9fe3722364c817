"""A resume under another mode with other keys, for each kind of scheduler.

It equals one process that took the first steps with the old keys, and the others with the rates of
a run that always had the new ones.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from meetings import Cell, CellResult, run_cells
from modes import has_stages, smallest_world
from tiers import selected

SAVED, NUM_STEPS = 5, 12  # three steps an epoch: the resume begins amid the second one
COMMON = (
    *("dataset=random", "dataset.num_samples=72", "dataset.eval_samples=11"),
    *("batch.global_size=24", "train.epochs=4", "train.log_every_steps=1"),
    *("optimizer.momentum=0.9", "checkpoint.every_steps=5", "checkpoint.keep=99"),
    *("+model.blocks=[net1,net2]", "model._target_=own_meetings.Net"),
    "allowed_targets=[own_meetings]",
)
LR, DECAY = 0.05, 0.01
TORCHS = "torch.optim.lr_scheduler."
OURS = "ddp_runner.train.schedules."


def torchs(name: str, *keys: str) -> tuple[str, ...]:
    """Return the keys of a scheduler of torch."""
    return (f"scheduler._target_={TORCHS}{name}", *(f"+scheduler.{key}" for key in keys))


INNER = (
    f"{{_target_:{TORCHS}LinearLR,_partial_:true,total_iters:3}}",
    f"{{_target_:{TORCHS}ExponentialLR,_partial_:true,gamma:0.5}}",
)
PLATEAU = ("scheduler=plateau", "scheduler.patience=0", "+scheduler.threshold=0.9")
HALVED = f"+scheduler.schedulers=[{','.join(INNER)}]"
# By scheduler: its keys, and one that a resume changes: the key as it is first, and as it is then.
SCHEDULERS: dict[str, tuple[tuple[str, ...], tuple[str, str]]] = {
    "constant": (
        ("scheduler=constant", "+scheduler.warmup_steps=8"),
        ("+scheduler.warmup_steps=8", "+scheduler.warmup_steps=10"),
    ),
    "cosine": (
        ("scheduler=cosine", "scheduler.min_factor=0.1"),
        ("scheduler.min_factor=0.1", "scheduler.min_factor=0.3"),
    ),
    "step": (
        ("scheduler=step", "scheduler.gamma=0.5"),
        ("scheduler.gamma=0.5", "scheduler.gamma=0.8"),
    ),
    "plateau": (
        (*PLATEAU, "scheduler.factor=0.5"),
        ("scheduler.factor=0.5", "scheduler.factor=0.8"),
    ),
    "OneCycleLR": (
        torchs("OneCycleLR", "max_lr=0.1", "cycle_momentum=false"),
        ("+scheduler.max_lr=0.1", "+scheduler.max_lr=0.05"),
    ),
    "StepLR": (
        torchs("StepLR", "step_size=2", "gamma=0.5"),
        ("+scheduler.gamma=0.5", "+scheduler.gamma=0.8"),
    ),
    "CosineAnnealingLR": (
        torchs("CosineAnnealingLR", "T_max=12"),
        ("+scheduler.T_max=12", "+scheduler.T_max=20"),
    ),
    "sequential": (
        (f"scheduler._target_={OURS}sequential", "+scheduler.milestones=[3]", HALVED),
        (HALVED, HALVED.replace("0.5", "0.8")),
    ),
    "chained": (
        (f"scheduler._target_={OURS}chained", HALVED),
        (HALVED, HALVED.replace("0.5", "0.8")),
    ),
}
CHANGES = ("nothing", "lr", "weight_decay", "a key of the scheduler")
PAIRS = [
    *(("ddp", "fsdp"), ("fsdp", "ddp"), ("single", "ps"), ("ps", "single")),
    *(("tp", "ddp"), ("hsdp", "fsdp_tp")),
]
Case = tuple[str, str, str, str]  # scheduler, change, and the modes before and after


def cell_of(
    scheduler: str, change: str, mode: str, *, folder: Path | None = None, **given: Any
) -> Cell:
    """Return a training with a changed key, whole or from a folder's checkpoint on."""
    keys, (first, then) = SCHEDULERS[scheduler]
    lr, decay = LR / 2 if change == "lr" else LR, DECAY * 5 if change == "weight_decay" else DECAY
    changed = [then if key == first else key for key in keys] if "key" in change else keys
    return Cell(
        f"{scheduler}, {change}, {mode}",
        smallest_world(mode),
        (
            *(f"model=toy{'_mp' if has_stages(mode) else ''}", f"parallelism={mode}", *COMMON),
            *(f"optimizer.lr={lr}", f"optimizer.weight_decay={decay}", *changed),
        ),
        folder=folder,
        **given,
    )


class Resumes:
    """The actual and expected results of the selected cases; a mode starts its ranks once."""

    def __init__(self, cases: list[Case], folder: Path) -> None:
        self._cases, self._folder = cases, folder
        self._calls = folder / "calls"
        self._calls.mkdir()
        self._found = dict[Case, list[CellResult]]()
        self._first = set[tuple[str, str]]()  # what has run already: scheduler and mode
        self._expected = dict[tuple[str, str], CellResult]()
        self._rates = dict[tuple[str, str], tuple[float, ...]]()

    def of(self, case: Case) -> list[CellResult]:
        """Return what each rank of a resumed run came to."""
        if case not in self._found:
            *_, before, after = case
            cases = [one for one in self._cases if one[2:] == (before, after)]
            self._leave(sorted({(one[0], before) for one in cases} - self._first))
            cells = dict[Case, Cell]()
            for scheduler, change, *_ in cases:
                place = self._folder / f"{scheduler}, {change}, {before} to {after}"
                name = f"step-{SAVED:08d}"
                shutil.copytree(self._place(scheduler, before) / name, place / name)
                one = (scheduler, change, before, after)
                cells[one] = cell_of(scheduler, change, after, folder=place)
            found = run_cells(list(cells.values()), self._calls)
            self._found |= {one: found[cell] for one, cell in cells.items()}
        return self._found[case]

    def expected(self, scheduler: str, change: str) -> tuple[CellResult, tuple[float, ...]]:
        """Return result and rates of a single process whose keys change after the saved step."""
        if not self._expected:
            asked = {one[:2] for one in self._cases}
            ways = sorted(asked | {(one, "nothing") for one, _ in asked})
            whole = self._run({way: cell_of(*way, "single") for way in ways})
            for way in ways:
                then = of_steps(whole[way], "train/lr")[SAVED:]
                self._rates[way] = of_steps(whole[way[0], "nothing"], "train/lr")[:SAVED] + then
            cells = {way: self._reference(*way) for way in ways}
            self._expected = self._run(cells)
        return self._expected[scheduler, change], self._rates[scheduler, change]

    def _reference(self, scheduler: str, change: str) -> Cell:
        """Return a whole run of one process that is told its rates."""
        then = DECAY * 5 if change == "weight_decay" else DECAY
        decays = (DECAY,) * SAVED + (then,) * (NUM_STEPS - SAVED)
        rates = self._rates[scheduler, change]
        return cell_of(scheduler, "nothing", "single", rates=rates, decays=decays)

    def _run(self, cells: dict[tuple[str, str], Cell]) -> dict[tuple[str, str], CellResult]:
        found = run_cells(list(dict.fromkeys(cells.values())), self._calls)
        for cell, (one,) in found.items():
            assert not one.failed + one.rejected, (cell.name, one.failed, one.rejected)
        return {way: found[cell][0] for way, cell in cells.items()}

    def _leave(self, ways: list[tuple[str, str]]) -> None:
        """Let each scheduler leave the checkpoints of a whole run under a mode."""
        cells = [cell_of(one, "nothing", mode, folder=self._place(one, mode)) for one, mode in ways]
        for cell, found in run_cells(cells, self._calls).items():
            assert not found[0].failed + found[0].rejected, (cell.name, found[0])
        self._first |= {*ways}

    def _place(self, scheduler: str, mode: str) -> Path:
        return self._folder / f"{scheduler}, {mode}"


def of_steps(found: CellResult, key: str) -> tuple[float, ...]:
    """Return a metric of each step."""
    return tuple(line[key] for line in found.lines if key in line)


@pytest.fixture(scope="module")
def resumes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Resumes:
    """Return the selected cases."""
    return Resumes(selected(request, "case"), tmp_path_factory.mktemp("resumes"))


def cases() -> Iterator[Any]:
    """Yield the cases: before a release all, else a key that changes, from ddp to fsdp."""
    for before, after in PAIRS:
        for scheduler in SCHEDULERS:
            for change in CHANGES:
                is_quick = (before, after) == ("ddp", "fsdp") and "key" in change
                marks = [pytest.mark.full if is_quick else pytest.mark.slow]
                case = (scheduler, change, before, after)
                yield pytest.param(
                    case, id=f"{before} to {after}-{scheduler}-{change}", marks=marks
                )


@pytest.mark.parametrize("case", list(cases()))
def test_a_resume_elsewhere_with_other_keys_takes_the_steps_of_one_process(
    case: Case, resumes: Resumes
) -> None:
    """Rates, losses, evaluations and the final weights, to rounding in float64."""
    scheduler, change, _, after = case
    found = resumes.of(case)
    expected, rates = resumes.expected(scheduler, change)
    first = found[0]
    assert not first.failed + first.rejected, (first.failed, first.rejected)
    assert of_steps(first, "train/lr") == pytest.approx(rates[SAVED:], rel=1e-9)
    wanted = [line for line in expected.lines if line["step"] > SAVED]
    for line, other in zip(first.lines, wanted, strict=True):
        # Of a rate that it was told, the reference's own scheduler does not know.
        told = {key: value for key, value in line.items() if key == "train/lr"}
        assert line == pytest.approx(other | told, rel=1e-9, abs=1e-11)
    for one in found[:1] if after == "ps" else found:
        torch.testing.assert_close(one.weights, expected.weights, rtol=1e-9, atol=1e-11)
