"""What TensorBoard itself makes of runs: curves after a resume, HParams and pictures."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import run_command
from configs import resolved
from run_folders import metrics, record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_end_info_plugin_data
from tensorboard_server import get_json, serve_tensorboard

from ddp_runner.config.identity import leaves
from ddp_runner.job import Job
from ddp_runner.metric_names import METRICS
from ddp_runner.tracking.alive import Heartbeat
from ddp_runner.tracking.metric_files import MetricFiles
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import RunLogger
from ddp_runner.tracking.run_record import start_session, write_run_record
from ddp_runner.tracking.tensorboard import MARGIN, MOST_CLASSES, confusion_picture, hyperparameters

STATUSES = [f"STATUS_{name}" for name in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")]
CONFIG: dict[str, Any] = {
    "task": "train",
    "world_size": 2,
    "seed": 0,
    "name": "mine",
    "data_root": "/data",
    "batch": {"global_size": None, "per_rank": 10, "eval_per_rank": None},
    "model": {"name": "toy", "_target_": "ddp_runner.models.toy.ToyModel", "weights": "runs/a"},
    "dataset": {"name": "digits", "num_classes": 10, "path": "digits", "mean": 0.3},
    "parallelism": {"name": "ps", "mode": "async", "bucket_cap_mb": 25},
    "optimizer": {"name": "sgd", "lr": 0.1, "nesterov": False, "note": "${oc.env:TOKEN}"},
    "train": {"epochs": 2, "log_every_steps": 1},
    "launch": {"nnodes": 1},
}


def opened(
    folder: Path, config: Mapping[str, Any], *, resume_step: int | None = None
) -> MetricFiles:
    """Return the files of a run with a config."""
    run_dir = RunDir(folder)
    run_dir.config.parent.mkdir(parents=True, exist_ok=True)
    run_dir.config.write_text(yaml.safe_dump(config))
    return MetricFiles(run_dir, resume_step=resume_step)


def track(run_dir: Path, *, resume_step: int | None = None, world_size: int = 2) -> MetricFiles:
    """Return the files of a run with the config above."""
    return opened(run_dir, {**CONFIG, "world_size": world_size}, resume_step=resume_step)


def log(files: MetricFiles, steps: Iterable[int], *, scale: float = 1.0) -> None:
    """Log a loss at each of some steps, and an evaluation at each fourth."""
    for step in steps:
        files.log({"train/loss": scale / step}, step=step, epoch=1)
        if step % 4 == 0:
            files.log({"eval/loss": scale * step}, step=step, epoch=1)


def curves(url: str, run: str, tag: str) -> list[tuple[int, float]]:
    """Return the points of a curve as TensorBoard draws it."""
    points = get_json(f"{url}/data/plugin/scalars/scalars?run={run}&tag={tag}")
    return [(step, value) for _, step, value in points]


def session_groups(url: str) -> dict[str, dict[str, Any]]:
    """Return the rows of the HParams tab by their name."""
    question = {"allowedStatuses": STATUSES, "colParams": [], "startIndex": 0, "sliceSize": 9}
    found = get_json(f"{url}/data/plugin/hparams/session_groups", question)["sessionGroups"]
    return {group["name"]: group for group in found}


def plugin_data(run_dir: Path, plugin: str) -> dict[str, bytes]:
    """Return what a run's event file holds for one of TensorBoard's plug-ins."""
    events = EventAccumulator(str(run_dir)).Reload()
    try:
        return dict(events.PluginTagToContent(plugin))
    except KeyError:
        return {}


@pytest.mark.full
def test_the_default_loader_shows_no_point_twice_after_resumes(tmp_path: Path) -> None:
    """What was logged after the checkpoint is gone, also where no later point takes its place."""
    run_dir = tmp_path / "board" / "run"
    killed = track(run_dir)
    log(killed, range(1, 10))
    killed.close()
    killed_again = track(run_dir, resume_step=3)
    log(killed_again, (4, 6, 7), scale=10)  # of another rhythm, and ended before an evaluation
    killed_again.close()
    last = track(run_dir, resume_step=6)
    log(last, [10], scale=100)
    last.close(status="completed")
    wanted = {"run": {"train/loss", "eval/loss"}}
    with serve_tensorboard(tmp_path / "board", folder=tmp_path / "server", wanted=wanted) as url:
        losses = curves(url, "run", "train/loss")
        assert losses == [
            (step, pytest.approx(scale / step))
            for step, scale in ((1, 1), (2, 1), (3, 1), (4, 10), (6, 10), (10, 100))
        ]
        assert curves(url, "run", "eval/loss") == [(4, 40)]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 6, 10]


@pytest.mark.full
def test_hparams_has_a_row_with_values_for_each_run_however_it_ended(tmp_path: Path) -> None:
    """One row for a resumed run, with the keys and the status of its last attempt."""
    board = tmp_path / "board"
    for name, status in (("done", "completed"), ("failed", "failed"), ("stopped", "preempted")):
        files = track(board / name)
        log(files, range(1, 5))
        files.close(status=status)
    resumed = track(board / "resumed")
    log(resumed, range(1, 5))
    resumed.close(status="failed")
    resumed = track(board / "resumed", resume_step=2, world_size=4)
    log(resumed, range(3, 9))
    resumed.close(status="completed")
    names = ("done", "failed", "stopped", "resumed")
    wanted = {name: {"train/loss", "eval/loss"} for name in names}
    with serve_tensorboard(board, folder=tmp_path / "server", wanted=wanted) as url:
        rows = session_groups(url)
    assert {name: [one["status"] for one in row["sessions"]] for name, row in rows.items()} == {
        "done": ["STATUS_SUCCESS"],
        "failed": ["STATUS_UNKNOWN"],
        "stopped": ["STATUS_UNKNOWN"],
        "resumed": ["STATUS_SUCCESS"],
    }
    values = {one["name"]["tag"]: one["value"] for one in rows["resumed"]["metricValues"]}
    assert values == {"train/loss": pytest.approx(1 / 8), "eval/loss": 8}
    assert rows["resumed"]["hparams"]["world_size"] == 4
    assert rows["done"]["hparams"]["optimizer.nesterov"] == 0


def test_hyperparameters_are_what_is_tuned() -> None:
    """Numbers, switches and words; no paths, secrets or classes, nor keys that change nothing."""
    found = hyperparameters(dict(leaves(CONFIG)))
    assert found == {
        "world_size": 2,
        "seed": 0,
        "batch.per_rank": 10,
        "model.name": "toy",
        "dataset.name": "digits",
        "dataset.num_classes": 10,
        "dataset.path": "digits",
        "dataset.mean": 0.3,
        "parallelism.name": "ps",
        "parallelism.mode": "async",
        "parallelism.bucket_cap_mb": 25,
        "optimizer.name": "sgd",
        "optimizer.lr": 0.1,
        "optimizer.nesterov": False,
        "train.epochs": 2,
        "train.log_every_steps": 1,
    }


def test_a_benchmark_is_no_row_of_the_hparams_tab(tmp_path: Path) -> None:
    """It would have no values. What the jobs of a sweep vary is marked."""
    for seed in (0, 1):
        files = opened(tmp_path / f"seed={seed}", CONFIG | {"seed": seed})
        files.log({"train/loss": 5.0}, step=8, epoch=0)
        files.close()
    files = opened(tmp_path / "bench", CONFIG | {"task": "collectives"})
    files.log({"collectives/barrier/latency_us_median": 5.0}, step=8, epoch=0)
    files.close()
    assert not plugin_data(tmp_path / "bench", "hparams")
    wanted = {f"seed={seed}": {"train/loss"} for seed in (0, 1)}
    wanted["bench"] = {"collectives/barrier/latency_us_median"}
    with serve_tensorboard(tmp_path, folder=tmp_path / ".server", wanted=wanted) as url:
        shown = get_json(f"{url}/data/plugin/hparams/experiment", {})["hparamInfos"]
        rows = session_groups(url)
    assert [one["name"] for one in shown if one["differs"]] == ["seed"]
    assert set(rows) == {"seed=0", "seed=1"}


def test_hparams_of_a_loop_of_ones_own_are_what_it_used(tmp_path: Path) -> None:
    """Its arguments and the groups that it built from, not those that it left; its own metrics."""
    own = {"task": "mine.train", "train": {"epochs": 10, "max_steps": 7}}  # 10 is the default
    wanted = {}
    for latent in (8, 16):
        run_dir = tmp_path / f"loop.latent={latent}"
        write_run_record(run_dir, uses=["dataset"])
        loop = {"loop": {"latent": latent, "width": 4}}
        files = opened(run_dir, CONFIG | own | loop)
        files.log({"d/loss": 0.5}, step=1, epoch=1)
        files.close(status="completed")
        wanted[run_dir.name] = {"d/loss"}
    with serve_tensorboard(tmp_path, folder=tmp_path / ".server", wanted=wanted) as url:
        shown = get_json(f"{url}/data/plugin/hparams/experiment", {})["hparamInfos"]
        rows = session_groups(url)
    assert [one["name"] for one in shown if one["differs"]] == ["loop.latent"]
    names = {one["name"] for one in shown}
    groups = {name.partition(".")[0] for name in names}
    assert groups == {"world_size", "seed", "batch", "dataset", "parallelism", "loop", "train"}
    assert {name for name in names if name.startswith("train.")} == {"train.max_steps"}
    assert [row["metricValues"][0]["value"] for row in rows.values()] == [0.5, 0.5]


def logger(folder: Path) -> RunLogger:
    """Return the logger of a run that begins."""
    opened(folder, CONFIG).close()
    start_session(folder, started_at=0.0)
    job = Job(resolved("model=toy")[0], started_at=0.0, provenance={})
    return RunLogger(RunDir(folder), job=job, heartbeat=Heartbeat(), max_steps=9, total_epochs=3)


def test_a_run_that_fails_keeps_its_last_points(tmp_path: Path) -> None:
    """The error passes on; the run has not completed."""
    one = logger(tmp_path)
    one.log({"train/loss": 1.0}, step=1, epoch=1)
    with pytest.raises(ZeroDivisionError), one:
        raise ZeroDivisionError
    assert set(plugin_data(tmp_path, "hparams")) == {"_hparams_/session_start_info"}
    assert len(EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")) == 1


def test_a_logger_that_ends_well_records_no_failure(tmp_path: Path) -> None:
    """And its block closes nothing twice."""
    with logger(tmp_path) as one:
        one.log({"train/loss": 1.0}, step=1, epoch=1)
        one.finish("completed", step=1, epoch=1)
    content = plugin_data(tmp_path, "hparams")["_hparams_/session_end_info"]
    assert parse_session_end_info_plugin_data(content).status == 1  # success


@pytest.mark.full
def test_every_tag_of_real_runs_is_listed(tmp_path: Path) -> None:
    """Of collective training, of a parameter server, and of a best model."""
    end = run_command(
        "-m",
        "model=convnet",
        "parallelism=ddp,ps",
        "world_size=2",
        "train.max_steps=3",
        "train.log_every_steps=1",
        "checkpoint.monitor=eval/accuracy",
        "checkpoint.load_best=true",
        "batch.global_size=20",
        folder=tmp_path,
    )
    assert end.exit_code == 0, end.stderr
    ddp, ps = end.run_dirs
    tags: set[str] = set()
    for run_dir in (ddp, ps):
        tags |= set(record(run_dir)["metrics"])
        assert metrics(run_dir)
    assert tags <= {metric.name for metric in METRICS}
    assert {"best/f1", "perf/comm_share", "ps/staleness_max"} <= tags


def corner(picture: np.ndarray, row: int, column: int, num_classes: int) -> list[int]:
    """The colour just inside a cell's corner, where no number stands."""
    cell = (len(picture) - 2 * MARGIN) // num_classes
    pixel: list[int] = picture[MARGIN + row * cell + 1, MARGIN + column * cell + 1].tolist()
    return pixel


