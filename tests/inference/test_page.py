"""docs/after_training.md is true: its commands run, and its cell of a notebook as well."""

from pathlib import Path

import pytest
from commands import run_command
from pages import blocks, commands, write_files
from run_folders import record

pytestmark = pytest.mark.full

PAGE = "docs/after_training.md"
SHORT = ("train.max_steps=2", "train.num_threads=1")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run and the sweep that the page speaks of."""
    folder = tmp_path_factory.mktemp("page")
    assert run_command(*SHORT, "hydra.run.dir=outputs/RUN", folder=folder).exit_code == 0
    sweep = ("-m", "model=toy", *SHORT, "seed=1,2", "hydra.sweep.dir=outputs/SWEEP")
    assert run_command(*sweep, folder=folder).exit_code == 0
    return folder


@pytest.mark.parametrize("args", commands(PAGE), ids=" ".join)
def test_each_command_runs(args: list[str], outputs: Path, tmp_path: Path) -> None:
    """As it stands, with the run's folder in place of RUN."""
    (tmp_path / "outputs").symlink_to(outputs / "outputs")
    write_files(PAGE, tmp_path)
    given = ["resume=outputs/RUN" if one == "resume=RUN" else one for one in args]
    name = "hydra.sweep.dir=left" if "-m" in given else "hydra.run.dir=left"
    end = run_command(*given, name, folder=tmp_path, environ={"PYTHONPATH": str(tmp_path)})
    assert end.exit_code == 0, end.stderr
    assert {record(run)["status"] for run in end.run_dirs} == {"completed"}


def test_the_cell_runs(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of Python, where the runs are."""
    python = [block for block in blocks(PAGE) if block.language == "python"]
    (cell,) = (block.text for block in python if block.path is None)
    monkeypatch.chdir(outputs)
    names: dict[str, object] = {}
    exec(cell.replace('"RUN', '"outputs/RUN'), names)
    assert type(names["model"]).__name__ == "ConvNet"
