"""A YAML says which packages, files and folders it needs: what is missing is one line."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from configs import LAPTOP, config_error, resolved

from ddp_runner.cli.command import compose, parse
from ddp_runner.cli.compose import opened
from ddp_runner.cli.plan import Invocation, plan, prepare, validate_files, written_words
from ddp_runner.config.fields import walk
from ddp_runner.config.identity import NEUTRAL_KEYS, config_hash, only_used
from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import LIST_GROUPS, Config
from ddp_runner.data.load_dataset import build_source
from ddp_runner.data.sources.torch_dataset import TorchDataset
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.models.toy import ToyModel

OWN = """
name: own
_target_: ddp_runner.data.sources.offline.RandomRegression
num_samples: 200
eval_samples: 40
input_size: 10
target_size: 5
seed: 0
requires:
"""


def own_yaml(folder: Path, block: str) -> tuple[str, ...]:
    """Write a dataset's YAML of one's own with this block; return the words that choose it."""
    path = folder / "groups" / "dataset" / "own.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(OWN + "\n".join(f"  {line}" for line in block.splitlines()))
    return f"--config-dir={folder / 'groups'}", "model=toy", "dataset=own"


def planned(*words: str) -> None:
    """Plan the job of a command line on this machine."""
    command = parse(words)
    plan(compose(command), LAPTOP, Invocation(command, None, 0.0, {}))


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ("packages: [nowhere]",
         "dataset=own needs nowhere, which is not installed; install it, if you trust it, or "),
        ("packages: [__main__]", "dataset=own needs __main__, which is not installed; "),
        ("files: [seed]", "dataset.seed (0): there is no file "),
        ("folders: [name]", "dataset.name (own): there is no folder "),
        ("seed=0: [nowhere]", "dataset.seed=0 needs nowhere, "),
    ],
)  # fmt: skip
def test_a_yaml_of_ones_own_says_what_it_needs(block: str, sentence: str, tmp_path: Path) -> None:
    """Beside our own YAMLs; whoever writes nothing is asked for nothing."""
    with pytest.raises(UserError) as error:
        planned(*own_yaml(tmp_path, block))
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    "block", ["packages: [torch]", "files: [missing]", "seed=1: [nowhere]", "packages: []"]
)
def test_what_is_there_is_no_error(block: str, tmp_path: Path) -> None:
    """A key that is null or left out names no file."""
    planned(*own_yaml(tmp_path, block))


@pytest.mark.parametrize(
    "block",
    [
        *(
            "3",
            "[a]",
            "{packages: {a: b}}",
            "{files: path}",
            "{packages: [3]}",
            "{packages: [[a]]}",
        ),
        *("{packages: ['x\\'; rm']}", "{packages: [os.path]}"),
    ],
)
def test_a_block_of_another_form_is_one_line(block: str) -> None:
    """A run's config may come from anybody; a name of a package is printed in a command."""
    sentence = config_error("model=toy", f"+model.requires={block}")
    assert sentence.startswith("model.requires (")
    assert "must be a mapping with lists of names" in sentence


@pytest.mark.parametrize("word", ["package", "when"])
def test_an_unknown_word_of_a_block_is_one_line(word: str) -> None:
    """What it asks for would be looked for in vain otherwise."""
    sentence = config_error("model=toy", f"+model.requires.{word}=[os]")
    assert sentence.startswith(f"model.requires.{word} must be one of packages, files, folders,")


def test_a_folder_that_is_downloaded_need_not_exist(tmp_path: Path) -> None:
    """But where the download is switched off, it must."""
    words = ("dataset=mnist", f"data_root={tmp_path}", "dataset.eval.download=false")
    validate_files(resolved(*words)[0])
    assert "there is no folder" in config_error(*words, "dataset.train.download=false")


def test_no_constructor_gets_the_block_and_it_is_no_part_of_the_work() -> None:
    """The model is built without it, and runs with and without it are runs of one setting."""
    block: dict[str, Any] = {"requires": {"packages": ["torch"]}}
    settings = resolved("model=toy")[0].model
    assert isinstance(make("model", settings | block), ToyModel)
    assert make("metrics.mae", {"_target_": "ddp_runner.metrics.shipped.MAE", **block})
    with_block, _ = resolved("model=toy", "+model.requires.packages=[torch]")
    assert with_block.model["requires"] == block["requires"]
    prepared = build_source(resolved("dataset=mnist")[0])
    assert isinstance(prepared, TorchDataset)
    assert "requires" not in prepared.facts  # by which prepared samples are found again
    assert config_hash(with_block) == config_hash(resolved("model=toy")[0])
    shown = {f"{owner}.requires.files": ["path"] for owner in ("dataset", "trackers.mlflow")}
    assert only_used(shown | {"model.requirements": 1}, uses=None) == {"model.requirements": 1}


def test_another_class_does_not_need_what_the_replaced_one_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The block belongs to the target of its YAML."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "transformers" else find_spec(name),
    )
    words = ("model=bert", "dataset.path=nowhere.csv")
    with pytest.raises(UserError, match="model=bert needs transformers"):
        planned(*words)
    with pytest.raises(UserError, match="there is no file"):
        planned(*words, "model._target_=ddp_runner.models.toy.ToyModel")


def test_keys_that_do_not_count_exist() -> None:
    """A key that is renamed would count without a word."""
    known = {key.name for key in walk(Config())} | {*LIST_GROUPS}
    assert {*NEUTRAL_KEYS} <= known | {name.partition(".")[0] for name in known}


def test_the_memory_of_a_machine_that_only_submits_does_not_count() -> None:
    """A login node has less than the nodes whose ranks hold the dataset."""
    command = parse(("model=toy", f"dataset.num_samples={10**15}"))
    invocation = Invocation(command, None, 0.0, {})
    with pytest.raises(UserError, match="this machine has"):
        plan(compose(command), LAPTOP, invocation)
    srun = DistEnv(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="srun")
    with opened(compose(command)) as (given, node):
        words = written_words(node, command)
        prepare(given, node, invocation).finish(lambda _: (LAPTOP, srun), words)
