"""A tracker gets each metric of each step once, however often a call fails or the run resumes."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from own_trackers import calls, points

from ddp_runner.tracking import track
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record
from ddp_runner.tracking.track import follow
from ddp_runner.tracking.trackers.follower import Follower
from ddp_runner.tracking.trackers.tracker import MetricLine, TrackedRun, Tracker

CLOCK = 1000.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run folder with a config and run.json, and no lines yet."""
    folder = tmp_path / "toy" / "run"
    (folder / ".hydra").mkdir(parents=True)
    (folder / "trackers").mkdir()
    config = {"optimizer": {"lr": 0.1}, "tags": ["a"]}
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").touch()
    write_run_record(folder, started_at=5.0, config_hash="one", tags=["a"], notes="why")
    return folder


def write_lines(run_dir: Path, steps: Sequence[int], *, value: float = 1.0) -> None:
    """Append a line for each step."""
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in steps:
            line = {"step": step, "epoch": 1, "time_s": step / 10, "train/loss": value * step}
            file.write(json.dumps(line) + "\n")


def follower(
    run_dir: Path, *, resume_step: int | None = None, clock: float = CLOCK, **keys: Any
) -> Follower:
    """Return the follower of a session, with a recorder beside the run folder."""
    settings = {"_target_": "own_trackers.Recorder", "path": str(sent(run_dir)), **keys}
    write_run_record(
        run_dir, loaded={"started_at": clock, "resume_step": resume_step, "clock": clock}
    )
    one = Follower(RunDir(run_dir), "mine", settings=settings, allowed=["own_trackers"])
    with one.locked():
        return one


def sent(run_dir: Path) -> Path:
    """Return where the recorder writes."""
    return run_dir.parent / "calls"


def steps_sent(run_dir: Path) -> list[int]:
    """Return the steps that the recorder got."""
    return [step for step, _, _ in points(sent(run_dir))]


def test_a_run_is_begun_followed_and_ended(run_dir: Path) -> None:
    """With the times of its lines, its last metrics and its files; NaN is NaN again."""
    one = follower(run_dir)
    write_lines(run_dir, [10, 20])
    one.catch_up()
    one.catch_up()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "epoch": 2, "time_s": 3.0, "train/loss": null}\n{"step": 40, ')
    one.catch_up()
    (run_dir / "model.safetensors").touch()
    write_run_record(run_dir, metrics={"train/loss": None})
    one.end("completed")
    begin, first, second, end = calls(sent(run_dir))
    assert begin == {"begin": "toy/run", "earlier": None, "tags": ["a"], "sweep": None}
    assert [(line["step"], line["time"]) for line in first["log"]] == [(10, 1001.0), (20, 1002.0)]
    assert (second["log"][0]["step"], second["log"][0]["epoch"]) == (30, 2)
    assert math.isnan(second["log"][0]["metrics"]["train/loss"])
    files = ["run.json", "config.yaml", "model.safetensors"]
    assert end == {"end": "completed", "metrics": {"train/loss": None}, "files": files}
    assert json.loads((run_dir / "trackers" / "mine.json").read_text())["id"] == "id-1"


def test_many_lines_are_sent_in_several_calls(run_dir: Path) -> None:
    """They come in their order, and none comes twice."""
    write_lines(run_dir, range(2500))
    follower(run_dir).catch_up()
    sizes = [len(call["log"]) for call in calls(sent(run_dir)) if "log" in call]
    assert len(sizes) > 1
    assert steps_sent(run_dir) == list(range(2500))


def test_what_could_not_be_sent_is_sent_later(run_dir: Path) -> None:
    """Also by the next session, when the server was away until the end."""
    broken = run_dir.parent / "broken"
    one = follower(run_dir, broken=str(broken))
    write_lines(run_dir, [1])
    one.catch_up()
    broken.touch()
    write_lines(run_dir, [2, 3])
    with pytest.raises(ConnectionError):
        one.catch_up()
    with pytest.raises(ConnectionError):
        one.end("completed")
    broken.unlink()
    follower(run_dir, resume_step=3, broken=str(broken)).end("completed")
    assert steps_sent(run_dir) == [1, 2, 3]
    assert calls(sent(run_dir))[2]["earlier"] == "id-1"


def test_steps_that_a_killed_run_repeats_are_not_sent_again(run_dir: Path) -> None:
    """They have the same numbers. A metric of such a step that is new is sent."""
    write_lines(run_dir, [1, 2, 3, 4])
    follower(run_dir).catch_up()
    (run_dir / "metrics.jsonl").write_text("")  # cut back to the checkpoint of step 2
    write_lines(run_dir, [1, 2])
    resumed = follower(run_dir, resume_step=2)
    write_lines(run_dir, [3, 4])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "epoch": 1, "time_s": 1.0, "eval/loss": 7.0}\n')
    write_lines(run_dir, [5])
    resumed.end("completed")
    assert [(step, name) for step, name, _ in points(sent(run_dir))][4:] == [
        (4, "eval/loss"),
        (5, "train/loss"),
    ]


