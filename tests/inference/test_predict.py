"""task=predict writes each sample once, in order, and the same bytes at every world size."""

import csv
import os
import signal
from pathlib import Path

import pytest
import torch
from commands import background, error_line, run_command, wait_for, wait_for_end
from pictures import write_folders
from run_folders import metrics, record
from texts import write_reviews

import ddp_runner
from ddp_runner.data.sources.offline import RandomRegression

RUN = "run"
OWN_DATA = {"DDP_RUNNER_DATA_ROOT": "data"}
SHORT = ("train.max_steps=4", "train.epochs=2", "train.num_threads=1", f"hydra.run.dir={RUN}")
MODELS = {
    "classes": ("model=mnist_net", "dataset=fake_images", "dataset.num_samples=64"),
    "a regression, a parameter server": (
        *("model=toy", "dataset.num_samples=64", "batch.eval_per_rank=7", "parallelism=ps"),
        "world_size=3",
    ),
}


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def train(folder: Path, *args: str) -> Path:
    """Train a run and return its folder."""
    (folder / "data").mkdir(exist_ok=True)
    end = run_command(*SHORT, *args, folder=folder, environ=OWN_DATA)
    assert end.exit_code == 0, end.stderr
    return folder / RUN


def predict(folder: Path, *args: str, name: str = "predicted") -> Path:
    """Predict with the run in a folder, and return the folder of the predictions."""
    keys = ("task=predict", f"resume={RUN}", f"hydra.run.dir={name}")
    end = run_command(*keys, *args, folder=folder, environ=OWN_DATA)
    assert end.exit_code == 0, end.stderr
    assert record(folder / name)["predictions"].startswith("predictions.")
    return folder / name


@pytest.mark.full
@pytest.mark.parametrize("args", MODELS.values(), ids=MODELS)
def test_the_file_is_the_same_whatever_the_world_size(
    args: tuple[str, ...], tmp_path: Path
) -> None:
    """The batches do not depend on the ranks, so neither does any byte."""
    train(tmp_path, *args)
    places = [("world_size=1", "parallelism=ddp"), ("world_size=2", "parallelism=ddp")]
    places += [("world_size=3",)]
    contents = set()
    for number, place in enumerate(places):
        folder = predict(tmp_path, *place, name=f"predicted-{number}")
        contents.add((folder / "predictions.csv").read_bytes())
    assert len(contents) == 1


def test_predictions_are_what_the_loaded_model_gives_for_each_sample(tmp_path: Path) -> None:
    """Each sample has one row, and the hits give the run's own accuracy."""
    run_dir = train(
        tmp_path, "model=mnist_net", "dataset=fake_images", "dataset.num_samples=64", "world_size=2"
    )
    rows = rows_of(predict(tmp_path, "inference.split=all") / "predictions.csv")
    numbers = {
        split: [int(row["index"]) for row in rows if row["split"] == split]
        for split in ("train", "eval")
    }
    assert [row["split"] for row in rows] == sorted(
        (row["split"] for row in rows), reverse=True
    )  # train, then eval
    assert {name: found == list(range(len(found))) for name, found in numbers.items()} == {
        "train": True,
        "eval": True,
    }
    assert len(numbers["train"]) == 64
    scores = torch.tensor([[float(row[f"output_{k}"]) for k in range(10)] for row in rows])
    assert scores.argmax(dim=1).tolist() == [int(row["prediction"]) for row in rows]
    evaluated = [line for line in metrics(run_dir) if "eval/accuracy" in line][-1]
    of_eval = [row for row in rows if row["split"] == "eval"]
    hits = sum(row["prediction"] == row["target"] for row in of_eval)
    assert hits / len(of_eval) == pytest.approx(evaluated["eval/accuracy"], abs=1e-12)


@pytest.mark.full
def test_parquet_has_the_same_table(tmp_path: Path) -> None:
    """Both formats hold the same columns and the same bits."""
    import pandas as pd

    train(tmp_path, "model=toy", "dataset.num_samples=64", "world_size=2")
    by_csv = pd.read_csv(predict(tmp_path, name="a") / "predictions.csv", dtype_backend="pyarrow")
    folder = predict(tmp_path, "inference.format=parquet", name="b")
    by_parquet = pd.read_parquet(folder / "predictions.parquet")
    assert list(by_csv) == list(by_parquet)
    for name in by_csv:
        # A CSV has the float32's shortest digits.
        assert by_csv[name].astype(by_parquet[name].dtype).equals(by_parquet[name]), name