def test_a_cell_is_as_dark_as_its_part_of_the_row() -> None:
    """Classes of different sizes, of which each is right by half, look alike; none is black."""
    picture = confusion_picture([[500, 500, 0], [1, 0, 1], [0, 0, 0]])
    assert picture.dtype == np.uint8
    half, nothing = corner(picture, 0, 0, 3), corner(picture, 0, 2, 3)
    assert sum(half) < sum(nothing)
    for row, column, colour in ((0, 1, half), (1, 0, half), (1, 2, half), (2, 2, nothing)):
        assert corner(picture, row, column, 3) == colour


@pytest.mark.parametrize(("num_classes", "written"), [(2, True), (20, True), (21, False)])
def test_numbers_stand_in_the_cells_of_few_classes(num_classes: int, written: bool) -> None:
    """Ten times the counts are the same shades, so that a difference is what is written."""
    pictures = [confusion_picture((np.eye(num_classes) * n).tolist()) for n in (7, 70)]
    one, other = (picture[MARGIN:-MARGIN, MARGIN:-MARGIN] for picture in pictures)
    assert (one != other).any() == written


def test_a_hundred_classes_still_make_a_picture() -> None:
    """Beyond it a cell would be smaller than what can be seen, and none is drawn."""
    assert confusion_picture(np.eye(MOST_CLASSES).tolist()).shape == (996, 996, 3)