def test_another_place_gets_all_of_the_run(run_dir: Path) -> None:
    """A tracker that begins the run anew returns another id."""
    write_lines(run_dir, [1, 2])
    follower(run_dir).catch_up()
    resumed = follower(run_dir, resume_step=2, id="id-2")
    write_lines(run_dir, [3])
    resumed.end("completed")
    follower(run_dir, resume_step=3).end("completed")
    assert steps_sent(run_dir) == [1, 2, 1, 2, 3]


@pytest.mark.parametrize(("resume_step", "again"), [(2, [3, 4]), (None, [1, 2, 3, 4])])
def test_another_config_gives_other_numbers_which_are_sent(
    run_dir: Path, resume_step: int | None, again: list[int]
) -> None:
    """From the checkpoint on; a run that begins anew has no step in common."""
    write_lines(run_dir, [1, 2, 3, 4])
    follower(run_dir).catch_up()
    write_run_record(run_dir, config_hash="another")
    (run_dir / "metrics.jsonl").write_text("")
    write_lines(run_dir, [1, 2, 3, 4], value=9.0)
    follower(run_dir, resume_step=resume_step).catch_up()
    assert steps_sent(run_dir) == [1, 2, 3, 4, *again]


def test_the_first_error_alone_is_reported(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt raises, and the last one is made when the run has ended."""
    monkeypatch.setattr(track, "POLL_S", 0.001)
    attempts, reports = list[str](), list[BaseException]()

    class Broken:
        """Fails, also at the fourth attempt, with which the run ends."""

        def begin(self, run: TrackedRun) -> str:
            attempts.append(run.name)
            raise ConnectionError(f"attempt {len(attempts)} \n" + "x" * 9999)

        def log(self, lines: Sequence[MetricLine]) -> None: ...

        def end(self, status: str, *, metrics: Any, files: Any) -> None: ...

    assert isinstance(Broken(), Tracker)
    one = follower(run_dir)
    one._tracker = Broken()
    assert not follow(one, lambda: "completed" if len(attempts) == 4 else None, reports.append)
    assert len(attempts) == 5
    (error,) = reports
    assert str(error) == "attempt 1 \n" + "x" * 9999


@pytest.mark.parametrize("text", ['{"id": ', "[]", '{"other": 5}'])
def test_a_damaged_progress_is_begun_anew(run_dir: Path, text: str) -> None:
    """A kill cannot cut it, but an editor can."""
    (run_dir / "trackers" / "mine.json").write_text(text)
    write_lines(run_dir, [1])
    follower(run_dir, resume_step=1).catch_up()
    assert calls(sent(run_dir))[0]["earlier"] is None
    assert steps_sent(run_dir) == [1]
