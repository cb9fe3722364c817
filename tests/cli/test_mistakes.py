"""Whatever is mistyped, the answer is one line with exit code 2: never a traceback."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import CommandResult, error_line
from configs import compose_raw
from entry import answer_in_process
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tiers import named

from ddp_runner.cli.compose import register
from ddp_runner.cli.messages import user_error
from ddp_runner.cli.plan import validate_files
from ddp_runner.config.identity import leaves
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import Config
from ddp_runner.host.hardware import Hardware

OWN = {
    "optimizer/rmsprop": "name: rmsprop\n_target_: torch.optim.RMSprop\nlr: 0.01\nalpha: 0.9\n",
    "optimizer/broken": "a: [b\n",
    "optimizer/list": "- a\n",
    "optimizer/loop": "defaults:\n  - loop\n",
    "optimizer/lacking": "defaults:\n  - nowhere\n",
    "optimizer/tagged": "a: !!python/object:os.system {}\n",
    "optimizer/empty": "",
    "optimizer/open": "name: open\n_target_: torch.optim.SGD\nlr: ???\n",
    "optimizer/five": "5\n",
    "optimizer/number": "5: 3\n",
    "optimizer/nothing": "null: 3\n",
    "experiment/kinds": "# @package _global_\ntrain:\n  epochs: many\n",
    "experiment/list": "- a\n",
    "model/number": "# @package _global_\nmodel: 5\n",
    "experiment/own": "# @package _global_\ndefaults:\n  - override /model: mine\n",
    "experiment/local": "train:\n  epochs: 2\n",
    "experiment/chooses": "defaults:\n  - override /dataset: digits\n",
    "experiment/slash": "# @package _global_\ndefaults:\n  - override dataset: digits\n",
    "experiment/twice": "# @package _global_\ndefaults:\n  - /dataset: digits\n",
    "experiment/within": "# @package _global_\ndefaults:\n  - dataset: digits\n",
    "experiment/group": "# @package _global_\ndefaults:\n  - override /data: digits\n",
    "experiment/rate": "# @package _global_\ntrain:\n  lr: 1\n",
    "experiment/every": "# @package _global_\ncheckpoint:\n  every: 1\n",
    "experiment/top": "# @package _global_\nepoch_count: 1\n",
    "experiment/dotted": "# @package _global_\ntrain.epochs: 1\n",
    "experiment/nul": "a: \0\n",
    "model/flat": "# @package _global_\nname: flat\n_target_: torch.nn.Linear\n",
    "model/nested": "model:\n  name: nested\n  _target_: torch.nn.Linear\n",
    "dataset/nested": "dataset:\n  name: nested\n  _target_: torch.nn.Linear\n",
    "metrics/flat": "_target_: my_package.Mine\n",
    "model/mine": "name: mine\n_target_: torch.nn.Linear\nwidth: 3\n",
}
GLOBAL = "begin it with the line # @package _global_"
UNKNOWN = "train.epoch is not a key of the config; did you mean train.epochs?"
SWEEP = "is a sweep; write -m for it"
PLACE = "give your own groups by --config-dir=FOLDER"
# A command line, and a part of its answer; MINE is a folder with the groups above.
ANSWERS = {
    "--config-dir=MINE optimizer=rmsprop train.epoch=3": UNKNOWN,
    "--config-dir MINE optimizer=rmsprop train.epoch=3": UNKNOWN,
    "-cd MINE optimizer=rmsprop train.epoch=3": UNKNOWN,
    "optimizer=rmsprop train.epoch=3 'hydra.searchpath=[\"file://MINE\"]'": UNKNOWN,
    "-m --config-dir=MINE optimizer=rmsprop,sgd train.epoch=3": UNKNOWN,
    "-m optimizer=sgd train.epoch=3,4": UNKNOWN,
    "--config-dir=MINE optimizer=rmsprop optimizer.alfa=3": "did you mean optimizer.alpha?",
    "--config-dir=MINE optimizer=rmsprop optimizer.momentum=3": "write +optimizer.momentum=VALUE",
    "-m --config-dir=MINE optimizer=rmsprop,sgd optimizer.alfa=3": "did you mean optimizer.alpha?",
    "--config-dir=MINE optimizer=rmsprob": "did you mean rmsprop?",
    "--config-dir=MINE experiment=own model.wdth=3": "did you mean model.width?",
    "--config-dir=MINE optimizer=broken train.epoch=3": "broken.yaml",
    "--config-dir=MINE optimizer=broken": "line 2, column 1; correct the YAML there",
    "--config-dir=MINE optimizer=five": "Invalid loaded object type: int",
    "--config-dir=MINE optimizer=number": "optimizer.5: Key 5 (int) is incompatible with (str)",
    "--config-dir=MINE optimizer=nothing": "Incompatible key type 'NoneType'",
    "--config-dir ''": "does not exist; write --config-dir=FOLDER, or leave it out",
    "--config-dir=": "does not exist; write --config-dir=FOLDER, or leave it out",
    "tags=[a,null]": "tags[1] (null) must be a text; write tags=[ONE,OTHER]",
    "collectives.ops=[null]": "collectives.ops[0] (null) must be a text; write collectives.ops=[",
    "params.groups=[1]": "holds int instead of mappings; write params.groups=[{match:head.*",
    "params.groups=[[a]]": "params.groups[0] must be a mapping; write params.groups=[{match:head",
    "--config-dir=MINE optimizer=list": "Cannot merge DictConfig with ListConfig",
    "--config-dir=MINE experiment=list optimizer=adam": GLOBAL,
    "--config-dir=MINE model=number": "model is a group of keys; write model.KEY=VALUE",
    "--config-dir=MINE optimizer=loop": "lead back to itself",
    "--config-dir=MINE optimizer=lacking": "optimizer=nowhere does not exist",
    "--config-dir=MINE optimizer=tagged": "could not determine a constructor",
    "--config-dir=MINE optimizer=empty": "optimizer has no _target_",
    "--config-dir=MINE optimizer=open": "optimizer.lr has no value; write optimizer.lr=VALUE",
    "--config-dir=MINE optimizer=latin": "latin.yaml is not a text in UTF-8 (invalid start byte)",
    "--config-dir=MINE experiment=nul": "nul.yaml\", position 3; correct the YAML there",
    "--config-dir=MINE experiment=local": "experiment/local.yaml sets keys of the whole c",
    "--config-dir=MINE experiment=chooses": f"chooses.yaml chooses an option of dataset; {GLOBAL}",
    "--config-dir=MINE experiment=slash": "without a slash; write override /dataset: OPTION",
    "--config-dir=MINE experiment=twice": "choose dataset, which has an option already; write over",
    "--config-dir=MINE experiment=within": "defaults name it; write override /dataset: digits",
    "--config-dir=MINE experiment=group": "group.yaml overrides data, which not every run has; see",
    "--config-dir=MINE experiment=rate": "experiment/rate.yaml: train.lr is not a key of the",
    "--config-dir=MINE experiment=every": "; the keys of checkpoint are every_epochs, every_steps",
    "--config-dir=MINE experiment=top": "top.yaml: epoch_count is not a key of the config; see",
    "--config-dir=MINE experiment=dotted": "train.epochs is written with a dot; nest it, as in",
    "--config-dir=MINE model=flat": "model/flat.yaml has _target_ at its top; write the keys of",
    "--config-dir=MINE model=nested": "model.model has the keys of model; begin its YAML with",
    "--config-dir=MINE dataset=nested": "dataset.dataset has the keys of dataset; begin its YAML",
    "--config-dir=MINE metrics=[flat]": "in its YAML all keys are below it, as in mine: {_target_",
    "--config-dir=MINE model=nowhere": "toy_slow",
    "model=mine": "toy_slow; for your own write --config-dir='my groups'",
    "metrics=[mine]": "top_k; for your own write --config-dir=FOLDER",
    "+train.lr=3": "train.lr is not a key of the config; see --help for all keys",
    "++train.epoch=3": UNKNOWN,
    "+trian.epochs=3": "trian is not a key of the config; did you mean train?",
    "--config-dir=MINE experiment=kinds": "train.epochs (many) must be a whole number",
    "--config-dir=nowhere": "(nowhere) does not exist",
    "--config-di=MINE -cd /": "--config-dir is given twice, and / would replace the first",
    "-m seed=1,2 --cfg job": "leave -m out",
    "--cfg job -m": "leave -m out",
    "--config_dir x": "--config_dir is not an option; write --config-dir",
    "'++batch=${user.b}' '+user.b={global_size: 4}'":
        "batch is a section, and an interpolation cannot replace all its keys; write an "
        "interpolation for each key",
    "--epochs 3": "--epochs is not an option; keys have no dashes: write train.epochs=3",
    "model=toy --batch-size=32": "write batch.per_rank=32",
    "--nnodes=2": "keys have no dashes: write launch.nnodes=2",
    "--nproc_per_node=2": "keys have no dashes: write launch.nproc_per_node=2",
    "train.lr=3": "train.lr is not a key of the config; did you mean optimizer.lr?",
    "train.batch_size=3": "did you mean batch.per_rank?",
    "model=gpt model.depth=3": "; the keys of model are name, _target_, loss, num_stages, weights",
    "model=gpt +model.depth=3": "is not a keyword of ddp_runner.models.gpt.GPT; it has dropout, f",
    "--cfg nope": "argument --cfg/-c: invalid choice: 'nope'",
    "model=toy --config-dir": "--config-dir/-cd: expected one argument; see --help",
    "model=toy -m seed=1,2 train.epoch=3": UNKNOWN,
    "--gibberish": "--gibberish is not an option; see --help",
    "--experimental-rerun nowhere": "continue a run by resume=RUN_FOLDER",
    "--shell-completion": "install=bash",
    "--cfg nothing": "argument --cfg/-c: invalid choice",
    "--multirun=x": "ignored explicit argument 'x'; see --help",
    "-": "- cannot be read; write key=value",
    "seed[0]=3": "seed[0]=3 cannot be read; write key=value",
    "é=3": "é=3 cannot be read; write key=value",
    "+=3": "the empty key (3) must be the name of an option",
    "~=3": "the empty key (3) must be the name of an option",
    "'optimizer.lr=log(0.01,0.5)'": "the function log does not exist; for a search write opt",
    "'notes=me(you)'": "notes=tag(log,interval(LOW,HIGH)), and for a text notes='\"TEXT\"'",
    "'seed=choice()'": "'seed=choice()': 'choice()': empty choice is not legal; write key=value",
    "'seed=${...x}'": "seed: the interpolation fails: Error resolving key '...x'",
    f"seed={'9' * 5000}": "Exceeds the limit (4300 digits) for integer",
    "-m 'seed=range(3,0)'": "the sweep has no jobs: a range is empty",
    "-cn toy": PLACE,
    "--config-path x": PLACE,
    "+train.epochs=3": "Either remove + prefix: 'train.epochs=3'",
    "+experiment=toy_ddp": "write experiment=toy_ddp, without +",
    "++model=toy": "force-add of config groups is not supported: '++model=toy'",
    "model=toy,convnet": "write -m for a sweep over its values",
    "seed=range(3)": SWEEP,
    "optimizer.lr=interval(0.01,0.1)": SWEEP,
    "-m optimizer.lr=interval(0.01,0.1)": "write hydra/sweeper=optuna",
    "'optimizer.lr = 0.1'": "cannot be read; write key=value without spaces around =",
    "'seed=${oc.decode:${oc.env:X}}'": "and put a text with any of ,[]{}'\" into quotes of its own",
    "'seed=${oc.env:NOT_SET_X}'": "seed: the environment variable NOT_SET_X is not set",
    "train.epochs=null": "train.epochs (null) must be a whole number",
    "train.epochs=true": "train.epochs (true) must be a whole number",
    "batch.per_rank=true": "batch.per_rank (true) must be a whole number",
    "backend.timeout_s=null": "backend.timeout_s (null) must be a number",
    "train=3": "train is a group of keys; write train.KEY=VALUE",
    "train=null": "train is a group of keys; write train.KEY=VALUE",
    "model=null": "model (null) must be the name of an option",
    "model=toy optimizer=3": "optimizer (3) must be the name of an option",
    "model=toy 'optimizer=float(3)'": "optimizer (float(3)) must be the name of an option",
    "--config-dir=MINE optimizer=3": "optimizer (3) must be the name of an option",
    "-m optimizer=3,4": "optimizer (3) must be the name of an option",
    "-m optimizer=range(1,3)": "optimizer (1) must be the name of an option",
    "-m model=glob(toy) optimizer=3": "optimizer (3) must be the name of an option",
    "-m \"model='toy','bert'\" optimizer=3": "optimizer (3) must be the name of an option",
    "model=toy trackers=null": "trackers (null) must be a list of options; write trackers=[]",
    "seed=1 trackers=null": "trackers (null) must be a list of options; write trackers=[]",
    "world_size=1 optimizer=3": "optimizer (3) must be the name of an option",
    "+trackers=null": "trackers (null) must be a list of options; write trackers=[]",
    "'trackers=int(3)'": "trackers (int(3)) must be a list of options; write trackers=[]",
    "-m trackers=[null],[1]": "trackers ([null]) must be a list of options",
    "trackers=[mlflow,null]": "trackers ([mlflow,null]) must be a list of options",
    "~optimizer": "optimizer has no _target_",
    "~train.epochs": "train.epochs cannot be removed",
    "model@x=toy": "model takes no such override; write model=VALUE",
    "=3": "must be the name of an option",
    "hydra.job.nme=x": "did you mean hydra.job.name?",
    "hydra/launcher=nope": "options: basic, ddp_runner, slurm",
    "hydra/launcher=joblib -m seed=1,2": "options: basic, ddp_runner, slurm",
    "hydra.verbose=true": "hydra.verbose and hydra.job.chdir are not for this program",
    "hydra.run.dir=": "hydra.run.dir is empty; write hydra.run.dir=FOLDER, or leave it out",
    "world_size=1,2": "write -m for a sweep over its values, or world_size=VALUE for one run",
    "tags=a,b": "write -m for a sweep over its values, or tags=[ONE,OTHER] for a list",
    "user.x=1": "user.x is a key of your own that no YAML gives; write +user.x=VALUE",
    "optimizer=adamw optimizer.foreach=true": "its class takes it; write +optimizer.foreach=VALUE",
    "optimizer._target_=torch.optim.RMSprop optimizer.centred=1": "mean optimizer.centered?",
    "~model.loss": "model.loss is null or deleted, and train.step (ddp_runner.train.step.s",
    "+model.wdth=3": "model.wdth is not a keyword of ddp_runner.models.convnet.ConvNet; it has",
    "+own={_target_:a.b}": "own is not a key of the config; see --help for all keys, and put your",
    "dataset.shuffle=no": "dataset.shuffle (no) must be true or false",
    "train.precision=tf32": "train.precision=tf32 needs a CUDA device; elsewhere write fp32",
    "model._target_=nowhere.Net": "needs nowhere, which is not installed; install it, if you tru",
    "allowed_targets=os": "allowed_targets must be a list; write allowed_targets=[ONE,OTHER]",
    "checkpoint.monitor=[]": "checkpoint.monitor ([]) must be a text",
    "dataset=image_folder dataset.path=X": "did you mean dataset.folder?",
    "model=resnet18 dataset=image_folder dataset.folder=nowhere": "there is no folder",
    "batch_size=32": "did you mean batch.per_rank?",
    "learning_rate=1": "did you mean optimizer.lr?",
}  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return a folder with groups of the user's own, whole and broken ones."""
    for name, text in OWN.items():
        path = tmp_path / "my groups" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "my groups" / "optimizer" / "latin.yaml").write_bytes(b"a: \xff\xfe\n")
    return tmp_path / "my groups"


