"""A profile of a run's steps: which are traced, what is written, and that nothing else changes."""

import csv
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import apart_ms, merged_events, processes, spans
from ranks import run_ranks
from torch.profiler import profile
from train_states import Trace, build, compose_config, run_loop

from ddp_runner.dist_env import DistEnv
from ddp_runner.host.temp_folder import PREFIX
from ddp_runner.job import Status
from ddp_runner.profiling import clocks, output, profiler, traces
from ddp_runner.profiling.profiler import NullProfiler, Profiler, has_steps_to_trace

# Eight steps in two epochs; an evaluation inside of each, and at its end.
KEYS = ("model=toy", "dataset.num_samples=32", "batch.global_size=8", "train.epochs=2")
BUSY = (*KEYS, "train.eval_every_steps=3", "checkpoint.every_steps=2", "train.log_every_steps=1")


@dataclass
class Outcome:
    """What a rank's loop has left."""

    trace: Trace
    report: str
    logged: list[str] = field(default_factory=list)
    temporary: Path | None = None  # where its own files were, for rank 0 to take


def train(
    env: DistEnv,
    folder: Path,
    asked: Any,
    keys: tuple[str, ...] = BUSY,
    stop_after: int | None = None,
    ahead_ns: int = 0,
    scratch: Path | None = None,
    full_disk_of: int | None = None,
) -> Outcome:
    """Train with a profile.

    Args:
        env: this rank's place.
        folder: of the profiles.
        asked: the value of ``train.profile``.
        keys: of the command line.
        stop_after: the step after which the last rank asks to stop.
        ahead_ns: by how much the clock of rank 1, and so its trace, is ahead.
        scratch: the launcher's folder.
        full_disk_of: a rank that cannot write a file of more than some bytes.
    """
    if env.rank == full_disk_of:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    temporary, gather = list[Path](), output.gather_files

    def noted(own: Path, target: Path | None) -> OSError | None:
        temporary.append(own.parent)
        return gather(own, target)

    output.gather_files = noted
    if env.rank == 1 and ahead_ns:
        _shift_clock(ahead_ns)
    config = compose_config(*keys, world_size=env.world_size)
    state, logged = build(env, config), list[str]()

    def restart_timer() -> None:
        state.setup.timer.forget()
        logged.append("timer restarted")

    if asked is None:
        return Outcome(run_loop(env, config, max_steps=None, state=state), "", logged, *temporary)
    with Profiler(
        asked,
        done=0,
        device=torch.device("cpu"),
        folder=folder,
        scratch=scratch,
        restart_timer=restart_timer,
        log=logged.append,
        warn=lambda text: logged.append(f"warning: {text}"),
    ) as own:
        state.setup = replace(state.setup, profiler=own)
        trace = run_loop(env, config, max_steps=None, stop_after=stop_after, state=state)
        own.close(is_stopped=trace.status == Status.PREEMPTED)
    return Outcome(trace, own.report, logged, *temporary)


def without_timer(asked: Any, folder: Path, *, done: int = 0, device: str = "cpu") -> Profiler:
    """Return the profiler of a run without a timer."""
    return Profiler(
        asked,
        done=done,
        device=torch.device(device),
        folder=folder,
        scratch=None,
        restart_timer=lambda: None,
        log=print,
        warn=print,
    )


def _shift_clock(ahead_ns: int) -> None:
    """Set this process's clock ahead, as far as a trace shows it."""
    read, measure = traces.read_trace, clocks.clock_ahead_ns

    def shifted(path: Path) -> dict[str, Any]:
        trace = read(path)
        return trace | {"baseTimeNanoseconds": trace["baseTimeNanoseconds"] + ahead_ns}

    output.read_trace = shifted
    output.clock_ahead_ns = lambda: measure(now_ns=lambda: time.time_ns() + ahead_ns)