@pytest.mark.full
def test_predictions_name_pictures_by_their_files(tmp_path: Path) -> None:
    """The column sample is the path below the dataset's folder."""
    write_folders(tmp_path / "data" / "own", num_train=6, num_eval=4)
    keys = ("dataset=image_folder", "dataset.folder=own", "dataset.num_classes=3")
    sizes = (
        "dataset.height=28",
        "dataset.width=28",
        "dataset.channels=1",
        "dataset.mean=0.5",
        "dataset.std=0.5",
    )
    train(tmp_path, "model=convnet", *keys, *sizes, "batch.per_rank=4", "world_size=2")
    rows = rows_of(predict(tmp_path) / "predictions.csv")
    classes = sorted(path.name for path in (tmp_path / "data" / "own" / "train").iterdir())
    for row in rows:
        path = tmp_path / "data" / "own" / row["sample"]
        assert path.is_file()
        assert classes.index(path.parent.name) == int(row["target"])
    assert len({row["sample"] for row in rows}) == len(rows)


@pytest.mark.slow
@pytest.mark.full
def test_predictions_of_texts_name_the_lines_and_keep_the_tokens_of_the_run(tmp_path: Path) -> None:
    """Other texts get the run's own tokens, and rows name the lines."""
    (tmp_path / "data").mkdir()
    path = write_reviews(tmp_path / "data" / "reviews.csv")
    bert = (
        "model=bert",
        "dataset=csv_text",
        "model.width=16",
        "model.num_layers=1",
        "model.feedforward=16",
        "dataset.vocab_size=200",
        "world_size=2",
        "batch.per_rank=8",
    )
    train(tmp_path, *bert, "dataset.path=reviews.csv")
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = rows_of(predict(tmp_path, "inference.split=all") / "predictions.csv")
    assert len({row["sample"] for row in rows}) == len(rows)
    for row in rows:
        assert lines[int(row["sample"]) - 1].startswith(f"{row['target']},")
    # A part of the texts would build another vocabulary, and each token mean something else.
    few = tmp_path / "data" / "few.csv"
    few.write_text("\n".join(lines[:40]) + "\n", encoding="utf-8")
    by_line = {row["sample"]: row["output_0"] for row in rows}
    found = rows_of(
        predict(tmp_path, "dataset.path=few.csv", "inference.split=all", name="few")
        / "predictions.csv"
    )
    assert len(found) == 39
    for row in found:
        assert float(row["output_0"]) == pytest.approx(float(by_line[row["sample"]]), abs=1e-5)


@pytest.mark.full
def test_a_stopped_prediction_leaves_no_file(tmp_path: Path) -> None:
    """Half a file of predictions would pass for a whole one."""
    train(tmp_path, "model=toy", "dataset.num_samples=64", "world_size=2")
    args = ("task=predict", f"resume={RUN}", "dataset.eval_samples=400000", "hydra.run.dir=long")
    with background(*args, "batch.eval_per_rank=1", folder=tmp_path) as command:
        wait_for((tmp_path / "long" / ".predictions.csv.tmp").exists)
        os.kill(command.pid, signal.SIGTERM)
        end = wait_for_end(command, tmp_path)
    assert end.exit_code == 128 + signal.SIGTERM
    assert record(tmp_path / "long")["status"] == "preempted"
    assert not list((tmp_path / "long").glob("*predictions*"))


@pytest.mark.full
def test_a_prediction_whose_run_has_moved_says_how_to_name_it(tmp_path: Path) -> None:
    """Before torch is imported: the folder that resume names is the right one."""
    run = train(tmp_path, *MODELS["classes"])
    predict(tmp_path)
    run.rename(tmp_path / "moved")
    end = run_command("resume=predicted", folder=tmp_path, environ=OWN_DATA)
    assert error_line(end) == (
        f"resume=predicted is a run of task=predict with the model of {run}, which does not exist; "
        "write task=predict resume=RUN with that run's present folder"
    )


@pytest.mark.full
def test_too_many_numbers_for_a_csv_go_into_parquet(tmp_path: Path) -> None:
    """A CSV of a thousand columns is rejected; Parquet has a list."""
    from pyarrow import parquet

    wide = ("dataset=fake_images", "dataset.num_classes=1001", "dataset.num_samples=64")
    train(tmp_path, "model=mnist_net", *wide, "world_size=1")
    end = run_command("task=predict", f"resume={RUN}", folder=tmp_path)
    assert "write inference.format=parquet" in error_line(end)
    folder = predict(tmp_path, "inference.format=parquet")
    table = parquet.read_table(folder / "predictions.parquet").to_pydict()
    assert {len(row) for row in table["output"]} == {1001}