@pytest.fixture
def answer_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CommandResult]:
    """Return a function that gives a command line to the entry in this process."""
    return partial(answer_in_process, folder=tmp_path, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize("line", named(ANSWERS, quick=[*ANSWERS][::4]))
def test_a_mistake_on_the_command_line_is_one_line(
    line: str, mine: Path, answer_to: Callable[..., CommandResult]
) -> None:
    """It exits with 2, names the true cause in one sentence, and leaves no folder."""
    args = shlex.split(
        line.replace("MINE", shlex.quote(str(mine)) if "'" not in line else str(mine))
    )
    end = answer_to(*args)
    assert end.stdout == ""
    assert ANSWERS[line] in error_line(end)
    assert list(mine.parent.iterdir()) == [mine]


@pytest.mark.parametrize("kind", ["job", "hydra", "all"])
def test_each_part_of_the_config_can_be_shown_resolved(
    kind: str, tmp_path: Path, answer_to: Callable[..., CommandResult]
) -> None:
    """--cfg KIND --resolve prints YAML without an interpolation, and leaves no folder."""
    end = answer_to("--cfg", kind, "--resolve", "model=toy")
    assert (end.exit_code, end.stderr) == (0, "")
    shown = OmegaConf.create(end.stdout)
    assert "${run_dir:}" not in end.stdout
    assert ("hydra" in shown) == (kind != "job")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_explained_keeps_its_first_line() -> None:
    """No hint is worth an exception: the keys that are looked through may be broken themselves."""
    broken = ["--config-dir=/no/such", "((", "x.y=3"]
    with pytest.raises(ConfigCompositionException) as rejected:
        compose_raw("train.epoch=3")
    assert str(user_error(rejected.value, broken)) == UNKNOWN
    assert user_error(ZeroDivisionError("ours")) is None
    assert str(user_error(OSError(28, "No space left on device"))).startswith("No space left on")
    odd = OmegaConfBaseException("an error that is its own cause, as in a debugger")
    odd.__cause__ = odd
    assert str(user_error(odd)) == "an error that is its own cause, as in a debugger"
    parts = {28: "TMPDIR", 24: "ulimit -n", 2: "the current folder is gone", 13: "make it readable"}
    for number, part in parts.items():
        assert part in str(user_error(OSError(number, "reason")))


ODD = (
    *(None, -1, 0, 2.5, 10**30, float("inf"), float("nan"), True, "", "text", "a b", "é", "${x}"),
    *([], {}, [1, {"a": 2}], "x" * 5000, "\x00"),
)
COMMANDS = (
    ("model=toy",),
    ("model=bert",),
    ("model=resnet18", "dataset=fake_images", "parallelism=ps", "scheduler=cosine"),
    ("model=convnet_mp", "dataset=image_folder", "parallelism=ddp_mp", "scheduler=step"),
    ("experiment=two_nodes", "optimizer=adamw"),
)


def odd_configs() -> Iterator[tuple[str, Any]]:
    """Yield every key of every group with half of the odd values, and the config that has one."""
    seen = set()
    for command in COMMANDS:
        raw = OmegaConf.merge(OmegaConf.structured(Config), compose_raw(*command))
        for key, _ in leaves(OmegaConf.to_container(raw)):
            if key in seen:
                continue
            seen.add(key)
            for value in ODD[len(seen) % 2 :: 2]:
                changed = raw.copy()
                with contextlib.suppress(OmegaConfBaseException):  # the schema rejects it as it is
                    OmegaConf.update(changed, key, value, merge=False, force_add=True)
                    yield f"{key}={value!r}", changed
    assert len(seen) > 100


@pytest.mark.slow
@pytest.mark.full
def test_no_odd_value_of_any_key_is_more_than_a_sentence(tmp_path: Path) -> None:
    """It is taken, or rejected in one line: nothing else comes of it, with GPUs and without."""
    register()
    num_rejected = 0
    for index, (what, raw) in enumerate(odd_configs()):
        machine = Hardware(num_gpus=index % 2 * 4, num_cores=4)
        try:
            config, _ = resolve(OmegaConf.to_object(raw), hardware=machine)
            validate_files(replace(config, data_root=str(tmp_path)))
        except Exception as error:
            message, reason = user_error(error), repr(error)
            num_rejected += 1
            if message is None or len(str(message).splitlines()) != 1:
                pytest.fail(f"{what}: {reason}")
    assert num_rejected > 500
