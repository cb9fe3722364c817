"""What the command line chooses wins over the YAMLs of the model and the experiment."""

import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from configs import LAPTOP
from run_folders import record

from ddp_runner.cli.command import compose, parse
from ddp_runner.cli.plan import Invocation, plan
from ddp_runner.config.schema import RunConfig
from ddp_runner.errors import UserError

TARGET, EVAL = "{_target_: mine.Rows}", "{_target_: mine.Rows, split: eval}"
# A model that brings the settings of its training, and of the dataset that it is trained on.
MODEL = f"""# @package _global_
defaults:
  - override /dataset: torch_dataset
  - override /optimizer: adamw
  - override /scheduler: cosine
  - override /metrics: [top_k]
model: {{name: own, _target_: mine.Model, loss: ddp_runner.train.losses.mse, num_stages: 1}}
dataset: {{name: whole, train: {TARGET}, eval: {TARGET}}}
optimizer: {{lr: 0.5, amsgrad: true}}
scheduler: {{warmup_steps: 3}}
metrics: {{mine: {{_target_: mine.Metric}}}}
backend: {{name: gloo, timeout_s: 7}}
"""
EXPERIMENT = """# @package _global_
defaults:
  - override /optimizer: adam
optimizer: {lr: 0.25}
model: {channels_last: false}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the option for a folder with the model, two datasets and the experiment."""
    (tmp_path / "mine.py").write_text("def __getattr__(name): ...")  # it may have anything
    monkeypatch.syspath_prepend(str(tmp_path))
    part = f"defaults: [torch_dataset]\nname: part\ntrain: {TARGET}\neval: {EVAL}\n"
    for name, text in {
        "model/own": MODEL,
        "dataset/part": part,
        "experiment/other": EXPERIMENT,
    }.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / f"{name}.yaml").write_text(text)
    return f"--config-dir={tmp_path / 'conf'}"


def planned(own: str, *words: str) -> tuple[RunConfig, list[str]]:
    """Return the resolved config of a command, and its notes about options."""
    command = parse([own, "allowed_targets=[mine]", "world_size=1", *words])
    job = plan(compose(command), LAPTOP, Invocation(command, None, 0.0, {}))
    return job.config, [one for one in job.warnings if "option" in one]


@pytest.mark.full
def test_a_model_trains_with_what_it_brings(own: str) -> None:
    """Also if the command line chooses the options that the model chooses."""
    for words in ((), ("optimizer=adamw", "scheduler=cosine", "metrics=[top_k]")):
        config, notes = planned(own, "model=own", *words)
        assert (config.dataset["name"], config.optimizer["lr"]) == ("whole", 0.5)
        assert (config.scheduler["warmup_steps"], list(config.metrics)) == (3, ["top_k", "mine"])
        assert (config.backend.name, config.backend.timeout_s) == ("gloo", 7)
        assert notes == []


@pytest.mark.parametrize(
    ("words", "group", "expected", "left_out"),
    [
        ("dataset=part", "dataset", {"name": "part"}, "dataset.name"),
        ("dataset=torch_dataset", "dataset", {"train": None}, "dataset.name, dataset.train"),
        ("dataset=digits", "dataset", {"train": None}, "dataset.name, dataset.train._target_"),
        ("optimizer=adam", "optimizer", {"lr": 1e-3, "amsgrad": False}, "optimizer.amsgrad"),
        ("scheduler=constant", "scheduler", {"warmup_steps": None}, "scheduler.warmup_steps"),
        ("metrics=[]", "metrics", {"mine": None, "top_k": None}, "metrics.mine"),
        ("backend=auto", "backend", {"name": "gloo", "timeout_s": 7.0}, "backend.name"),
    ],
)
def test_an_option_of_the_command_line_keeps_its_own_keys(
    own: str, words: str, group: str, expected: dict[str, Any], left_out: str
) -> None:
    """What the model's YAML says of another option is left out, and a line says so."""
    config, (note,) = planned(own, "model=own", words)
    keys: Any = getattr(config, group)
    keys = keys if isinstance(keys, dict) else vars(keys)
    assert {key: keys.get(key) for key in expected} == expected
    assert note.startswith(
        f"{words} does not take the keys that model/own.yaml sets for another option: "
    )
    assert left_out in note


def test_a_key_that_the_command_line_gives_is_not_reported(own: str) -> None:
    """Its value counts, whatever is left out."""
    words = ("model=own", "optimizer=adam", "optimizer.lr=0.3", "optimizer.amsgrad=false")
    config, notes = planned(own, *words)
    assert (config.optimizer["lr"], config.optimizer["amsgrad"], notes) == (0.3, False, [])


@pytest.mark.full
def test_an_experiment_gives_way_to_the_command_line_as_well(own: str) -> None:
    """What it says of another model than the chosen one is left out as well."""
    config, notes = planned(own, "model=own", "experiment=other")
    assert (config.optimizer["name"], config.optimizer["lr"]) == ("adam", 0.25)
    assert "channels_last" not in config.model
    assert notes == [
        "model=own does not take the keys that experiment/other.yaml sets for another option: "
        "model.channels_last"
    ]
    config, notes = planned(own, "experiment=other", "optimizer=sgd", "parallelism=single")
    assert (config.optimizer["lr"], config.model["channels_last"]) == (0.1, False)
    assert notes == [
        "optimizer=sgd does not take the keys that experiment/other.yaml sets for another option: "
        "optimizer.lr"
    ]
    assert planned(own, "experiment=best_by_f1")[1] == []


