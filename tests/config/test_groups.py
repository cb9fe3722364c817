"""Every YAML composes and builds; a mistake is answered at once; a foreign config runs nothing."""

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from commands import WATCH_TORCH, run_command
from configs import config_error, resolved
from texts import write_reviews
from tiers import first_of, named

from ddp_runner.config.identity import config_hash
from ddp_runner.config.instantiate import find, make
from ddp_runner.config.schema import CONFIG_DIR, LIST_GROUPS, mode_needs
from ddp_runner.data.load_dataset import load_dataset
from ddp_runner.data.splits import MicroPlan
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware
from ddp_runner.metrics.metric import Metric
from ddp_runner.parallelism.mode import Mode, rank_devices
from ddp_runner.train.schedules import build_schedule

LARGE = ("gpt_10m", "gpt_124m", "gpt_350m", "gpt_1b", "gpt_7b")
OPTIONS = {
    f"{path.parent.name}={path.stem}": path
    for path in sorted(CONFIG_DIR.glob("*/*.yaml"))
    if path.parent.name != "hydra"
}
# By default models, modes and data; of the other groups, and of sizes, one.
QUICK = {"experiment=mnist_ddp", "metrics=top_k", "optimizer=adamw", "scheduler=cycliclr"} | {
    option
    for option, path in OPTIONS.items()
    if path.parent.name in ("model", "parallelism", "dataset")
    and path.stem not in (*LARGE, "csv_text")  # whose command trains a BERT
}


@pytest.mark.parametrize("option", named(OPTIONS, quick=QUICK))
def test_each_option_composes_by_its_own_command_and_builds(option: str, tmp_path: Path) -> None:
    """A YAML opens with a command that chooses it, and all that this command names exists."""
    path = OPTIONS[option]
    lines = path.read_text().splitlines()
    command = next(line for line in lines[:2] if line.startswith("# python -m ddp_runner"))
    overrides = command.removeprefix("# python -m ddp_runner").split()
    assert f"{path.parent.name}={path.stem}" in overrides
    file = tmp_path / "weights.pt"
    file.touch()
    overrides = [one.replace("=PATH", f"={file}") for one in overrides]
    overrides.append("allowed_targets=[my_package]")
    machine = Hardware(num_gpus=4, num_cores=4)
    if option == "backend=xccl":
        machine = replace(machine, kind="xpu", backend="xccl")
    config, _ = resolved(*overrides, hardware=machine)
    for name, keys in config.metrics.items():
        assert isinstance(make(f"metrics.{name}", keys, allowed=config.allowed_targets), Metric)
    if path.parent.name in LIST_GROUPS:
        assert list(getattr(config, path.parent.name)) == [path.stem]
    if path.parent.name not in ("experiment", "scaling", *LIST_GROUPS):
        chosen = getattr(config, path.parent.name)
        assert (chosen if isinstance(chosen, dict) else vars(chosen))["name"] in (path.stem, "nccl")

    if "collate_fn" in config.dataset:
        return  # needs a package of the user's: see the tests of its loader
    if config.model.get("pretrained"):
        return  # needs weights: see the test that fine-tunes
    assert isinstance(make("parallelism", config.parallelism), Mode)
    if path.stem in LARGE:
        return  # too large for a test: built on the meta device, see the tests of gpt
    num_stages = mode_needs(config.parallelism).devices_per_rank
    devices = rank_devices(DistEnv(0, 0, 1, 1), kind="cpu", per_rank=num_stages)
    places = {f"dev{stage}": device for stage, device in enumerate(devices)}
    model = make("model", config.model, **(places if config.model["num_stages"] > 1 else {}))
    parameters = [one for one in model.parameters() if path.stem != "muon" or one.dim() == 2]
    optimizer = make("optimizer", config.optimizer, parameters)
    if "lr_lambda" in config.scheduler:
        return  # needs a function of the user's
    schedule = build_schedule(config, optimizer, total_steps=1000, steps_per_epoch=10)
    if config.dataset.get("folder"):
        return  # needs files: see the tests of their datasets
    source = make("dataset", config.dataset)
    if config.dataset.get("path") is not None:
        write_reviews(tmp_path / config.dataset["path"])
    dataset = load_dataset(source, data_root=tmp_path, log=print)
    (batch,) = dataset.train.load([MicroPlan(torch.arange(4))], seed=0)
    inputs, targets = dataset.prepare(batch, torch.device("cpu"))
    find(config.model["loss"], key="model.loss")(model(inputs), targets).backward()
    if path.stem != "sparseadam":
        optimizer.step(lambda: 0.0)
    schedule.step()
    schedule.step_on_metrics({"eval/loss": 1.0})
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_the_command_line_wins_over_the_experiment_and_that_over_the_model() -> None:
    """The model asks for clipping, the experiment for none, the user for what they write."""
    assert resolved()[0].train.clip_norm == 1.0
    experiment = resolved("experiment=mnist_ddp")[0]
    assert (experiment.train.clip_norm, experiment.optimizer["lr"]) == (None, 1e-4)
    assert experiment.dataset["name"] == "mnist"
    keys = ("experiment=mnist_ddp", "train.clip_norm=3", "optimizer.lr=2", "dataset=fake_images")
    user = resolved(*keys)[0]
    assert (user.train.clip_norm, user.optimizer["lr"]) == (3.0, 2)
    assert user.dataset["name"] == "fake_images"


