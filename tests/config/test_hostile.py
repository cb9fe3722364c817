"""A run folder that somebody else made may hold anything: resuming it runs none of its code."""

import importlib
import inspect
import json
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from configs import config_error, frozen_text, resolved
from omegaconf import OmegaConf
from tiers import first_of

from ddp_runner.checkpoint.manifest import MANIFEST, facts_of, manifest_text
from ddp_runner.config.instantiate import construct, find, make
from ddp_runner.config.load import to_config
from ddp_runner.config.schema import Config
from ddp_runner.config.targets import OWN, TORCH, TORCH_LOSS_NAMES, validate_targets
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.files import replace_file
from ddp_runner.inference.notebook import load, read_runs
from ddp_runner.job import Job
from ddp_runner.models import toy
from ddp_runner.rank.session import open_session
from ddp_runner.sweep.survey import run_status, survey
from ddp_runner.sweep.sweep_dir import PLAN
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record

TOY = ("model=toy", "parallelism=single", "dataset.num_samples=8", "train.epochs=1")
MARK = "pwned"  # the file that hostile code would leave in the run's folder
TOUCH = "{oc.create:{_target_:pathlib.Path.touch,self:{_target_:pathlib.Path,_args_:[MARK]}}}"


class Touch:
    """Its pickle leaves the mark when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what the pickle runs."""
        return Path.touch, (self._mark,)


# The dotted keys that a hostile run's config has in place of its own; MARK stands for the path.
HOSTILE: dict[str, dict[str, Any]] = {
    "a command": {"model._target_": "os.system", "model.command": "touch MARK"},
    "a command by another": {
        "model._target_": "torch.utils.collect_env.run",
        "model.command": "touch MARK",
    },
    "nested": {"model.x": {"_target_": "torch.utils.collect_env.run", "command": "touch MARK"}},
    "in lists": {"model.x": [1, [{"_target_": "os.system", "command": "touch MARK"}]]},
    "a module's alias": {
        "model.x": {
            "_target_": "ddp_runner.tracking.run_record.subprocess.run",
            "args": ["touch", "MARK"],
        }
    },
    "torch's alias": {"model.x": {"_target_": "torch.os.system", "command": "touch MARK"}},
    "what a part's module imports": {
        "model.x": {"_target_": "ddp_runner.models.bert.import_module", "name": "evil"}
    },
    "the hub": {
        "model._target_": "torch.hub.load",
        **{"model.repo_or_dir": "FOLDER", "model.model": "m", "model.source": "local"},
    },
    "a pickle": {
        "model._target_": "torch.load",
        **{"model.f": "FOLDER/evil.pt", "model.weights_only": False},
    },
    "the augmentation": {
        "dataset.augmentation": {"_target_": "subprocess.run", "args": ["touch", "MARK"]}
    },
    "allowed by itself": {
        "allowed_targets": ["os"],
        "model.x": {"_target_": "os.system", "command": "touch MARK"},
    },
    "the loss": {"model.loss": "ddp_runner.tracking.run_record.os._exit"},
    "an interpolation": {"model.x": f"${TOUCH}"},
    "an escaped interpolation": {"model.x": f"\\${TOUCH}"},
    "an escaped one in a list": {"dataset.x": [[f"\\${TOUCH}"]]},
    "a name that is no text": {"model._target_": b"os.system", "model.command": "touch MARK"},
}


def hostile_run(folder: Path, changes: dict[str, Any]) -> Path:
    """Make a run folder as a run leaves it, but for these keys of its config; return the mark."""
    mark = folder / MARK
    (folder / "hubconf.py").write_text(f"open({str(mark)!r}, 'w')\ndef m(**keys): pass\n")
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    torch.save(Touch(mark), folder / "evil.pt")
    text = frozen_text(changes, *TOY).replace("MARK", str(mark)).replace("FOLDER", str(folder))
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(text)
    return mark


def as_loaded(folder: Path) -> Config:
    """Return a run's config as a rank would have it if no launcher had rejected it."""
    config = to_config(OmegaConf.load(folder / ".hydra" / "config.yaml"))
    config.allowed_targets = []
    return config


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_config_runs_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejected in one sentence by the launcher, again by a rank, and harmless if it were not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    mark = hostile_run(tmp_path, HOSTILE[kind])
    sentence = config_error(f"resume={tmp_path}")
    by_name = "may name|not a part of ddp_runner|not a dotted name"
    assert re.search(f"{by_name}|reads the environment or names an address", sentence)

    config = as_loaded(tmp_path)
    env = DistEnv(0, 0, 1, 1)
    job = Job(config=config, started_at=time.time(), provenance={})
    with pytest.raises(UserError) as rejected, open_session(job, env):
        pass
    by_rank = str(rejected.value)
    assert by_rank == sentence or re.search(f"{by_name}|still holds an interpolation", by_rank)

    with suppress(UserError):
        find(config.model["loss"], key="model.loss")
    for group in ("model", "dataset"):
        settings = {key: one for key, one in getattr(config, group).items() if key != "loss"}
        with pytest.raises(UserError):
            make(group, settings | {"no such key": 1})
    assert not mark.exists()