def steps_of(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the traced steps of each rank."""
    return spans(merged_events(folder), traces.STEP)


@pytest.mark.parametrize("ahead_s", [0, 1], ids=["one clock", "clocks that differ by a second"])
def test_the_all_reduces_of_two_ranks_meet(tmp_path: Path, ahead_s: int) -> None:
    """In the merged trace they end together, to a millisecond, whatever the clock of rank 1."""
    run_ranks(train, 2, tmp_path, "3-8", BUSY, None, 10**9 * ahead_s)
    events = merged_events(tmp_path / "steps-3-8")
    assert apart_ms(events) < 1
    assert set(processes(events).values()) == {"rank 0", "rank 1"}


def test_the_losses_are_the_same_with_a_profile(tmp_path: Path) -> None:
    """Bit for bit, and so are the weights; only the times of the steps it slowed are left out."""
    plain, _ = run_ranks(train, 2, tmp_path, None)
    outcome, other = run_ranks(train, 2, tmp_path, "4-6")
    assert outcome.trace.losses == plain.trace.losses
    assert torch.equal(outcome.trace.weights, plain.trace.weights)
    assert outcome.trace.saved == plain.trace.saved
    assert [names_without_time(line) for line in outcome.trace.lines] == [
        names_without_time(line) for line in plain.trace.lines
    ]
    timed = [line["step"] for line in outcome.trace.lines if "perf/step_time_ms" in line]
    assert timed == [1, 2, 7, 8]  # step 3 prepares the trace
    assert all(
        "perf/peak_memory_gib" in line for line in outcome.trace.lines if "train/loss" in line
    )
    message, restart = outcome.logged
    assert message.startswith(f"traced steps 4 to 6 into {tmp_path}, written in ")
    assert restart == "timer restarted"  # so that step 7 does not pay for the files
    assert other.report == ""


def names_without_time(line: Mapping[str, float]) -> dict[str, float]:
    """Return a line without what depends on the clock."""
    return {name: value for name, value in line.items() if not name.startswith("perf/")}


def test_the_steps_and_their_parts_have_names(tmp_path: Path) -> None:
    """Each part is inside of its step; what comes between two steps is in neither."""
    outcome, _ = run_ranks(train, 2, tmp_path, "2-8")
    events = merged_events(tmp_path / "steps-2-8")
    names = [one["name"] for one in events if one["name"].startswith(traces.STEP)]
    assert names == 2 * [f"{traces.STEP}{step}" for step in range(2, 9)]
    for rank, steps in steps_of(tmp_path / "steps-2-8").items():
        for part in ("data", "forward", "backward", "optimizer"):
            found = spans(events, part)[rank]
            assert len(found) == 7
            assert all(a <= b and d <= c for (a, c), (b, d) in zip(steps, found, strict=True)), part
        for begin, end in spans(events, "evaluation")[rank]:
            assert not any(first < begin < last or first < end < last for first, last in steps)
        assert len(spans(events, "evaluation")[rank]) == 3  # after steps 3, 4 and 6
    with (tmp_path / "steps-2-8" / "operators.csv").open() as file:
        calls = {row["operator"]: float(row["calls"]) for row in csv.DictReader(file)}
    assert calls["aten::linear"] == 2.0  # two layers; the evaluations call it, too
    sizes = {one["args"]["bytes"] for one in events if one["name"] == "gloo:all_reduce"}
    assert outcome.trace.weights.numel() * 4 in sizes  # the gradients, which are float32


def test_the_report_fits_a_terminal(tmp_path: Path) -> None:
    """Five operators and the memory; the files have more of them."""
    outcome, _ = run_ranks(train, 2, tmp_path, "4-6")
    title, header, *rows, memory, path = outcome.report.splitlines()
    assert title.startswith("profile of steps 4 to 6, 2 ranks: ")
    assert header.split()[-1] == "operator"
    assert len(rows) == 5
    assert memory.startswith("most memory: ")
    assert path == f"trace for ui.perfetto.dev: {tmp_path}/steps-4-6/trace.json.gz"
    folder = tmp_path / "steps-4-6"
    written = (folder / "operators.txt").read_text().splitlines()
    assert written[:7] == [title, header, *rows]
    assert max(map(len, written)) <= 80
    assert {path.name for path in folder.iterdir()} == {
        *("trace.json.gz", "operators.txt", "operators.csv", "rank-0.json.gz", "rank-1.json.gz"),
    }
    assert {path.name for path in tmp_path.iterdir()} == {"steps-4-6"}


@pytest.mark.parametrize(
    ("asked", "name"),
    [("5-100", "steps-5-8"), (3, "steps-6-8")],
    ids=["the run ends first", "to the last step"],
)
def test_a_run_that_ends_leaves_what_it_has_traced(tmp_path: Path, asked: Any, name: str) -> None:
    """Whether or not these are all steps that were to be traced."""
    outcome, _ = run_ranks(train, 2, tmp_path, asked)
    first, last = map(int, name.split("-")[1:])
    assert {rank: len(found) for rank, found in steps_of(tmp_path / name).items()} == {
        f"rank {rank}": last - first + 1 for rank in (0, 1)
    }
    assert outcome.report.startswith(f"profile of steps {first} to {last}")


def test_a_run_that_is_stopped_writes_no_profile(tmp_path: Path) -> None:
    """Its ranks may be killed soon after the checkpoint; the log says what is missing."""
    for outcome in run_ranks(train, 2, tmp_path, "2-8", BUSY, 4):
        assert outcome.trace.status == "preempted"
        assert outcome.logged == [
            "the profile of steps 2 to 8 was stopped with the run: nothing is written"
        ]
        assert outcome.report == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_training_goes_on_without_a_profile_if_a_disk_is_full(tmp_path: Path, rank: int) -> None:
    """Of any rank; nothing stays on it."""
    folder, scratch = tmp_path / "profile", tmp_path / "scratch"
    scratch.mkdir()
    for outcome in run_ranks(train, 2, folder, "4-6", BUSY, None, 0, scratch, rank):
        assert outcome.logged[:1] == [
            f"warning: the profile of steps 4 to 6 is not written: rank {rank} cannot write its "
            "temporary files (torch has written no trace; is the disk full?); free space, or set "
            "TMPDIR to a folder of another disk"
        ]
        assert outcome.trace.status == "completed"
        assert outcome.report == ""
    assert [list(one.iterdir()) for one in (folder, scratch)] == [[], []]


def test_training_goes_on_if_the_runs_folder_takes_no_profile(tmp_path: Path) -> None:
    """Rank 0 alone writes there, and the others do not wait for it."""
    (tmp_path / "file").touch()
    for outcome in run_ranks(train, 2, tmp_path / "file" / "profile", "4-6"):
        assert outcome.logged[0] == (
            f"warning: the profile of steps 4 to 6 is not written: rank 0 cannot write to "
            f"{tmp_path}/file/profile (Not a directory); free space or make the folder writable"
        )
        assert outcome.trace.status == "completed"


@pytest.mark.parametrize("has_launcher", [True, False])
def test_what_a_killed_rank_leaves_is_found(tmp_path: Path, has_launcher: bool) -> None:
    """Its launcher removes its files, or the next one, which knows folders with an owner."""
    scratch = tmp_path / "scratch" if has_launcher else None
    if scratch is not None:
        scratch.mkdir()
    for outcome in run_ranks(train, 2, tmp_path / "profile", "4-6", BUSY, None, 0, scratch):
        assert outcome.temporary is not None
        assert not outcome.temporary.exists()
        if scratch is None:
            assert outcome.temporary.name.startswith(PREFIX)
        else:
            assert outcome.temporary.parent == scratch


@pytest.mark.parametrize("asked", ["9-10", 4], ids=["after the run", "ready, but never begun"])
def test_a_profile_that_never_began_is_a_warning(tmp_path: Path, asked: Any) -> None:
    """A stream, or a stop, ends a run earlier than the config can tell."""
    outcome, _ = run_ranks(train, 2, tmp_path, asked, KEYS, None if asked == "9-10" else 3)
    step = 8 if asked == "9-10" else 4
    assert outcome.logged == [
        f"warning: train.profile={asked} traced nothing: this run ends at step {step}, before step "
        f"{9 if asked == '9-10' else 6}"
    ]
    assert list(tmp_path.iterdir()) == []


def test_steps_before_a_resume_are_past(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A range may be past as a whole, or in part; a number counts anew."""

    def is_due(asked: Any, *, done: int) -> bool:
        return has_steps_to_trace(asked, done=done, folder=tmp_path, warn=print)

    assert not is_due(None, done=0)
    assert capsys.readouterr().out == ""
    assert not is_due("4-6", done=6)
    assert capsys.readouterr().out == (
        "train.profile=4-6 traces nothing: this run goes on after step 6; name later steps, or "
        "their number: train.profile=5\n"
    )
    (tmp_path / "steps-5-6").mkdir()  # before a restart of the ranks
    assert not is_due("4-6", done=6)
    for asked, done, first in (("4-6", 5, 6), (2, 100, 106)):
        assert is_due(asked, done=done)
        assert without_timer(asked, tmp_path, done=done)._first == first
    assert capsys.readouterr().out == ""


def test_without_a_profile_nothing_is_wrapped() -> None:
    """The loop iterates over the batches themselves."""
    batches = [object()]
    assert NullProfiler().steps(batches) is batches


def test_memory_that_runs_out_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of the GPU's memory is written, if it was kept; another error writes none."""
    written = list[Path]()
    monkeypatch.setattr(profiler, "record_history", lambda: None)
    monkeypatch.setattr(profiler, "dump_history", written.append)
    monkeypatch.setattr(profiler.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(profile, "prepare_trace", lambda self: None)
    for error in (torch.OutOfMemoryError("full"), ValueError("other")):
        with suppress(type(error)), without_timer(1, tmp_path / "profile", device="cuda") as own:
            next(iter(own.steps([0])))
            raise error
    assert written == [tmp_path / "profile" / "out-of-memory-rank-3.pickle"]
