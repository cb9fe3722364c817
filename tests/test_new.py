"""`ddp-runner new`: what it writes, and which names it rejects."""

import importlib
import json
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from configs import compose_raw

from ddp_runner import __version__, new
from ddp_runner.cli import app
from ddp_runner.config.training import TrainConfig
from ddp_runner.new import TEMPLATE, main, uv_source

SLOW_IMPORTS = "import sys; print([one for one in ('torch', 'hydra') if one in sys.modules])"


def rejected(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the command's error line."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_command_imports_neither_torch_nor_hydra(tmp_path: Path) -> None:
    """So it answers at once, and prints the next steps."""
    program = (
        "import runpy, sys; sys.argv = ['ddp_runner', 'new', 'shapes']\n"
        f"runpy.run_module('ddp_runner', run_name='__main__', alter_sys=True)\n{SLOW_IMPORTS}"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    made, *following, imported = done.stdout.splitlines()
    files = [path for path in (tmp_path / "shapes").rglob("*") if path.is_file()]
    assert made == f"created shapes, {len(files)} files"
    assert [line.partition("#")[0].strip() for line in following] == [
        "cd shapes",
        "uv run python -m shapes",
        "uv run pytest",
    ]
    assert imported == "[]"


@pytest.mark.parametrize(
    ("words", "is_added"),
    [
        ([], True),
        (["-m", "optimizer.lr=0.1,0.2"], True),
        (["resume=auto", "seed=3"], True),
        (["model=other"], False),
        (["-m", "experiment=one,two"], False),
        (["task=predict", "resume=last"], False),
    ],
)
def test_its_command_trains_its_model_unless_it_names_another(
    words: list[str], monkeypatch: pytest.MonkeyPatch, *, is_added: bool
) -> None:
    """Otherwise a command without arguments would train this program's own model."""
    started = Mock()
    monkeypatch.setattr(app, "main", started)
    monkeypatch.setattr("sys.argv", ["my_project", *words])
    runpy.run_path(str(TEMPLATE / "my_project" / "__main__.py"), run_name="__main__")
    ((given,), _) = started.call_args
    assert given[3:] == [*["model=small_net"] * is_added, *words]


def test_a_model_of_the_project_is_trained_as_its_own_yaml_says(tmp_path: Path) -> None:
    """The model that the project began with does not decide its settings."""
    text = "# @package _global_\ndefaults:\n  - override /optimizer: adadelta\nmodel: {name: own}\n"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text(text)
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "adadelta.yaml").write_text("name: adadelta\n")
    raw = compose_raw("model=own", folders=[TEMPLATE / "conf", tmp_path])
    assert raw.optimizer == {"name": "adadelta"}
    assert raw.train.epochs == TrainConfig().epochs


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("my-shapes", "'my-shapes' cannot be the name of a Python package; write my_shapes"),
        ("3d_shapes", "'3d_shapes' cannot be the name of a Python package; write my_project"),
        ("ddp-runner", "'ddp-runner' cannot be the name of a Python package; write my_project"),
        ("class", "'class' cannot be the name of a Python package; write my_project"),
        ("/", "'' cannot be the name of a Python package; write my_project"),
        ("random", "random TAKEN; write random_project"),
        ("torch", "torch TAKEN; write torch_project"),
        ("pyyaml", "pyyaml TAKEN; write pyyaml_project"),
        ("tests", "tests TAKEN; write tests_project"),
    ],
)
def test_a_name_that_would_not_work_is_rejected(
    name: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message has a name that works, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    taken = "is the name of an installed package, or of a folder that each project has"
    assert rejected(name, capsys=capsys) == f"error: {answer.replace('TAKEN', taken)}\n"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But a folder may exist: an empty one, or a repository without files."""
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "notes").touch()
    assert "exists and is not empty" in rejected(str(tmp_path / "shapes"), capsys=capsys)
    assert [path.name for path in (tmp_path / "shapes").iterdir()] == ["notes"]
    (tmp_path / "fresh" / ".git").mkdir(parents=True)
    main([str(tmp_path / "fresh")])
    assert (tmp_path / "fresh" / "fresh" / "model.py").is_file()


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file, or a link to nothing, where a folder is to be."""
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/shapes", "gone"):
        line = rejected(str(tmp_path / name), capsys=capsys)
        assert line.endswith("give a folder that can be written\n")
    assert {path.name for path in tmp_path.iterdir()} <= {"file", "gone"}


def test_every_file_has_the_new_name(tmp_path: Path) -> None:
    """In its path and its text; and the project finds this ddp-runner."""
    main([str(tmp_path / "shapes")])
    files = [path for path in (tmp_path / "shapes").rglob("*") if path.is_file()]
    # Nothing that a run or a tool left in the template.
    top = {".gitignore", "README.md", "conf", "pyproject.toml", "shapes", "tests"}
    assert {path.name for path in (tmp_path / "shapes").iterdir()} == top
    for path in files:
        assert "my_project" not in f"{path} {path.read_text(encoding='utf-8')}"
    project = tomllib.loads((tmp_path / "shapes" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "shapes"
    assert f"ddp-runner>={__version__}" in project["project"]["dependencies"]
    source = project["tool"]["uv"]["sources"]["ddp-runner"]
    assert source == {"path": str(TEMPLATE.parent), "editable": True}


@pytest.mark.parametrize(
    ("recorded", "source"),
    [
        ({"url": "file:///my%20own/one.whl", "archive_info": {}}, {"path": "/my own/one.whl"}),
        ({"url": "https://host/one.tar.gz"}, {"url": "https://host/one.tar.gz"}),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "4cf8f1d"}},
            {"git": "https://host/a.git", "rev": "4cf8f1d"},
        ),
        (None, None),  # from a package index
    ],
)
def test_an_installed_runner_is_found_where_it_came_from(
    recorded: dict[str, Any] | None, source: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the record of its installer."""

    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if recorded is None else json.dumps(recorded)

    monkeypatch.setattr(new, "IS_INSTALLED", True)
    monkeypatch.setattr(new.metadata, "distribution", lambda name: Distribution())
    in_toml = tomllib.loads(uv_source())
    assert in_toml == (
        {} if source is None else {"tool": {"uv": {"sources": {"ddp-runner": source}}}}
    )


def test_an_installed_project_finds_its_config_groups(tmp_path: Path) -> None:
    """A wheel holds what its pyproject.toml says; the folder of the project is not there then."""
    project, site = tmp_path / "shapes", tmp_path / "site"
    main([str(project)])
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    wheel = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name in wheel["packages"]:
        shutil.copytree(project / name, site / name)
    for source, target in wheel["force-include"].items():
        shutil.copytree(project / source, site / target)
    for place in (site, project):
        command = [sys.executable, "-c", "import shapes.__main__ as main; print(main.CONF)"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
        conf = Path(done.stdout.strip())
        assert conf.is_relative_to(place)
        assert (conf / "model" / "small_net.yaml").is_file()


def test_its_metric_counts_on_the_device_of_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the runner puts its tensors: on a GPU, if there is one."""
    import torch

    from ddp_runner.metrics.metric import Evaluation

    monkeypatch.syspath_prepend(TEMPLATE)
    metrics = importlib.import_module("my_project.metrics")
    device = torch.device("meta")
    evaluation = Evaluation({"worst": metrics.WorstClass(num_classes=3)}, device=device)
    with device:
        evaluation.update(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