def test_yaml_tags_are_rejected(tmp_path: Path) -> None:
    """What PyYAML would build of a tag is not built; the one line names the file."""
    mark = hostile_run(tmp_path, {})
    path = tmp_path / ".hydra" / "config.yaml"
    text = path.read_text()
    for tag in ("object/apply:os.system", "object/new:os.system", "name:os.system", "module:os"):
        tagged = f"name: !!python/{tag} ['touch {mark}']\n"
        path.write_text(text.replace("\nname: null\n", f"\n{tagged}"))
        assert tag in path.read_text()
        assert config_error(f"resume={tmp_path}").startswith(
            f"{path} is damaged or of another version"
        )
    assert not mark.exists()


def test_a_hint_lists_every_package_that_is_needed(tmp_path: Path) -> None:
    """With what this command allows already: the list on the command line replaces another."""
    hostile_run(tmp_path, {"model.x": {"_target_": "one.X"}, "dataset.y": {"_target_": "two.Y"}})
    answer = config_error(f"resume={tmp_path}", "allowed_targets=[mine.models]")
    assert answer.endswith("add allowed_targets=[mine.models,one,two]")


def test_what_the_present_command_names_is_allowed_by_name_only(tmp_path: Path) -> None:
    """A resumed run's config may use that class too, and nothing else of its package."""
    hostile_run(tmp_path, {"model.x": {"_target_": "os.system"}})
    words = (f"resume={tmp_path}", "+dataset.z={_target_:os.getcwd}")
    assert "(os.system) is not a part that a config may name" in config_error(*words)
    assert resolved("+loop.z={_target_:os.getcwd}", "task=os.getcwd")[0].task == "os.getcwd"


# What passes as a name, since torch's names are not known before torch is imported.
NO_PARTS = (
    *("torch.optim.lr_scheduler.partial", "torch.optim.lr_scheduler.warnings", "torch.nn.init"),
    *("torch.nn.functional", "torch.nn.Parameter", "torch.optim.Functional", "torch.nn.Conv2D"),
    *("torch.nn.parallel", "torch.optim.lr_scheduler", "torch.optim.swa_utils"),
)


@pytest.mark.parametrize("name", NO_PARTS)
def test_a_rank_judges_what_the_object_is(name: str) -> None:
    """Of torch a class counts by what it is derived from, and nothing else does."""
    with pytest.raises(UserError) as rejected:
        find(name, key="model._target_")
    assert str(rejected.value).startswith(f"model._target_ ({name}) ")
    assert "\n" not in str(rejected.value)


def test_a_part_of_ours_is_what_its_module_has_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source is no proof of what the name stands for by now."""
    monkeypatch.setattr(toy, "ToyModel", Path)
    with pytest.raises(UserError, match=r"is not a class or function that .* defines"):
        find("ddp_runner.models.toy.ToyModel", key="model._target_")


FOREIGN = (
    *("os.system", "torch.load", "torch.hub.load", "torch.jit.load", "torch.os.system"),
    *("torch.package.PackageImporter", "torch.ops.load_library", "torch.distributed.run.main"),
    *("torch.utils.cpp_extension.load_inline", "torch.nn.modules.module.torch.load"),
    *("torch.nn.os.system", "torch.optim._multi_tensor", "torch.nn.__builtins__.eval"),
    *("torch.nn.Module.__init__", "transformers.pipeline", "torchvision.models.resnet18"),
    *(
        "ddp_runner.launch.launcher.launch",
        "ddp_runner.tracking.run_record.os._exit",
        "ddp_runner.files.replace_file",
    ),
    *(
        "ddp_runner.tracking.run_record.subprocess.run",
        "ddp_runner.data.sources.shared.files_digest",
    ),
    *("ddp_runner.data.sources.shared.os.system", "ddp_runner.data.load_dataset.FileLock"),
    *("ddp_runner.models.bert.import_module", "ddp_runner.models.bert._pretrained"),
    *(
        "ddp_runner.models.torchvision_models.Mapping",
        "ddp_runner.parallelism.parameter_server.time",
        "ddp_runner.models",
    ),
    *("ddp_runner.train.losses.math.prod", "ddp_runner.models..convnet.ConvNet", "models.bert"),
    *("ddp_runner.models.convnet.ConvNet ", "ddp_runner.models.../../evil.m", "", "."),
    *("builtins.eval", "__main__.main"),
)


@pytest.mark.parametrize("key", ["_target_", "loss"])
def test_a_name_outside_the_parts_is_rejected_as_text(key: str) -> None:
    """Before anything is imported: neither other modules nor what a part's module imports."""
    for name in FOREIGN:
        with pytest.raises(UserError, match=r"name|not a part of ddp_runner") as rejected:
            validate_targets(Config(model={key: name}))
        assert "\n" not in str(rejected.value)


