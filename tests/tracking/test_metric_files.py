"""TensorBoard and metrics.jsonl agree, also after a resume."""

import errno
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import FileWriter

from ddp_runner.errors import UserError
from ddp_runner.tracking.metric_files import CONFUSION_FILE, CONFUSION_TAG, MetricFiles
from ddp_runner.tracking.run_dir import METRICS_FILE, RunDir
from ddp_runner.tracking.tensorboard import MOST_CLASSES

CONFIG = "model:\n  name: convnet\n"


def opened(run_dir: Path, *, resume_step: int | None = None) -> MetricFiles:
    """Return the files of a run with the config above."""
    folder = RunDir(run_dir)
    folder.config.parent.mkdir(exist_ok=True)
    folder.config.write_text(CONFIG)
    return MetricFiles(folder, resume_step=resume_step)


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; NaN and Infinity, which are not JSON, fail the test."""

    def reject(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    text = (run_dir / METRICS_FILE).read_text()
    return [json.loads(line, parse_constant=reject) for line in text.splitlines()]


def read_events(run_dir: Path) -> EventAccumulator:
    """Read a run's event files as TensorBoard does."""
    return EventAccumulator(str(run_dir)).Reload()


def curve(events: EventAccumulator, name: str) -> list[tuple[int, Any]]:
    """Return the (step, value) points of a metric."""
    return [(event.step, event.value) for event in events.Scalars(name)]


def num_event_files(run_dir: Path) -> int:
    """Return how many event files a run has."""
    return len(list(run_dir.glob("events.out.tfevents.*")))


def log_steps(files: MetricFiles, steps: range, *, scale: float = 1.0) -> None:
    """Log a loss of scale / step at each step, and close."""
    for step in steps:
        files.log({"train/loss": scale / step}, step=step, epoch=step // 4)
    files.close()


def test_metrics_and_event_file_hold_the_same_numbers(tmp_path: Path) -> None:
    """Each metric of each line is a point in TensorBoard, to float32, and nothing else is."""
    files = opened(tmp_path)
    files.log({"train/loss": 0.1, "perf/samples_per_s": 1234.5}, step=1, epoch=0)
    files.log({"train/loss": 0.05}, step=2, epoch=0)
    files.log({"eval/accuracy": 0.9}, step=2, epoch=1)
    assert len(read_lines(tmp_path)) == 3, "each line is there as soon as it is logged"
    files.close()
    lines, events = read_lines(tmp_path), read_events(tmp_path)
    assert [(line["step"], line["epoch"]) for line in lines] == [(1, 0), (2, 0), (2, 1)]
    tags = events.Tags()["scalars"]
    assert sorted(tags) == ["eval/accuracy", "perf/samples_per_s", "train/loss"]
    for tag in tags:
        expected = [(line["step"], pytest.approx(line[tag])) for line in lines if tag in line]
        assert curve(events, tag) == expected
    assert num_event_files(tmp_path) == 1
    assert files.last_metrics == {
        "train/loss": 0.05,
        "perf/samples_per_s": 1234.5,
        "eval/accuracy": 0.9,
    }


def test_a_resumed_run_goes_on_in_the_same_curves(tmp_path: Path) -> None:
    """What was logged after the checkpoint, and a line cut by the kill, are gone from both."""
    log_steps(opened(tmp_path), range(1, 9))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 9, "epoch": 2, "ti')
    files = opened(tmp_path, resume_step=4)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3, 4]
    assert files.last_metrics == {"train/loss": 0.25}
    log_steps(files, range(5, 7), scale=10.0)
    lines, events = read_lines(tmp_path), read_events(tmp_path)
    expected = [(step, (1 if step < 5 else 10) / step) for step in range(1, 7)]
    assert [(line["step"], line["train/loss"]) for line in lines] == expected
    assert curve(events, "train/loss") == [(step, pytest.approx(y)) for step, y in expected]
    assert num_event_files(tmp_path) == 1, "TensorBoard shows all that lies in any file"
    assert not list(tmp_path.glob(".*.tmp"))


def test_what_a_kill_kept_from_tensorboard_is_there_after_a_resume(tmp_path: Path) -> None:
    """Its file lags behind metrics.jsonl, out of which it is written again; the clock goes on."""
    log_steps(opened(tmp_path), range(1, 5))
    lines = read_lines(tmp_path)
    lines[1] |= {"train/loss": None, "time_s": 100.0}
    lines[2]["time_s"], lines[3]["time_s"] = 101.0, 102.0
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / METRICS_FILE).write_text(text)
    for path in tmp_path.glob("events.out.tfevents.*"):
        path.write_bytes(path.read_bytes()[:-100])
    opened(tmp_path, resume_step=3).close()
    events = read_events(tmp_path).Scalars("train/loss")
    assert [event.step for event in events] == [1, 2, 3]
    assert [event.value for event in events] == pytest.approx([1, math.nan, 1 / 3], nan_ok=True)
    assert events[2].wall_time - events[1].wall_time == pytest.approx(1, abs=0.1)
    assert events[2].wall_time == pytest.approx(time.time(), abs=3600)


