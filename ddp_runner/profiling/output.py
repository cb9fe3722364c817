"""Writes the files of a profile: each rank's own, and those over all ranks."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from torch.profiler import profile

from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError, counted
from ddp_runner.profiling.clocks import clock_ahead_ns
from ddp_runner.profiling.cuda_memory import dump_history
from ddp_runner.profiling.gather import gather_files
from ddp_runner.profiling.operators import (
    Row,
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

NUM_PRINTED, NUM_IN_FILE = 5, 40


def write_profile(tracer: profile, folder: Path, *, steps: tuple[int, int], on_gpu: bool) -> str:
    """Write what the ranks have traced. Collective: every rank must call.

    Args:
        tracer: has stopped.
        folder: of the run's profiles; used on rank 0 only.
        steps: the first and the last that were traced.
        on_gpu: whether to write the history of the GPU's memory, too.

    Returns:
        A short report on rank 0; nothing on the other ranks.

    Raises:
        UserError: a rank cannot write its files.
    """
    rank, name = dist.get_rank(), f"steps-{steps[0]}-{steps[1]}"
    place, new = folder / name, folder / f".{name}.tmp"
    with _writing(folder), TemporaryDirectory(prefix="ddp_runner-profile-") as temp:
        own = Path(temp)
        if rank == 0:
            shutil.rmtree(new, ignore_errors=True)  # what a killed run has left
            new.mkdir(parents=True)
        summary = _write_own(tracer, own, rank=rank, on_gpu=on_gpu)
        gather_files(own, new if rank == 0 else None)
        summaries = gather_objects(summary)
        if rank != 0:
            return ""
        parts = [new / _part(one) for one in range(len(summaries))]
        join_parts(parts, new / "trace.json.gz")
        for part in parts:
            part.unlink()
        rows = table(summaries)
        write_csv(new / "operators.csv", rows)
        text = _text(rows, summaries, steps=steps, num_rows=NUM_IN_FILE, on_gpu=on_gpu)
        (new / "operators.txt").write_text(text + "\n", encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)  # of the same steps, before a restart
        new.rename(place)
    short = _text(rows, summaries, steps=steps, num_rows=NUM_PRINTED, on_gpu=on_gpu)
    return f"{short}\ntrace for ui.perfetto.dev: {place / 'trace.json.gz'}"


def _write_own(tracer: profile, own: Path, *, rank: int, on_gpu: bool) -> Summary:
    """Write this rank's files into its own folder. Collective: every rank must call."""
    path = own / f"rank-{rank}.json.gz"
    tracer.export_chrome_trace(str(path))
    if on_gpu:
        dump_history(own / f"memory-rank-{rank}.pickle")
    trace, ahead_ns = read_trace(path), clock_ahead_ns()
    start_ns = min(gather_objects(first_ns(trace) - ahead_ns))
    events = rank_events(trace, rank=rank, shift_ns=-ahead_ns - start_ns)
    write_part(own / _part(rank), events, is_first=rank == 0)
    return summarize(tracer.events(), peaks(trace), on_gpu=on_gpu)


def _part(rank: int) -> str:
    return f"part-{rank}"


def _text(
    rows: Sequence[Row],
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
    found = [title, *lines(rows, num_rows=num_rows), peak_line(summaries)]
    return "\n".join(line for line in found if line)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the profile cannot be written to {error.filename or folder} "
            f"({error.strerror or error}); free space or make the folder writable, or leave out "
            "train.profile"
        ) from error