@pytest.mark.full
def test_a_notebook_gets_the_predictions_of_the_command(tmp_path: Path) -> None:
    """Load returns the model that the command used."""
    run_dir = train(tmp_path, "model=toy", "dataset.num_samples=64", "world_size=2")
    rows = rows_of(predict(tmp_path) / "predictions.csv")
    names = [name for name in rows[0] if name.startswith("output")]
    expected = torch.tensor([[float(row[name]) for name in names] for row in rows])

    keys = ddp_runner.read_runs(run_dir).iloc[0]
    source = RandomRegression(
        name="random",
        num_samples=64,
        eval_samples=int(keys["dataset.eval_samples"]),
        input_size=int(keys["dataset.input_size"]),
        target_size=int(keys["dataset.target_size"]),
        seed=int(keys["dataset.seed"]),
    )
    inputs = source.build(tmp_path)["eval_inputs"]
    with torch.no_grad():
        assert torch.allclose(ddp_runner.load(run_dir)(inputs), expected, atol=1e-6)


NEW = """
import torch
from torch.utils.data import Dataset, TensorDataset

INPUTS = torch.arange(70.0).reshape(7, 10) / 70


class Plain(Dataset):
    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        return INPUTS[index]


class Named(Plain):
    def __getitem__(self, index):
        return {"inputs": INPUTS[index]}


class Labelled(Plain):
    def __getitem__(self, index):
        return INPUTS[index], torch.zeros(5)


def in_memory():
    return TensorDataset(INPUTS)
"""


@pytest.mark.slow
@pytest.mark.full
def test_new_samples_need_no_targets_and_only_the_split_that_is_predicted(tmp_path: Path) -> None:
    """A tensor, a mapping, or tensors in memory; targets that are there are written."""
    run = train(tmp_path, "model=toy", "world_size=2")
    (tmp_path / "new.py").write_text(NEW)
    model = ddp_runner.load(run)
    with torch.no_grad():
        expected = model(torch.arange(70.0).reshape(7, 10) / 70)
    command = ("task=predict", f"resume={RUN}", "dataset=torch_dataset", "allowed_targets=[new]")
    environ = {"PYTHONPATH": str(tmp_path)}
    for name, split in (("Plain", "eval"), ("Named", "train"), ("in_memory", "eval"),
                        ("Labelled", "eval")):  # fmt: skip
        keys = (f"dataset.{split}={{_target_:new.{name}}}", f"inference.split={split}")
        end = run_command(
            *command, *keys, f"hydra.run.dir={name}", folder=tmp_path, environ=environ
        )
        assert end.exit_code == 0, end.stderr
        rows = rows_of(tmp_path / name / "predictions.csv")
        outputs = torch.tensor([[float(row[f"output_{k}"]) for k in range(5)] for row in rows])
        assert torch.allclose(outputs, expected, rtol=1e-6)
        assert any(key.startswith("target") for key in rows[0]) == (name == "Labelled")
    keys = ("dataset.eval={_target_:new.Plain}", "inference.split=train")
    line = error_line(run_command(*command, *keys, folder=tmp_path, environ=environ))
    assert line.startswith("dataset.train has no _target_; name your Dataset")


@pytest.mark.full
def test_a_training_without_evaluations_needs_no_evaluation_split(tmp_path: Path) -> None:
    """And goes on without one; with evaluations a line says what is missing, before any step."""
    (tmp_path / "new.py").write_text(NEW)
    keys = ("model=toy", "dataset=torch_dataset", "dataset.train={_target_:new.Labelled}")
    own, environ = ("allowed_targets=[new]", "world_size=2"), {"PYTHONPATH": str(tmp_path)}
    line = error_line(run_command(*keys, *own, folder=tmp_path, environ=environ))
    assert line == (
        "dataset.eval has no _target_; name your Dataset: dataset.eval={_target_:my_package."
        "MyDataset}, or write dataset.eval_fraction=0.1, or never evaluate: "
        "train.eval_every_epochs=0"
    )
    never = ("train.eval_every_epochs=0", "batch.global_size=4", *SHORT)
    end = run_command(*keys, *own, *never, folder=tmp_path, environ=environ)
    assert end.exit_code == 0, end.stderr
    again = ("resume=run", "train.max_steps=6", own[0])
    end = run_command(*again, folder=tmp_path, environ=environ)
    assert (end.exit_code, record(tmp_path / RUN)["step"]) == (0, 6), end.stderr