def test_there_is_a_picture_for_each_evaluation_and_a_resume_draws_them_again(
    tmp_path: Path,
) -> None:
    """None is lost and none is there twice; a line that a kill cut in half is dropped."""
    files = opened(tmp_path)
    for step in (4, 8, 12):
        files.log_confusion([[step, 0], [1, 2]], step=step)
    files.close()
    killed = read_events(tmp_path).Images(CONFUSION_TAG)
    assert [event.step for event in killed] == [4, 8, 12]
    with (tmp_path / CONFUSION_FILE).open("a") as file:
        file.write('{"step": 16, "time_s": 2.0, "cou')
    files = opened(tmp_path, resume_step=8)
    files.log_confusion([[8, 0], [1, 2]], step=8)  # an evaluation that is made once more
    files.log_confusion([[3, 3], [3, 3]], step=12)
    files.close()
    resumed = read_events(tmp_path).Images(CONFUSION_TAG)
    assert [event.step for event in resumed] == [4, 8, 12]
    for before, after in zip(killed[:2], resumed[:2], strict=True):
        assert after.encoded_image_string == before.encoded_image_string
    assert resumed[2].encoded_image_string != killed[2].encoded_image_string
    opened(tmp_path).close()  # it begins anew
    assert not read_events(tmp_path).Tags()["images"]


def test_pictures_of_ones_own_are_files_and_come_back_after_a_resume(tmp_path: Path) -> None:
    """Those after the checkpoint are deleted: the run draws them again."""
    files = opened(tmp_path)
    drawn = {step: np.full((2, 3, 3), step, dtype=np.uint8) for step in (4, 8, 12)}
    for step, pixels in drawn.items():
        files.log_image("gan/samples", pixels, step=step)
    with pytest.raises(UserError, match=r"'\.\./up' cannot name a picture; use letters"):
        files.log_image("../up", drawn[4], step=4)
    files.close()
    killed = read_events(tmp_path).Images("gan/samples")
    assert [(event.step, event.height, event.width) for event in killed] == [
        (step, 2, 3) for step in drawn
    ]
    opened(tmp_path, resume_step=8).close()
    resumed = read_events(tmp_path).Images("gan/samples")
    pictures = sorted((tmp_path / "images" / "gan" / "samples").iterdir())
    kept = [path.read_bytes() for path in pictures]
    assert [event.encoded_image_string for event in resumed] == kept
    assert [event.encoded_image_string for event in killed[:2]] == kept
    assert (np.asarray(Image.open(pictures[1])) == drawn[8]).all()
    assert [path.name for path in pictures] == ["step-00000004.png", "step-00000008.png"]
    assert resumed[0].wall_time == pytest.approx(pictures[0].stat().st_mtime)


def test_what_a_killed_run_logged_at_its_checkpoint_is_there_once(tmp_path: Path) -> None:
    """A kill may come between a checkpoint and what else is logged at its step."""
    pixels = np.zeros((2, 3, 3), dtype=np.uint8)
    files = opened(tmp_path)
    files.log({"a": 1.0}, step=4, epoch=1)
    files.log_image("drawn", pixels, step=4)
    files.close()
    files = opened(tmp_path, resume_step=4)
    files.log({"a": 1.0}, step=4, epoch=1)
    files.log({"a": 1.0, "b": 2.0}, step=4, epoch=1)
    files.log_image("drawn", pixels, step=4)
    files.log({"a": 3.0}, step=5, epoch=1)
    files.log_image("drawn", pixels, step=5)
    files.close()
    events = read_events(tmp_path)
    assert curve(events, "a") == [(4, 1.0), (5, 3.0)]
    assert curve(events, "b") == [(4, 2.0)]
    assert [event.step for event in events.Images("drawn")] == [4, 5]
    assert [line["step"] for line in read_lines(tmp_path)] == [4, 4, 5]


def test_more_classes_than_can_be_drawn_have_no_picture(tmp_path: Path) -> None:
    """And no file of counts, which would grow by megabytes."""
    files = opened(tmp_path)
    files.log_confusion([[0] * (MOST_CLASSES + 1)] * (MOST_CLASSES + 1), step=1)
    files.close()
    assert not (tmp_path / CONFUSION_FILE).exists()
    assert not read_events(tmp_path).Tags()["images"]


def test_time_continues_after_a_resume(tmp_path: Path) -> None:
    """The time that the run lay still does not count, the time that it ran before does."""
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "epoch": 0, "time_s": 1000.0}\n')
    log_steps(opened(tmp_path, resume_step=1), range(2, 4))
    times = [line["time_s"] for line in read_lines(tmp_path)]
    assert times == sorted(times)
    assert 1000.0 <= times[-1] < 1060.0


def test_a_restart_before_the_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    """Without a step to resume from, what the failed attempt logged is cut away."""
    log_steps(opened(tmp_path), range(1, 9))
    log_steps(opened(tmp_path), range(1, 3))
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2]
    assert [step for step, _ in curve(read_events(tmp_path), "train/loss")] == [1, 2]


def test_the_config_is_in_tensorboard_once(tmp_path: Path) -> None:
    """A resume does not repeat it."""
    log_steps(opened(tmp_path), range(1, 3))
    log_steps(opened(tmp_path, resume_step=2), range(3, 5))
    (event,) = read_events(tmp_path).Tensors("config/text_summary")
    assert event.tensor_proto.string_val[0].decode() == f"```yaml\n{CONFIG}\n```"


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    """A reader that knows only JSON can read every line."""
    files = opened(tmp_path)
    files.log({"a": math.nan, "b": math.inf, "c": 1.0}, step=1, epoch=0)
    files.close()
    (line,) = read_lines(tmp_path)
    assert (line["a"], line["b"], line["c"]) == (None, None, 1.0)
    assert files.last_metrics == {"a": None, "b": None, "c": 1.0}
    assert math.isnan(curve(read_events(tmp_path), "a")[0][1])


def test_a_full_disk_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has the run's folder and the reason, in place of a traceback."""

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(FileWriter, "add_summary", fail)
        with pytest.raises(UserError, match=f"{tmp_path} .No space left on device") as caught:
            files.log({"a": 1.0}, step=1, epoch=0)
    assert "\n" not in str(caught.value)
    files.close()
