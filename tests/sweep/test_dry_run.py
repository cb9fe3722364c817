"""A dry run lists every job of a sweep, starts none, and leaves nothing behind."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from commands import error_line, run_command
from sweeps import planned

from ddp_runner.sweep.sweep_dir import change_plan
from ddp_runner.tracking.run_record import write_run_record

PAGE = Path(__file__).parents[2] / "docs" / "sweeps.md"
TOY = ("-m", "model=toy", "sweep.dry_run=true")
# What sinfo would report; no command of Slurm is needed then.
NODES = (
    "hydra/launcher=slurm",
    "hydra.launcher.gpus_per_node=8",
    "hydra.launcher.cpus_per_node=96",
)


def rows(stdout: str) -> list[list[str]]:
    """Return the words of the table's lines below its head."""
    lines = stdout.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("job "))
    return [line.split() for line in lines[start + 1 :] if not line.count(": ")][:-1]


@pytest.mark.full
@pytest.mark.parametrize("skips", [False, True])
def test_jobs_are_listed_with_the_rules_that_they_break(tmp_path: Path, *, skips: bool) -> None:
    """An invalid job makes the exit code 2, unless it would be skipped; in one line."""
    grid = ("world_size=1,2", "parallelism=ddp,single", "train.max_steps=7")
    end = run_command(*TOY, *grid, f"sweep.skip_invalid={skips}", folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0 if skips else 2, "")
    word = "skipped" if skips else "invalid"
    assert rows(end.stdout) == [
        ["world_size=1,parallelism=ddp", "1", "1", "cpu,", "gloo", "7"],
        ["world_size=1,parallelism=single", "1", "1", "cpu,", "gloo", "7"],
        ["world_size=2,parallelism=ddp", "1", "2", "cpu,", "gloo", "7"],
        ["world_size=2,parallelism=single", "-", "-", "-", word],
    ]
    assert "single: parallelism=single runs 1 process, world_size is 2" in end.stdout
    assert "3 valid jobs, 1 invalid job; nothing was started" in end.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


def test_jobs_of_slurm_are_listed_with_their_nodes(tmp_path: Path) -> None:
    """They are validated with the nodes' GPUs; this machine may have none."""
    end = run_command(
        *(*TOY, *NODES, "world_size=auto,2,16,9", "dataset.num_samples=1600"),
        *("train.epochs=2", "hydra.sweep.dir=mine"),
        folder=tmp_path,
    )
    assert end.exit_code == 2
    assert rows(end.stdout) == [
        ["world_size=auto", "1", "8", "cuda,", "nccl", "20"],
        ["world_size=2", "1", "2", "cuda,", "nccl", "80"],
        ["world_size=16", "2", "16", "cuda,", "nccl", "10"],
        ["world_size=9", "-", "-", "-", "invalid"],
    ]
    assert "write 8 or 10, or give launch.nproc_per_node" in end.stdout
    assert not (tmp_path / "mine").exists()


@pytest.mark.full
def test_the_commands_of_the_page_are_valid(tmp_path: Path) -> None:
    """Each command in its sections about dry runs and Slurm passes as a dry run."""
    text = PAGE.read_text(encoding="utf-8")
    sections = text[text.index("## Dry run") : text.index("## Searches")].replace("\\\n", " ")
    commands = re.findall(r"^python -m ddp_runner (.*)$", sections, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        nodes = NODES[1:] if "hydra/launcher=slurm" in words else ()
        end = run_command(
            *(*words, *nodes, "sweep.dry_run=true", "sweep.skip_invalid=true"), folder=tmp_path
        )
        assert (end.exit_code, end.stderr) == (0, "")
        assert " 0 valid" not in end.stdout


@pytest.mark.full
def test_a_job_that_is_done_is_named(tmp_path: Path) -> None:
    """The list tells what the same command would still run; the sweep's folder stays as it is."""
    sweep = ("-m", "model=toy", "world_size=1", "train.max_steps=2", "hydra.sweep.dir=sweep")
    assert run_command(*sweep, "seed=1,2", folder=tmp_path).exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").rglob("*")}
    end = run_command(*sweep, "seed=2,3", "sweep.dry_run=true", folder=tmp_path)
    assert [row[-2:] for row in rows(end.stdout)] == [["completed", "already"], ["gloo", "2"]]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").rglob("*")} == before


def test_a_sweep_of_the_same_command_that_has_ended_is_named(tmp_path: Path) -> None:
    """Otherwise it would surprise that all jobs train again; other commands' do not count."""
    words = ("model=toy", "seed=1,2")
    for name, command in (("mine", words), ("other", (*words, "world_size=1"))):
        planned(tmp_path / "outputs" / name, "seed=1", command=command)
        write_run_record(tmp_path / "outputs" / name / "seed=1", status="completed")
        change_plan(tmp_path / "outputs" / name, lambda plan: replace(plan, is_open=False))
    end = run_command("-m", *words, "sweep.dry_run=true", folder=tmp_path)
    assert "earlier      outputs/mine of the same command has ended" in end.stdout.splitlines()
    assert [row[0] for row in rows(end.stdout)] == ["seed=1", "seed=2"]


@pytest.mark.full
def test_of_a_search_the_first_batch_is_listed(tmp_path: Path) -> None:
    """The dry run writes nothing, not even the tables of its study."""
    pytest.importorskip("optuna", reason="needs ddp-runner[optuna]")
    end = run_command(
        *(*TOY, "hydra/sweeper=optuna", "sweep.objective=eval/loss", "hydra.sweeper.n_trials=5"),
        *("hydra.sweeper.direction=minimize", "hydra.sweeper.n_jobs=2", "world_size=1"),
        *("hydra.sweeper.sampler.seed=1", "optimizer.lr=interval(0.01,0.1)"),
        *("hydra.sweeper.storage='sqlite:///study.db'", "hydra.sweeper.study_name=mine"),
        folder=tmp_path,
    )
    assert end.exit_code == 0
    assert len(rows(end.stdout.partition("a search chooses")[0])) == 2
    assert "a search chooses its later trials by the results of these" in end.stdout
    assert not (tmp_path / "study.db").exists()


def test_a_single_run_has_no_dry_run(tmp_path: Path) -> None:
    """Otherwise a forgotten -m would start it."""
    end = run_command("model=toy", "sweep.dry_run=true", folder=tmp_path)
    assert error_line(end) == (
        "sweep.dry_run lists the jobs of a sweep, and this is one run; write -m"
    )