def test_the_hash_tells_runs_of_other_work_apart(tmp_path: Path) -> None:
    """Equal for the same work, however it is written and wherever its data lie."""
    same = [(), ("world_size=2",), ("batch.global_size=200",), (f"data_root={tmp_path}",)]
    assert len({config_hash(resolved(*keys)[0]) for keys in same}) == 1
    other = [(), ("seed=1",), ("world_size=1",), ("optimizer.lr=0.2",), ("model.num_classes=11",)]
    assert len({config_hash(resolved(*keys)[0]) for keys in other}) == len(other)
    config = resolved()[0]
    assert config_hash(replace(config, seed=0)) == config_hash(config)


NET = "torch.nn.Linear"  # whose source the launcher does not read: it has all keys
LOSS = "ddp_runner.train.losses.mse"
HOSTILE = {
    "outside": {"_target_": "os.system", "command": "true"},
    "inside": {"_target_": NET, "x": {"_target_": "os.system"}},
    "listed": {"_target_": NET, "x": [{"_target_": "os.system"}]},
    "deep": {"_target_": NET, "x": [[{"_target_": "os.system"}]]},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_config_that_came_with_a_run_cannot_run_code(kind: str, tmp_path: Path) -> None:
    """Neither a foreign target nor a frozen config that allows itself one is accepted."""
    (tmp_path / ".hydra").mkdir()
    foreign = {"model": HOSTILE[kind] | {"name": "x", "loss": LOSS}, "allowed_targets": ["os"]}
    frozen = asdict(resolved("model=toy")[0]) | foreign
    (tmp_path / ".hydra" / "config.yaml").write_text(yaml.safe_dump(frozen))
    assert "(os.system) is not a part that a config may name" in config_error(f"resume={tmp_path}")
    resolved(
        f"resume={tmp_path}", "allowed_targets=[os]", "batch.per_rank=2", "batch.global_size=null"
    )


@pytest.mark.parametrize("text", ["a: [b", "garbage", "foo: 1", "train: {epochs: abc}", "\x00"])
def test_a_damaged_config_of_a_run_is_named(text: str, tmp_path: Path) -> None:
    """The one line says which file it is, whether it is broken YAML or has a foreign key."""
    path = tmp_path / ".hydra" / "config.yaml"
    path.parent.mkdir()
    path.write_text(text)
    answer = config_error(f"resume={tmp_path}")
    assert answer.startswith(f"{path} is damaged or of another version")
    assert len(answer.splitlines()) == 1


@pytest.mark.parametrize("target", ["torch.os.system", "ddp_runner.launch.launcher.os.system"])
def test_an_allowed_package_is_no_way_to_a_foreign_one(target: str, tmp_path: Path) -> None:
    """A module that an allowed one imports is reached by its dots, and is still foreign."""
    trace = tmp_path / "trace"
    with pytest.raises(UserError, match=re.escape(target)):
        make("model", {"name": "x", "_target_": target, "command": f"touch {trace}"})
    assert not trace.exists()


@pytest.mark.parametrize(
    ("args", "sentence"),
    first_of(
        [
            (("--epochs", "3"), "keys have no dashes: write train.epochs=3"),
            (("train.epoch=3",), "did you mean train.epochs?"),
            (("hydra.run.dir=here", "train.epochs=0"), "must be greater than 0"),
            (("model=toyy",), "did you mean toy?"),
            (("batch.global_size=100", "world_size=3"), "use 99 or 102"),
            (("resume=nowhere",), "name the folder that holds run.json"),
            (("data_root=nowhere",), "is not a folder"),
            (("model=bert", "dataset.path=nowhere.csv"), "there is no file"),
            (("key with spaces",), "write key=value"),
        ],
        num_quick=2,
    ),
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_mistake_is_answered_before_torch_is_imported(
    args: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    """It exits with 2 and one line on stderr, and leaves no folder."""
    end = run_command(*args, folder=tmp_path, program=(sys.executable, "-c", WATCH_TORCH))
    assert (end.exit_code, end.stdout) == (2, "False\n")
    (line,) = end.stderr.splitlines()
    assert line.startswith("error: ")
    assert sentence in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr", "stdout"]


def test_help_and_cfg_show_what_can_be_chosen(tmp_path: Path) -> None:
    """--help: five examples, every group with its options, every key; --cfg job: YAML."""
    text = run_command("--help", folder=tmp_path).stdout
    assert sum("-m ddp_runner" in line for line in text.splitlines()) == 5
    for path in OPTIONS.values():
        (group,) = re.findall(rf"^{path.parent.name}: (.*(?:\n    .*)*)", text, re.MULTILINE)
        assert path.stem in group.replace(",", " ").split()
    assert "train.grad_accum_steps=1 " in text
    assert "ddp-runner new my_project" in text
    config = yaml.safe_load(run_command("--cfg", "job", "seed=7", folder=tmp_path).stdout)
    assert (config["seed"], config["train"]["epochs"]) == (7, 10)
