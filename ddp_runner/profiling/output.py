"""Writes the files of a profile: each rank's own, and those over all ranks."""

import gzip
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch.distributed as dist
from torch.profiler import profile

from ddp_runner.distributed import gather_objects
from ddp_runner.errors import counted
from ddp_runner.host.temp_folder import short_lived_folder
from ddp_runner.profiling.clocks import clock_ahead_ns
from ddp_runner.profiling.cuda_memory import dump_history
from ddp_runner.profiling.gather import gather_files
from ddp_runner.profiling.operators import (
    Summary,
    lines,
    peak_line,
    summarize,
    table,
    write_csv,
)
from ddp_runner.profiling.traces import (
    first_ns,
    join_parts,
    peaks,
    rank_events,
    read_trace,
    write_part,
)

T = TypeVar("T")
Trace = dict[str, Any]
NAME = "steps-"  # of a profile's folder, before its steps
NUM_PRINTED, NUM_IN_FILE = 5, 40


class NotWrittenError(Exception):
    """A rank cannot write its files. All ranks raise it, with the same text for the user."""


def write_profile(
    tracer: profile, folder: Path, *, steps: tuple[int, int], on_gpu: bool, scratch: Path | None
) -> str:
    """Write what the ranks have traced. Collective: every rank must call.

    Args:
        tracer: has stopped.
        folder: of the run's profiles; used on rank 0 only.
        steps: the first and the last that were traced.
        on_gpu: whether to write the history of the GPU's memory, too.
        scratch: a folder of this machine that the launcher removes; None: there is no launcher.

    Returns:
        A short report on rank 0; nothing on the other ranks.

    Raises:
        NotWrittenError: on every rank, when all temporary files are gone.
    """
    rank, name = dist.get_rank(), f"{NAME}{steps[0]}-{steps[1]}"
    place, new = folder / name, folder / f".{name}.tmp"
    in_run = f"write to {folder}", "free space or make the folder writable"
    in_temp = "write its temporary files", "free space, or set TMPDIR to a folder of another disk"
    with ExitStack() as stack:

        def prepare() -> None:
            if rank == 0:
                stack.callback(shutil.rmtree, new, ignore_errors=True)
                shutil.rmtree(new, ignore_errors=True)  # what a killed run has left
                new.mkdir(parents=True)

        _together(prepare, *in_run)
        own, trace = _together(lambda: _export(tracer, stack, scratch, on_gpu=on_gpu), *in_temp)
        ahead_ns = clock_ahead_ns()
        start_ns = min(gather_objects(first_ns(trace) - ahead_ns))
        events = rank_events(trace, rank=rank, shift_ns=-ahead_ns - start_ns)
        _together(lambda: write_part(own / _part(rank), events, is_first=rank == 0), *in_temp)
        summaries = gather_objects(summarize(tracer.events(), peaks(trace), on_gpu=on_gpu))
        failure = gather_files(own, new if rank == 0 else None)

        def finish() -> None:
            if failure is not None:
                raise failure
            if rank == 0:
                _join(new, summaries, steps=steps, on_gpu=on_gpu)
                shutil.rmtree(place, ignore_errors=True)  # of the same steps, before a restart
                new.rename(place)

        _together(finish, *in_run)
    if rank != 0:
        return ""
    short = _text(summaries, steps=steps, num_rows=NUM_PRINTED, on_gpu=on_gpu)
    return f"{short}\ntrace for ui.perfetto.dev: {place / 'trace.json.gz'}"


def clear_unfinished(folder: Path) -> None:
    """Remove what killed runs have left of profiles. Rank 0 only, before this run writes any."""
    for path in folder.glob(f".{NAME}*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _together(work: Callable[[], T], what: str, fix: str) -> T:
    """Do this rank's part of the work. Collective: every rank must call, and none goes on alone.

    Raises:
        NotWrittenError: on every rank, if one of them cannot do this.
    """
    failure = ""
    try:
        done = work()
    except OSError as error:
        failure = f"cannot {what} ({error.strerror or error}); {fix}"
    for rank, sentence in enumerate(gather_objects(failure)):
        if sentence:
            raise NotWrittenError(f"rank {rank} {sentence}")
    return done


def _export(
    tracer: profile, stack: ExitStack, scratch: Path | None, *, on_gpu: bool
) -> tuple[Path, Trace]:
    """Write this rank's files into a folder that the stack removes; return it and the trace."""
    rank = dist.get_rank()
    temporary: AbstractContextManager[str | Path] = (
        short_lived_folder()
        if scratch is None
        else TemporaryDirectory(prefix="profile-", dir=scratch, ignore_cleanup_errors=True)
    )
    outer = Path(stack.enter_context(temporary))
    plain, own = outer / f"rank-{rank}.json", outer / "own"
    own.mkdir()
    # Torch would compress it, too. But then a full disk keeps the plain file, in another folder.
    tracer.export_chrome_trace(str(plain))
    if not plain.exists():  # Kineto raises no error
        raise OSError("torch has written no trace; is the disk full?")
    path = own / f"{plain.name}.gz"
    with plain.open("rb") as file, gzip.open(path, "wb") as packed:
        shutil.copyfileobj(file, packed)
    plain.unlink()
    if on_gpu:
        dump_history(own / f"memory-rank-{rank}.pickle")
    return own, read_trace(path)


def _join(new: Path, summaries: Sequence[Summary], *, steps: tuple[int, int], on_gpu: bool) -> None:
    """Write the files over all ranks, from those of each rank. Rank 0 only."""
    parts = [new / _part(one) for one in range(len(summaries))]
    join_parts(parts, new / "trace.json.gz")
    for part in parts:
        part.unlink()
    write_csv(new / "operators.csv", table(summaries))
    text = _text(summaries, steps=steps, num_rows=NUM_IN_FILE, on_gpu=on_gpu)
    (new / "operators.txt").write_text(text + "\n", encoding="utf-8")


def _part(rank: int) -> str:
    return f"part-{rank}"


def _text(
    summaries: Sequence[Summary],
    *,
    steps: tuple[int, int],
    num_rows: int,
    on_gpu: bool,
) -> str:
    """Return the most expensive operators and the memory, in lines of at most 80 characters."""
    step_ms = sum(one.step_ms for one in summaries) / len(summaries)
    title = (
        f"profile of steps {steps[0]} to {steps[1]}, {counted(len(summaries), 'rank')}: "
        f"{step_ms:.1f} ms a step while traced; {'GPU' if on_gpu else 'CPU'} time"
    )
    found = [title, *lines(table(summaries), num_rows=num_rows), peak_line(summaries)]
    return "\n".join(line for line in found if line)