def test_a_name_is_shown_as_it_is_and_on_one_line() -> None:
    """It neither forges a line of its own nor steers the terminal."""
    with pytest.raises(UserError) as rejected:
        find("os.\x1b[2Jpath\nerror: \u4e2d", key="model._target_")
    assert "(os.\\x1b[2Jpath\\nerror: \u4e2d) is not a dotted name" in str(rejected.value)


def test_the_parts_that_may_be_named_are_parts() -> None:
    """The classes of torch's and torchvision's modules, torch's losses, and our own parts."""
    for module in TORCH:
        found = vars(importlib.import_module(module))
        classes = [name for name, one in found.items() if inspect.isclass(one) and name[0] != "_"]
        accepted = [name for name in classes if _is_found(f"{module}.{name}")]
        assert len(accepted) > 10
        for name in accepted:
            places = ("torch.nn.", "torch.optim", "torchvision.transforms.v2.")
            assert found[name].__module__.startswith(places)
    for name in TORCH_LOSS_NAMES:
        assert callable(find(f"torch.nn.functional.{name}", key="model.loss"))
    for name in (
        "models.mnist_net.Net",
        "models.torchvision_models.classifier",
        "data.sources.offline.Digits",
    ):
        assert f"ddp_runner.{name}".startswith(tuple(OWN))
        assert callable(find(f"ddp_runner.{name}", key="model._target_"))


def _is_found(name: str) -> bool:
    try:
        return callable(find(name, key="model._target_"))
    except UserError:
        return False


def test_what_this_command_allows_may_be_anything(tmp_path: Path) -> None:
    """The user's own packages hold parts of any kind; their neighbours by name are foreign."""
    assert find("os.getcwd", key="model._target_", allowed=["os"])() == str(Path.cwd())
    assert callable(find("os.path.join", key="model._target_", allowed=["os.path"]))
    assert find(f"{__name__}.Touch", key="model._target_", allowed=[f"{__name__}."]) is not None
    for allowed in (["os.path"], ["o"], [""], ["os.getcw"]):
        with pytest.raises(UserError, match="may name"):
            find("os.getcwd", key="model._target_", allowed=allowed)
    for name, reason in (
        ("os.nope", "does not exist"),
        ("os.sep", "cannot be called"),
        ("no_such_package.Model", "cannot be imported (ModuleNotFoundError: No module named"),
    ):
        with pytest.raises(UserError) as rejected:
            find(name, key="model._target_", allowed=["os", "no_such_package"])
        assert reason in str(rejected.value)
    with pytest.raises(UserError, match="is not a dotted name"):  # nobody's part is named so
        find("os.environ.__class__", key="model._target_", allowed=["os"])


def test_what_is_allowed_may_be_nested_as_well() -> None:
    """In a part, in its lists and in its mappings; what is not allowed is rejected there, too."""
    inner = {"_target_": "types.SimpleNamespace", "size": 3}
    outer = {"_target_": "types.SimpleNamespace", "one": inner, "many": [inner], "by": {"a": inner}}
    found = construct(outer, key="model", allowed=["types"])
    assert [one.size for one in (found.one, *found.many, found.by["a"])] == [3, 3, 3]
    hostile = {**outer, "by": {"a": {"_target_": "os.getcwd"}}}
    with pytest.raises(UserError, match=r"^model\.by\.a\._target_ \(os\.getcwd\)"):
        construct(hostile, key="model", allowed=["types"])


def test_a_run_does_not_say_where_ranks_meet(tmp_path: Path) -> None:
    """Ranks unpickle what they are sent, so that a stranger's address is as good as code."""
    meeting = {"launch.nnodes": 2, "launch.rdzv_endpoint": "evil:1", "launch.node_rank": 0}
    hostile_run(tmp_path, meeting | {"launch.init_method": "tcp://evil:2"})
    assert "needs launch.rdzv_endpoint=HOST:PORT" in config_error(f"resume={tmp_path}")
    launch = resolved(f"resume={tmp_path}", "launch.nnodes=1")[0].launch
    assert (launch.rdzv_endpoint, launch.init_method, launch.node_rank) == (None, None, None)


