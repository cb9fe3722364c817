"""`ddp-runner new`: what it writes, how fast, and which names it rejects."""

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
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
        ("été", "cannot be the name of a Python package; write ete"),
        ("ünï", "cannot be the name of a Python package; write uni"),
        ("数据", "cannot be the name of a Python package; write my_project"),
        ("ddp-runner", "cannot be the name of a Python package; write ddp_runner_project"),
        ("class-", "cannot be the name of a Python package; write class_project"),
        ("/", "/ is no folder of a project; write ddp-runner new my_project"),
        ("class", "class is a word of Python's own; write class_project"),
        ("random", "random would hide Python's module random; write random_project"),
        (
            "torch",
            "torch would hide the package torch, which the project needs; write torch_p",
        ),
        ("ddp_runner", "ddp_runner would hide the package ddp_runner"),
        ("scikit_learn", "scikit_learn would hide the package scikit_learn"),
        ("yaml", "yaml would hide the package yaml, which is installed; write yaml_project"),
        ("pyyaml", "pyyaml would hide the distribution pyyaml, which is installed; write pyyaml_"),
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


@pytest.mark.parametrize("name", ["pytest", "PyTest", "pip", "hatchling", "pluggy", "iniconfig"])
def test_a_name_that_the_project_needs_is_rejected_wherever_the_command_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing of it is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(metadata, "distribution", not_found)
    with pytest.raises(UserError, match=f"{name.lower()}, which the project needs; write {name}_p"):
        run([name])
    run(["shapes"])  # as opposed to another name


def not_found(name: str) -> metadata.Distribution:
    """Find no distribution."""
    raise metadata.PackageNotFoundError(name)


def test_a_link_to_nothing_is_one_line(tmp_path: Path) -> None:
    """As the folder, or above it."""
    (tmp_path / "gone").symlink_to(tmp_path / "no-where")
    for folder in (tmp_path / "gone", tmp_path / "gone" / "shapes"):
        with pytest.raises(UserError, match=r"gone is a link to .*no-where, which does not exist"):
            run([str(folder)])


def test_a_reader_that_has_read_enough_is_no_error(tmp_path: Path) -> None:
    """As in `| head -2`."""
    program = f"{sys.executable} -m ddp_runner new shapes | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert (tmp_path / "shapes" / "README.md").is_file()


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


def test_a_file_is_not_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    """An empty one, too."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is a file; give the name of a new folder"):
        run([str(tmp_path / "file")])


@pytest.mark.parametrize("existing", [(), ("shapes",), ("shapes/.git",)])
def test_a_disk_that_fills_leaves_nothing_and_the_next_try_works(
    existing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a folder that was there."""
    for name in existing:
        (tmp_path / name).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    folder = tmp_path / "shapes" if existing else tmp_path / "new" / "shapes"
    write_text, written = Path.write_text, list[Path]()

    def fills(path: Path, text: str, **options: str) -> int:
        written.append(path)
        if len(written) <= 7:
            return write_text(path, text, **options)
        write_text(path, text[:10], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fills)
    with pytest.raises(UserError, match=r"shapes: No space left on device; free some$"):
        run([str(folder)])
    assert len(written) == 8
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(Path, "write_text", write_text)
    run([str(folder)])


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


def test_an_installed_project_finds_its_config_groups(tmp_path: Path) -> None:
    """A wheel holds what its pyproject.toml says; the folder of the project is not there then."""
    project, site = tmp_path / "shapes", tmp_path / "site"
    run([str(project)])
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
