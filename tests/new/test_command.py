"""`ddp-runner new`: what it writes, how fast, and which names it rejects."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ddp_runner import __version__
from ddp_runner.errors import UserError
from ddp_runner.new.command import TEMPLATE, run

SLOW_IMPORTS = "import sys; print([one for one in ('torch', 'hydra') if one in sys.modules])"


def test_the_command_imports_neither_torch_nor_hydra(tmp_path: Path) -> None:
    """So it answers at once; and it says what comes next."""
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


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """From the command itself."""
    command = [sys.executable, "-m", "ddp_runner", "new", "my-project"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: my-project cannot be the name of a Python package; write my_project\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("my project", "cannot be the name of a Python package; write my_project"),
        ("3d_shapes", "cannot be the name of a Python package; write project_3d_shapes"),
        ("_shapes", "cannot be the name of a Python package; write shapes"),
        ("été", "cannot be the name of a Python package; write t"),
        ("class", "class is a word of Python's own; write class_project"),
        ("random", "random would hide Python's module random; write random_project"),
        ("torch", "torch would hide the package torch, which is installed; write torch_project"),
        ("ddp_runner", "ddp_runner would hide the package ddp_runner"),
        ("scikit_learn", "scikit_learn would hide the distribution scikit_learn"),
        ("tests", "tests would hide the folder tests of the project; write tests_project"),
    ],
)
def test_a_name_that_would_not_work_is_rejected(
    name: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a name that would; nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        run([name])
    assert answer in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [[], ["one", "two"], ["--force"], ["one", "--force"]])
def test_exactly_one_folder_is_named(words: list[str]) -> None:
    """Otherwise the line shows how."""
    with pytest.raises(UserError, match="write ddp-runner new NAME"):
        run(words)


def test_a_folder_that_holds_something_stays_as_it_is(tmp_path: Path) -> None:
    """But a folder may exist: an empty one, or a repository without files."""
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "notes").touch()
    with pytest.raises(UserError, match="exists and is not empty"):
        run([str(tmp_path / "shapes")])
    assert [path.name for path in (tmp_path / "shapes").iterdir()] == ["notes"]
    (tmp_path / "fresh" / ".git").mkdir(parents=True)
    run([str(tmp_path / "fresh")])
    assert (tmp_path / "fresh" / "fresh" / "model.py").is_file()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A file where a folder is to be."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="give a folder that can be written"):
        run([str(tmp_path / "file" / "shapes")])


def test_every_file_has_the_new_name(tmp_path: Path) -> None:
    """In its path and its text; and the project finds this ddp-runner."""
    run([str(tmp_path / "shapes")])
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