@pytest.mark.parametrize("name", ["logs/rank-0.log", "metrics.jsonl", ".lock.holder", ".lock"])
def test_a_run_folder_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    """A link in it, which a run would write through, is rejected before anything is written."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside)
    with pytest.raises(UserError, match="is a link to"), RunDir(run).locked():
        pass
    assert outside.read_text() == "mine"


def test_a_file_is_not_written_through_a_link_that_stands_where_its_copy_is_made(
    tmp_path: Path,
) -> None:
    """In a folder of somebody else's, such as that of a report."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".report.html.tmp").symlink_to(mine)
    replace_file(tmp_path / "report.html", "page")
    assert (tmp_path / "report.html").read_text() == "page"
    assert not (tmp_path / "report.html").is_symlink()
    assert mine.read_text() == "mine"


ODD = ("checkpoints", "logs", "images/deep", "pipe:logs/rank-0.log", "pipe:.lock", "socket:odd")


@pytest.mark.parametrize("name", first_of(["pipe:run.json", *ODD, "pipe:.hydra/config.yaml"]))
def test_a_run_folder_holds_files_and_folders_alone(name: str, tmp_path: Path) -> None:
    """A linked folder would lose its files, a pipe would hang: rejected, and nothing changes."""
    kind, _, place = name.rpartition(":")
    run, mine = tmp_path / "run", tmp_path / "mine" / "step-00000001" / "state.pt"
    run.mkdir()
    hostile_run(run, {})
    write_run_record(run, status="preempted")
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    path = run / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.symlink_to(tmp_path / "mine")
    before = [*sorted(run.rglob("*")), mine]
    line = one_line(run_command(f"resume={run}", "checkpoint.keep=1", folder=tmp_path / "here"))
    assert str(path) in line
    assert re.search("is a link to|neither a file nor a folder|not a regular file", line)
    assert [*sorted(run.rglob("*")), mine] == before
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["run.json", ".hydra/config.yaml", "metrics.jsonl", ".lock"])
def test_no_reader_waits_for_a_pipe(name: str, tmp_path: Path) -> None:
    """Neither status nor compare nor a notebook: each has a reason, or passes it over."""
    hostile_run(tmp_path, {})
    write_run_record(tmp_path, status="running")
    for one in (name, ".heartbeat", ".lock.holder"):
        (tmp_path / one).unlink(missing_ok=True)
        os.mkfifo(tmp_path / one)
    assert run_status(tmp_path).status in ("damaged", "lost")
    with suppress(UserError):
        load(tmp_path)
    assert list(read_runs(tmp_path)["reason"].notna()) == [True]


def test_a_sweep_whose_plan_is_a_pipe_is_named(tmp_path: Path) -> None:
    """As one whose plan is damaged."""
    os.mkfifo(tmp_path / PLAN)
    (sweep,) = survey([tmp_path])[1]
    assert "not a regular file" in str(sweep.reason)


def test_a_folder_of_weights_brings_no_code(tmp_path: Path) -> None:
    """A pretrained model whose config names Python files beside it does not run them."""
    mark = tmp_path / MARK
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    classes = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": classes}))
    settings = {"_target_": "ddp_runner.models.bert.Bert", "num_classes": 2, "vocab_size": 2}
    sizes = {"max_length": 4, "pretrained": str(tmp_path)}
    with pytest.raises(UserError) as rejected:
        make("model", settings | sizes)
    assert "cannot be built" in str(rejected.value)
    assert not mark.exists()


def one_line(end: Any) -> str:
    """Return the one sentence of a command that was rejected."""
    assert end.exit_code == 2, end.stderr
    (line,) = end.stderr.splitlines()
    return str(line)


@pytest.mark.parametrize(
    ("changes", "logged"),
    [
        (HOSTILE["the hub"], "(torch.hub.load) is not a part"),
        (
            {"optimizer._target_": "torch.optim.lr_scheduler.partial"},
            "is not a subclass of torch.optim.lr_scheduler.LRScheduler",
        ),
    ],
    ids=["by the name", "by the object"],
)
def test_the_command_rejects_a_hostile_config(
    changes: dict[str, Any], logged: str, tmp_path: Path
) -> None:
    """Where the name is not enough before torch is imported, a rank checks the object."""
    mark = hostile_run(tmp_path, changes)
    assert logged in one_line(run_command(f"resume={tmp_path}", folder=tmp_path / "here"))
    assert not mark.exists()


def test_the_command_rejects_a_hostile_checkpoint(tmp_path: Path) -> None:
    """One with a right checksum, whose pickle would run code."""
    mark = hostile_run(tmp_path, {})
    state = tmp_path / "checkpoints" / "step-00000001" / "state.pt"
    state.parent.mkdir(parents=True)
    (tmp_path / "evil.pt").rename(state)
    (state.parent / MANIFEST).write_text(
        manifest_text({state.name: facts_of(state)}, step=1, metrics={})
    )
    end = run_command(f"resume={tmp_path}", folder=tmp_path / "here")
    assert "could run code (none was run)" in one_line(end)
    assert not mark.exists()
    torch.load(state, weights_only=False)
    assert mark.exists(), "the pickle is harmless: the test shows nothing"
