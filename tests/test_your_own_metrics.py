"""The page about own metrics does what it says: its files are written, its commands run."""

from pathlib import Path

import pytest
from commands import CommandResult, run_command
from pages import blocks, commands, write_files
from run_folders import metrics, record, tensorboard_scalars

from ddp_runner.compare.analysis import compare
from ddp_runner.compare.run_reader import read_runs

pytestmark = pytest.mark.full

PAGE = "docs/your_own_metrics.md"
SHORT = ("train.epochs=2", "batch.global_size=100", "train.num_threads=1", "world_size=2")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[CommandResult]:
    """How the page's commands end, each in a folder of its own with the page's files."""
    results = []
    for number, arguments in enumerate(commands(PAGE)):
        folder = tmp_path_factory.mktemp(f"command-{number}")
        write_files(PAGE, folder)
        environ = {"PYTHONPATH": str(folder)}
        results.append(run_command(*arguments, *SHORT, folder=folder, environ=environ))
    return results


def test_every_block_is_a_file_or_a_command() -> None:
    """A block that nothing carries out could be wrong."""
    assert len(commands(PAGE)) == 4
    for block in blocks(PAGE):
        assert (block.path is None) == (block.language == "bash"), block


@pytest.mark.slow
def test_each_command_logs_its_metrics(ends: list[CommandResult]) -> None:
    """In metrics.jsonl, TensorBoard and run.json, the same numbers, on the terminal too."""
    expected = [
        {"eval/within", "eval/top_k", "best/within", "best/top_k"},
        {"eval/within"},
        {"eval/rmse", "eval/largest"},
        {f"eval/by_class_{label}" for label in range(10)},
    ]
    for end, names in zip(ends, expected, strict=True):
        assert (end.exit_code, end.stderr) == (0, "")
        kept = record(end.run_dir)["metrics"]
        assert names <= kept.keys()
        logged = {key: value for line in metrics(end.run_dir) for key, value in line.items()}
        shown = {name: value for (_, name), value in tensorboard_scalars(end.run_dir).items()}
        for name in names:
            assert kept[name] == logged[name]
            assert kept[name] == pytest.approx(shown[name])
        assert all(f"{name} {kept[name]:.4f}" in end.stdout for name in sorted(names)[:4])


def test_the_monitored_metric_decides_which_checkpoint_is_best(ends: list[CommandResult]) -> None:
    """It is evaluated again at the end: by a fresh copy, so to the same number."""
    run_dir = ends[0].run_dir
    values = [line["eval/within"] for line in metrics(run_dir) if "eval/within" in line]
    assert len(values) == 2
    assert record(run_dir)["metrics"]["best/within"] == max(values)
    assert "best by eval/within" in ends[0].stdout


def test_a_run_goes_on_with_its_metrics(ends: list[CommandResult]) -> None:
    """A key of theirs may change, which only their own group has."""
    folder, run_dir = ends[0].folder, ends[0].run_dir
    arguments = ("--config-dir", "conf", "allowed_targets=[my_package]", f"resume='{run_dir}'")
    changes = ("train.epochs=3", "metrics.within.distance=9", "checkpoint.load_best=false")
    environ = {"PYTHONPATH": str(folder)}
    end = run_command(*arguments, *changes, folder=folder, environ=environ)
    assert (end.exit_code, end.stderr) == (0, "")
    assert metrics(run_dir)[-1]["eval/within"] == 1.0  # no class is further away


def test_a_comparison_knows_which_end_is_best(ends: list[CommandResult]) -> None:
    """As the class says, by way of run.json: no name gives it away."""
    run = ends[2].run_dir
    assert record(run)["directions"] == {"eval/rmse": "min", "eval/largest": "min"}
    assert record(ends[0].run_dir)["directions"] == {"eval/within": "max", "eval/top_k": "max"}
    best = compare(read_runs([run]), best="eval/largest").best
    assert best is not None
    assert best.mode == "min"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (("checkpoint.monitor=eval/largest",),
         "checkpoint.monitor=eval/largest with checkpoint.mode=max keeps the worst value, not"),
        (("checkpoint.monitor=eval/largest_of_all", "checkpoint.mode=min"),
         "checkpoint.monitor (eval/largest_of_all) must be one of eval/loss, "),
        (("model=convnet",), "metrics.rmse (RMSE): a regression metric needs outputs and"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_before_the_first_step(
    changes: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    """Not after an epoch whose evaluation fails."""
    write_files(PAGE, tmp_path)
    environ = {"PYTHONPATH": str(tmp_path)}
    arguments = [*commands(PAGE)[2], *SHORT, *changes]
    end = run_command(*arguments, folder=tmp_path, environ=environ)
    assert end.exit_code == 2
    assert sentence in end.stderr
    assert metrics(end.run_dir) == []
