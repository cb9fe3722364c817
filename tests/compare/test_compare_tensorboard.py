"""A comparison in TensorBoard: a point for each row, the table and the plots."""

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from generated_runs import SINGLE, lines_of, write_run
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard_server import get_json, serve_tensorboard

from ddp_runner.compare.__main__ import run
from ddp_runner.compare.analysis import compare
from ddp_runner.compare.render.tensorboard import write_board
from ddp_runner.compare.runs import read_runs

STRONG = {"scaling, strong/speedup", "scaling, strong/efficiency"}
KINDS = ("strong", "weak")
WEAK = {"scaling, weak/speedup", "scaling, weak/efficiency"}


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Write one process, and two learning rates on one, two and four ranks."""
    folder = tmp_path / "outputs"
    write_run(folder / "single", config=SINGLE, lines=lines_of([1.0, 100.0]))
    for world_size, speed in ((1, 100.0), (2, 150.0), (4, 300.0)):
        for lr in (0.1, 0.2):
            keys: dict[str, Any] = {"world_size": world_size, "optimizer.lr": lr}
            keys["batch.per_rank"] = 64 // world_size
            lines = lines_of([1.0, speed * lr * 10])
            write_run(folder / f"{world_size}-{lr}", config=keys, lines=lines)
    return folder


def compared(outputs: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Compare the runs with the command; return the folder for TensorBoard."""
    folder = outputs.parent / "report"
    run([str(outputs), "--out", str(folder)])
    assert f"tensorboard --logdir {folder / 'tensorboard'}" in capsys.readouterr().err
    return folder / "tensorboard"


def events_of(folder: Path) -> EventAccumulator:
    """Return the content of the event files in a folder."""
    return EventAccumulator(str(folder)).Reload()


def test_each_row_is_a_run_with_one_point(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard smooths a curve, so that its values are wrong; it cannot smooth one point."""
    board = compared(outputs, capsys)
    sizes = {"1 rank": (1, 1, 1), "2 ranks": (2, 1.5, 0.75), "4 ranks": (4, 3, 0.75)}
    assert {path.name for path in (board / "strong").iterdir()} == {
        f"ddp, {size}, optimizer.lr {lr}" for lr in (0.1, 0.2) for size in sizes
    }
    for size, expected in sizes.items():
        events = events_of(board / "strong" / f"ddp, {size}, optimizer.lr 0.2")
        assert set(events.Tags()["scalars"]) == STRONG
        (speedup,) = events.Scalars("scaling, strong/speedup")
        (efficiency,) = events.Scalars("scaling, strong/efficiency")
        assert (speedup.step, speedup.value, efficiency.value) == expected
    assert not (board / "weak").exists()


def test_strong_and_weak_scaling_have_different_charts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for one setting."""
    for world_size, per_rank in ((1, 64), (2, 32), (2, 64)):
        keys = {"world_size": world_size, "batch.per_rank": per_rank}
        keys["batch.global_size"] = world_size * per_rank
        folder = tmp_path / "outputs" / f"{world_size}-{per_rank}"
        write_run(folder, config=keys, lines=lines_of([1.0, 100.0 * world_size]))
    board = compared(tmp_path / "outputs", capsys)
    tags = [set(events_of(next((board / kind).iterdir())).Tags()["scalars"]) for kind in KINDS]
    assert tags == [STRONG, WEAK]


def test_table_and_plots_equal_the_files(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture that was in the folder before is not shown."""
    (outputs.parent / "report").mkdir()
    Image.new("RGB", (8, 8)).save(outputs.parent / "report" / "other.png")
    board = compared(outputs, capsys)
    events = events_of(board / "table and plots")
    (text,) = events.Tensors("table and plots/table")
    markdown = (board.parent / "comparison.md").read_text()
    assert text.tensor_proto.string_val[0].decode() == markdown.rstrip("\n")
    names = [f"table and plots/{name}" for name in ("loss_by_step", "loss_by_time", "scaling")]
    assert sorted(events.Tags()["images"]) == names
    (picture,) = events.Images(names[2])
    with Image.open(board.parent / "scaling.png") as plot:
        assert (picture.width, picture.height) == plot.size
    assert picture.encoded_image_string == (board.parent / "scaling.png").read_bytes()


def test_a_second_comparison_replaces_the_first(
    outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard serves no point twice, and none of a setting that is gone."""
    compared(outputs, capsys)
    for path in outputs.glob("*-0.1"):
        path.rename(tmp_path / path.name)
    board = compared(outputs, capsys)
    names = sorted(f"strong/{path.parent.name}" for path in (board / "strong").glob("*/events*"))
    assert len(names) == 3
    points = []
    with serve_tensorboard(
        board, folder=tmp_path / "server", wanted=dict.fromkeys(names, STRONG)
    ) as url:
        for name in names:
            point_of = urlencode({"run": name, "tag": "scaling, strong/speedup"})
            points += get_json(f"{url}/data/plugin/scalars/scalars?{point_of}")
    assert [(step, value) for _, step, value in points] == [(1, 1), (2, 1.5), (4, 3)]


def test_names_that_are_too_long_for_a_folder_stay_different(tmp_path: Path) -> None:
    """Two settings whose names start equally are two points at each world size."""
    for world_size in (1, 2):
        for name in ("a", "b"):
            keys = {"world_size": world_size, "optimizer.name": 200 * "long/" + name}
            keys["batch.per_rank"] = 64 // world_size
            folder = tmp_path / "outputs" / f"{world_size}-{name}"
            write_run(folder, config=keys, lines=lines_of([1.0, 100.0]))
    write_board(compare(read_runs([tmp_path / "outputs"])), tmp_path / "board", pictures=[])
    runs = [events_of(path) for path in (tmp_path / "board" / "strong").iterdir()]
    assert [len(run.Scalars("scaling, strong/speedup")) for run in runs] == [1, 1, 1, 1]
