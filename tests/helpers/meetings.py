"""Train the cells of a table in warm ranks: many of them in one call, each compared by itself.

A cell that raises, hangs or ends a rank costs the others nothing: they run in the next call.
"""

import faulthandler
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from own_data import end_workers
from ranks import RankFailedError, run_ranks
from torch import Tensor
from train_states import Trace, build, compose_config, flat_weights, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.data.loader import LoaderSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.train.first_batch import try_run
from ddp_runner.train.state import TrainState

PATIENT_S = 60  # of a cell that hangs, and nobody knows it
HANG_S = 10  # of a cell that is known to hang


@dataclass(frozen=True)
class Cell:
    """A training: on how many ranks, and its command line."""

    name: str
    world_size: int
    keys: tuple[str, ...]
    dtype: torch.dtype = torch.float64
    hangs: bool = False  # as is known: it gets HANG_S alone
    folder: Path | None = None  # of checkpoints: it goes on from the newest one
    rates: tuple[float, ...] = ()  # the optimizer's rate in each step, whatever the scheduler says
    decays: tuple[float, ...] = ()  # likewise its weight_decay


@dataclass
class CellResult:
    """What a rank computed in a cell, or why it did not."""

    lines: list[dict[str, float]] = field(default_factory=list)  # as logged, without times
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    average: Tensor = field(default_factory=lambda: torch.zeros(0))  # the weights' moving average
    counts: list[int] = field(default_factory=list)  # the samples of each step, over all ranks
    rejected: str = ""  # the line with which it was rejected before its first step
    failed: str = ""  # anything else that ended it


def run_cells(cells: Sequence[Cell], folder: Path) -> dict[Cell, list[CellResult]]:
    """Train cells of one world size; return what each of its ranks came to."""
    found, todo = dict[Cell, list[CellResult]](), [*cells]
    together = list[tuple[Cell, Config]]()
    for cell in todo:
        try:
            together.append((cell, compose_config(*cell.keys, world_size=cell.world_size)))
        except UserError as error:  # by the launcher
            found[cell] = [CellResult(rejected=str(error))]
    while together:
        batch, world_size = [*together], together[0][0].world_size
        place = folder / f"call-{len(list(folder.iterdir()))}"
        place.mkdir()
        failure = ""
        try:
            run_ranks(_train_all, world_size, batch, place, timeout_s=3600)
        except RankFailedError as error:
            failure = str(error)
        for index, (cell, _) in enumerate(batch):
            paths = [place / f"{index}-{rank}" for rank in range(world_size)]
            if not all(path.exists() for path in paths):
                break
            found[cell] = [pickle.loads(path.read_bytes()) for path in paths]
            together.pop(0)
        if failure:
            end = next(place.glob("end-*"), None)  # a rank's own sentence tells more
            stacks = [f"{path.name}: {path.read_text()}" for path in sorted(place.glob("rank-*"))]
            failed = CellResult(failed="\n".join([failure, *stacks]))
            found[together.pop(0)[0]] = [pickle.loads(end.read_bytes()) if end else failed]
    return found


def _train_all(env: DistEnv, batch: Sequence[tuple[Cell, Config]], place: Path) -> None:
    """Train cells in turn, until one is rejected; write what each came to."""
    with (place / f"rank-{env.rank}").open("w") as stacks:
        for index, (cell, config) in enumerate(batch):
            torch.set_default_dtype(cell.dtype)
            # A group of a mesh waits for half an hour, and a thread could not interrupt it.
            limit_s = HANG_S if cell.hangs else PATIENT_S
            faulthandler.dump_traceback_later(limit_s, exit=True, file=stacks)
            found = _train(env, cell, config)
            if found.rejected or found.failed:  # as a launcher ends the other ranks
                _write(place / f"end-{env.rank}", found)
                raise RuntimeError(found.rejected or found.failed)
            dist.barrier()  # no rank is in the next cell before all have left this one
            faulthandler.cancel_dump_traceback_later()
            _write(place / f"{index}-{env.rank}", found)


def _write(path: Path, found: CellResult) -> None:
    path.with_suffix(".part").write_bytes(pickle.dumps(found))
    path.with_suffix(".part").rename(path)


def _train(env: DistEnv, cell: Cell, config: Config) -> CellResult:
    """Train as a run does, with its trials; return what this rank came to."""
    counts = list[int]()
    try:
        state = build(env, config)
        try_run(state)
    except UserError as error:
        return CellResult(rejected=str(error))
    _note_counts(state, counts)
    if cell.rates:
        state.optimizer.register_step_pre_hook(partial(_set_groups, state, cell))
    try:
        trace = run_loop(env, config, max_steps=None, folder=cell.folder, state=state)
    except UserError as error:  # of a rank that serves the loop
        return CellResult(rejected=str(error))
    if trace.error.startswith("UserError: ") and not trace.progress.step:
        return CellResult(rejected=trace.error.removeprefix("UserError: "))
    if trace.error:
        return CellResult(failed=trace.error)
    for split in (state.batches.split, state.work.dataset.eval):
        if isinstance(split, LoaderSplit):
            end_workers(split)
    return found_in(state, trace, counts)


def _set_groups(state: TrainState, cell: Cell, *_: object) -> None:
    """Give the optimizer what the cell prescribes for the coming step."""
    for group in state.optimizer.param_groups:
        group["lr"] = cell.rates[state.progress.step]
        group["weight_decay"] = cell.decays[state.progress.step]


def found_in(state: TrainState, trace: Trace, counts: list[int]) -> CellResult:
    """Return what a rank came to. Collective if parameters are split."""
    average = flat_weights(state.ema.module) if state.ema is not None else torch.zeros(0)
    failed = "" if trace.status == "completed" else f"its status is {trace.status}"
    return CellResult(without_times(trace), trace.weights, average, counts, failed=failed)


def without_times(trace: Trace) -> list[dict[str, float]]:
    """Return what was logged, without what depends on the clock and on the mode's own figures."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("perf/", "ps/"))}
        for line in trace.lines
    ]


def _note_counts(state: TrainState, counts: list[int]) -> None:
    """Note the samples of each step as the throughput counts them."""
    add: Any = state.timer.add

    def noted(*, samples: int) -> None:
        counts.append(samples)
        add(samples=samples)

    vars(state.timer)["add"] = noted
