"""A new project runs as its README says, outside this repository."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from configs import resolved
from pages import ROOT, blocks
from run_folders import record, run_dirs

from ddp_runner.new import TEMPLATE, main

pytestmark = pytest.mark.full

# pages.blocks reads pages by their path below the repository.
COMMANDS = [
    [line for line in block.text.splitlines() if line]
    for block in blocks(str((TEMPLATE / "README.md").relative_to(ROOT)))
]


def carry_out(line: str, folder: Path) -> str:
    """Run a line of the README without uv, which would make another environment; return stdout."""
    words = shlex.split(line)
    assert words[:2] == ["uv", "run"]
    program = words[3:] if words[2] == "python" else ["-m", *words[2:]]
    done = subprocess.run(
        [sys.executable, *program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project of another name than the template's."""
    folder = tmp_path_factory.mktemp("new") / "shapes"
    main([str(folder)])
    return folder


def readme(project: Path, number: int) -> list[str]:
    """Return the commands of a block of the README, with the project's name."""
    return [line.replace("my_project", project.name) for line in COMMANDS[number]]


@pytest.mark.slow
def test_its_two_commands_run_and_pass(project: Path) -> None:
    """The training learns, and the test trains on two ranks and on one."""
    train, test = readme(project, 0)
    carry_out(train, project)
    (run_dir,) = run_dirs(project / "outputs")
    result = record(run_dir)
    assert result["status"] == "completed"
    assert result["own_groups"] == [f"--config-dir={project / 'conf'}"]  # to repeat it
    assert result["metrics"]["eval/accuracy"] > 0.9
    assert result["metrics"]["eval/worst_class"] > 0.7
    assert "3 passed" in carry_out(test, project)


@pytest.mark.slow
def test_what_its_readme_gives_to_try_runs(project: Path) -> None:
    """Another width, a resumed run, its predictions, a sweep and the comparison."""
    *commands, board = readme(project, 1)
    assert board == "uv run tensorboard --logdir outputs"  # it serves until it is stopped
    outputs = [carry_out(line, project) for line in commands]
    assert "predictions.csv" in outputs[2]
    statuses = [record(run)["status"] for run in run_dirs(project / "outputs")]
    assert len(statuses) >= 6
    assert set(statuses) == {"completed"}
    assert "best eval/worst_class" in outputs[4]
    assert "breaks" not in outputs[4].partition("columns:")[0]
    run_dir = next(path for path in run_dirs(project / "outputs") if "predict" not in str(path))
    code = (
        f"import ddp_runner; print(ddp_runner.load({str(run_dir)!r}, allowed_targets=['shapes']))"
    )
    carry_out(f"uv run python -c {shlex.quote(code)}", project)


@pytest.mark.parametrize("path", sorted((TEMPLATE / "conf").glob("*/*.yaml")), ids=lambda p: p.stem)
def test_each_yaml_composes_by_its_own_command(path: Path) -> None:
    """As those in conf/ do, with the model that the project's command adds."""
    first = next(line for line in path.read_text().splitlines() if line.startswith("# python"))
    overrides = first.removeprefix("# python -m my_project").split()
    assert overrides == [f"{path.parent.name}={path.stem}"]
    words = ("model=small_net", "allowed_targets=[my_project]")
    config, _ = resolved(*words, *overrides, folders=[TEMPLATE / "conf"])
    assert config.model["name"] == "small_net"
    assert config.dataset["name"] == "shifted_digits"