@pytest.mark.parametrize(
    ("words", "group", "expected"),
    [
        ("optimizer._target_=torch.optim.Adadelta", "optimizer",
         {"name": "adadelta", "_target_": "torch.optim.Adadelta"}),
        ("optimizer={_target_:torch.optim.Adadelta,rho:0.5}", "optimizer",
         {"name": "adadelta", "_target_": "torch.optim.Adadelta", "rho": 0.5}),
        ("optimizer._target_=torch.optim.RMSprop optimizer.centered=true optimizer.name=x",
         "optimizer", {"name": "x", "_target_": "torch.optim.RMSprop", "centered": True}),
        ("model=convnet dataset=digits optimizer=adam optimizer._target_=torch.optim.RMSprop",
         "optimizer", {"name": "rmsprop", "_target_": "torch.optim.RMSprop"}),
        ("model=convnet dataset=image_folder dataset.folder=. data_root=. "
         "dataset.train.loader={_target_:builtins.open,mode:rb}", "dataset.train.loader",
         {"_target_": "builtins.open", "mode": "rb"}),
        ("optimizer._target_=torch.optim.SGD optimizer.lr=3", "optimizer",
         {"lr": 3, "momentum": 0.9}),
        ("dataset=part dataset.train={_target_:mine.Other,size:3} +dataset.train.seed=4",
         "dataset.train", {"_target_": "mine.Other", "size": 3, "seed": 4}),
        ("dataset=part dataset.eval={_target_:mine.Rows,size:3}", "dataset.eval",
         {"_target_": "mine.Rows", "split": "eval", "size": 3}),
    ],
)  # fmt: skip
def test_another_target_leaves_no_key_of_the_one_before(
    own: str, words: str, group: str, expected: dict[str, Any]
) -> None:
    """But for what the command itself gives; the same class keeps the keys of its option."""
    config, _ = planned(own, *words.split())
    keys: Any = vars(config)
    for part in group.split("."):
        keys = keys[part]
    if "lr=3" in words or "Rows" in words:
        keys = {key: keys[key] for key in expected}
    assert keys == expected


def test_a_wrong_key_beside_another_target_is_named(own: str) -> None:
    """Though no plus is needed there."""
    with pytest.raises(UserError, match=r"did you mean optimizer\.rho\?"):
        planned(own, "optimizer._target_=torch.optim.Adadelta", "optimizer.roh=0.5")


@pytest.mark.full
def test_the_command_finds_packages_in_its_folder(own: str, tmp_path: Path) -> None:
    """As ``python -m`` does: both words start the same program."""
    program = (str(Path(sys.executable).with_name("ddp-runner")),)
    words = (own, "model=own", "-m", "seed=1,2", "sweep.dry_run=true")
    assert "2 valid jobs" in run_command(*words, folder=tmp_path, program=program).stdout


@pytest.mark.full
def test_an_option_of_the_users_comes_before_ours(own: str, tmp_path: Path) -> None:
    """Both have the same name, in one run and in a sweep."""
    (tmp_path / "conf" / "optimizer").mkdir()
    (tmp_path / "conf" / "optimizer" / "adamw.yaml").write_text(
        "name: own\n_target_: torch.optim.Adam\nlr: 0.7\n"
    )
    config, _ = planned(own, "optimizer=adamw")
    assert config.optimizer == {"name": "own", "_target_": "torch.optim.Adam", "lr": 0.7}
    words = (own, "-m", "optimizer=adamw,nadam", "sweep.dry_run=true", "hydra.sweep.dir=s")
    shown = run_command(*words, folder=tmp_path)
    assert "2 valid jobs" in shown.stdout
    assert planned("--config-dir=/", "optimizer=adamw")[0].optimizer["name"] == "adamw"


@pytest.mark.full
def test_the_rows_of_the_chosen_dataset_are_trained_on(tmp_path: Path) -> None:
    """In the jobs of a sweep, and in what --cfg shows."""
    (tmp_path / "mine.py").write_text(ROWS)
    for name, text in {"model/line": LINE, "dataset/few": FEW, "dataset/many": MANY}.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / f"{name}.yaml").write_text(text)
    words = ("--config-dir=conf", "allowed_targets=[mine]", "model=line", "world_size=1")
    words += ("train.num_threads=1", "train.epochs=1")
    path = {"PYTHONPATH": str(tmp_path)}
    end = run_command(*words, "-m", "dataset=few,many", folder=tmp_path, environ=path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert end.stdout.count("dataset=few does not take the keys that model/line.yaml sets") == 1
    assert [record(run)["step"] for run in end.run_dirs] == [3, 10]
    shown = run_command(*words, "dataset=few", "--cfg", "job", folder=tmp_path)
    assert "name: few" in shown.stdout


ROWS = """
import torch
from torch.utils.data import TensorDataset

def rows(size):
    return TensorDataset(torch.rand(size, 2), torch.rand(size, 1))
"""
LINE = """# @package _global_
defaults:
  - override /dataset: torch_dataset
model: {name: line, _target_: torch.nn.Linear, in_features: 2, out_features: 1, num_stages: 1,
  loss: ddp_runner.train.losses.mse}
dataset:
  name: own
  train: {_target_: mine.rows, size: 500}
  eval: {_target_: mine.rows, size: 9}
"""
FEW = """defaults: [torch_dataset]
name: few
train: {_target_: mine.rows, size: 300}
eval: {_target_: mine.rows, size: 9}
"""
MANY = FEW.replace("few", "many").replace("300", "1000")
