"""A profile of a run's steps: which are traced, what is written, and that nothing else changes."""

import gzip
import json
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import first_of
from train_states import Trace, build, compose_config, run_loop

from ddp_runner.dist_env import DistEnv
from ddp_runner.train import profiler
from ddp_runner.train.profiler import Profiler, has_steps_to_trace

# Eight steps in two epochs; an evaluation inside of each, and at its end.
KEYS = ("model=toy", "dataset.num_samples=32", "batch.global_size=8", "train.epochs=2")
BUSY = (*KEYS, "train.eval_every_steps=3", "checkpoint.every_steps=2", "train.log_every_steps=1")


@dataclass
class Outcome:
    """What a rank's loop has left."""

    trace: Trace
    logged: list[str] = field(default_factory=list)


def train(
    env: DistEnv,
    folder: Path,
    asked: Any,
    keys: tuple[str, ...] = BUSY,
    stop_after: int | None = None,
    full_disk_of: int | None = None,
) -> Outcome:
    """Train with a profile.

    Args:
        env: this rank's place.
        folder: of the profiles.
        asked: the value of ``train.profile``.
        keys: of the command line.
        stop_after: the step after which the last rank asks to stop.
        full_disk_of: a rank that cannot write a file of more than some bytes.
    """
    if env.rank == full_disk_of:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    config = compose_config(*keys, world_size=env.world_size)
    state, logged = build(env, config), list[str]()

    def restart_timer() -> None:
        state.timer.forget()
        logged.append("timer restarted")

    if asked is None:
        return Outcome(run_loop(env, config, max_steps=None, state=state), logged)
    with Profiler(
        asked,
        done=0,
        device=torch.device("cpu"),
        folder=folder,
        restart_timer=restart_timer,
        log=logged.append,
        warn=lambda text: logged.append(f"warning: {text}"),
    ) as own:
        state.profiler = own
        trace = run_loop(env, config, max_steps=None, stop_after=stop_after, state=state)
    return Outcome(trace, logged)


def traced_steps(folder: Path, rank: int) -> list[int]:
    """Return the numbers of the steps in a rank's trace."""
    trace = json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()))
    assert trace["distributedInfo"]["rank"] == rank  # by which other tools know the rank
    names = [event["name"] for event in trace["traceEvents"]]
    return sorted(
        int(name.removeprefix("ProfilerStep#"))
        for name in names
        if name.startswith("ProfilerStep#")
    )


def names_without_time(line: Mapping[str, float]) -> dict[str, float]:
    """Return a line without what depends on the clock."""
    return {name: value for name, value in line.items() if not name.startswith("perf/")}


@pytest.mark.full
def test_the_losses_are_the_same_with_a_profile(tmp_path: Path) -> None:
    """Bit for bit, and so are the weights; only the times of the steps it slowed are left out."""
    plain, _ = run_ranks(train, 2, tmp_path, None)
    outcome, _ = run_ranks(train, 2, tmp_path, "4-6")
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
    assert message.startswith(f"traced steps 4 to 6 into {tmp_path}/steps-4-6, written in ")
    assert restart == "timer restarted"  # so that step 7 does not pay for the files


@pytest.mark.full
@pytest.mark.parametrize(
    ("asked", "first", "last"),
    first_of([("4-6", 4, 6), ("1-2", 1, 2), (3, 6, 8), ("5-100", 5, 8)]),
    ids=["a range", "from the first step", "to the last step", "the run ends first"],
)
def test_each_rank_writes_its_trace_and_its_table(
    tmp_path: Path, asked: Any, first: int, last: int
) -> None:
    """The steps have the numbers that metrics.jsonl has."""
    run_ranks(train, 2, tmp_path, asked)
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"steps-{first}-{last}"
    assert {path.name for path in folder.iterdir()} == {
        *("rank-0.json.gz", "rank-0.txt", "rank-1.json.gz", "rank-1.txt")
    }
    for rank in (0, 1):
        steps = traced_steps(folder, rank)
        assert steps[: last - first + 1] == list(range(first, last + 1))
        assert steps[last - first + 1 :] in ([], [last + 1])  # what comes after the last step
        assert "aten::addmm" in (folder / f"rank-{rank}.txt").read_text()


def test_a_run_that_is_stopped_leaves_what_it_has_traced(tmp_path: Path) -> None:
    """Its checkpoint comes first; see run_training."""
    for outcome in run_ranks(train, 2, tmp_path, "2-8", BUSY, 4):
        assert outcome.trace.status == "preempted"
        assert outcome.logged[0].startswith("traced steps 2 to 5 into ")
    assert [path.name for path in tmp_path.iterdir()] == ["steps-2-5"]


@pytest.mark.parametrize("rank", first_of([1, 0]))
def test_training_goes_on_without_a_profile_if_a_disk_is_full(tmp_path: Path, rank: int) -> None:
    """The other rank has its own."""
    for other, outcome in enumerate(run_ranks(train, 2, tmp_path, "4-6", BUSY, None, rank)):
        assert outcome.trace.status == "completed"
        if other == rank:
            assert outcome.logged[0] == (
                f"warning: the profile of steps 4 to 6 was not written to {tmp_path}/steps-4-6 "
                "(torch wrote no trace; is the disk full?); free space or make the folder "
                "writable"
            )
    left = {path.name for path in (tmp_path / "steps-4-6").iterdir()}
    assert left == {f"rank-{1 - rank}.json.gz", f"rank-{1 - rank}.txt"}


@pytest.mark.full
def test_training_goes_on_if_the_runs_folder_takes_no_profile(tmp_path: Path) -> None:
    """Each rank warns in its log."""
    (tmp_path / "file").touch()
    for outcome in run_ranks(train, 2, tmp_path / "file" / "profile", "4-6"):
        assert outcome.logged[0] == (
            f"warning: the profile of steps 4 to 6 was not written to {tmp_path}/file/profile/"
            "steps-4-6 (Not a directory); free space or make the folder writable"
        )
        assert outcome.trace.status == "completed"


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
        "train.profile=4-6 traces nothing: this run continues after step 6; give later "
        "steps, or a number of steps: train.profile=5\n"
    )
    (tmp_path / "steps-5-6").mkdir()  # before a restart of the ranks
    assert not is_due("4-6", done=6)
    assert is_due("4-6", done=5)
    assert is_due(2, done=100)
    assert capsys.readouterr().out == ""


def test_memory_that_runs_out_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of the GPU's memory is written, if it was kept; another error writes none."""
    written = list[Path]()
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")  # so that it is restored
    monkeypatch.setattr(profiler, "record_history", lambda: None)
    monkeypatch.setattr(profiler, "dump_history", written.append)
    monkeypatch.setattr(profiler.dist, "get_rank", lambda: 3)
    for error in (torch.OutOfMemoryError("full"), ValueError("other")):
        own = Profiler(
            2,
            done=0,
            device=torch.device("cuda"),
            folder=tmp_path / "profile",
            restart_timer=lambda: None,
            log=print,
            warn=print,
        )
        with suppress(type(error)), own:
            raise error
    assert written == [tmp_path / "profile" / "out-of-memory-rank-3.pickle"]
