"""A sweep over resume goes on with each run in its own folder, or starts nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import CommandResult, error_line, run_command
from configs import freeze, resolved
from run_folders import checkpoint_steps, record
from sweeps import only_sweep, statuses
from tiers import first_of

from ddp_runner.cli.command import quoted_runs
from ddp_runner.sweep.sweep_table import sweep_table
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import write_run_record

NODES = (
    "hydra/launcher=slurm",
    "hydra.launcher.gpus_per_node=8",
    "hydra.launcher.cpus_per_node=96",
)


@pytest.mark.parametrize("report", first_of(["True", "False"], num_quick=0, num_full=1))
def test_each_run_goes_on_in_its_own_folder(report: str, tmp_path: Path) -> None:
    """With its own groups and config; the table and the report are about these folders."""
    short = ("world_size=1", "train.num_threads=1", "train.max_steps=3")
    first = ("-m", "model=toy", "optimizer=adam,sgd", "dataset.seed=5", "hydra.sweep.dir=first")
    assert run_command(*first, *short, folder=tmp_path).exit_code == 0
    runs = [tmp_path / "first" / name for name in ("optimizer=adam", "optimizer=sgd")]
    again = ("-m", "resume=first/optimizer=adam,first/optimizer=sgd", f"sweep.report={report}")
    end = run_command(*again, "train.max_steps=5", folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert end.run_dirs == runs
    for run, optimizer in zip(runs, ("adam", "sgd"), strict=True):
        assert (record(run)["status"], record(run)["step"]) == ("completed", 5)
        assert checkpoint_steps(run) == [3, 5]
        config = yaml.safe_load((run / ".hydra" / "config.yaml").read_text())
        assert (config["optimizer"]["name"], config["dataset"]["seed"]) == (optimizer, 5)
        overrides = yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text())
        assert overrides == [f"resume='first/{run.name}'", *again[2:], "train.max_steps=5"]
    sweep = only_sweep(tmp_path)
    assert statuses(sweep) == {str(run): "completed" for run in runs}
    table = sweep_table(sweep).splitlines()
    assert [line.split()[:2] for line in table[2:-1]] == [[str(run), "completed"] for run in runs]
    assert table[-1] == f"tensorboard --logdir {tmp_path / 'first'}"
    assert ("2 runs compared" in end.stdout) == (report == "True")
    assert (sweep / "report" / "report.html").is_file() == (report == "True")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with two runs that have not begun, a and b."""
    for name, optimizer in (("a", "adam"), ("b", "adamw")):
        config, _ = resolved("model=toy", f"optimizer={optimizer}", "scheduler=cosine")
        write_run_record(tmp_path / name, status="preempted")
        choices = {"model": "toy", "optimizer": optimizer, "scheduler": "cosine"}
        freeze(tmp_path / name, config, choices=choices)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "sentence"),
    first_of(
        [
            (
                "resume=a optimizer.lr=0.1,0.2",
                "choose the run's groups and write ++model.weights=a",
            ),
            ("resume=a,b optimizer.lr=0.1,0.2", "resume=a continues one run in its own folder"),
            ("resume=a,b,./a", "and several jobs of this sweep would"),
            ("resume=a,nowhere", "resume=nowhere is not a run folder"),
            ("resume=a,b hydra.sweep.subdir=x", "leave hydra.sweep.subdir out"),
            (
                f"resume=a,b {' '.join(NODES)}",
                "hydra/launcher=slurm submits new runs, and resume=a",
            ),
        ],
        num_quick=1,
    ),
)
def test_what_cannot_go_on_starts_nothing(
    words: str, sentence: str, runs: Path, answer_to: Callable[..., CommandResult]
) -> None:
    """One line, and the runs are as they were."""
    before = {path: path.read_bytes() for path in runs.rglob("*.*") if path.is_file()}
    assert sentence in error_line(answer_to("-m", *words.split()))
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in runs.iterdir()} <= {"a", "b", "outputs"}


def test_a_run_in_use_starts_nothing(runs: Path) -> None:
    """Otherwise the sweep would wait for it in silence."""
    with RunDir(runs / "b").locked():
        end = run_command("-m", "resume=a,b", folder=runs)
    assert "b is in use by process" in error_line(end)
    assert record(runs / "a")["status"] == "preempted"


@pytest.mark.usefixtures("runs")
def test_the_keys_of_groups_that_all_runs_share_can_be_changed(
    answer_to: Callable[..., CommandResult],
) -> None:
    """The default scheduler has no warm-up, and a's optimizer is not b's."""
    end = answer_to("-m", "resume=a,b", "scheduler.warmup_steps=2", "sweep.dry_run=true")
    assert (end.exit_code, end.stderr) == (0, "")
    assert "2 valid jobs" in end.stdout


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("resume=s/lr=0.1,seed=1", "resume='s/lr=0.1,seed=1'"),
        ("resume=s/lr=0.1,seed=1,s/lr=0.1,seed=2", "resume='s/lr=0.1,seed=1','s/lr=0.1,seed=2'"),
        ("resume=gone/lr=0.1,plain", "resume='gone/lr=0.1',plain"),
        ("resume='s/lr=0.1,seed=1',x", "resume='s/lr=0.1,seed=1',x"),
        ("resume=one,two", "resume=one,two"),
        ("resume=[a,b=c]", "resume=[a,b=c]"),
        ("name=a=b", "name='a=b'"),
    ],
)
def test_a_jobs_folder_needs_no_quotes(
    written: str, read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named after keys, and a comma may separate two runs or two keys."""
    for seed in (1, 2):
        (tmp_path / "s" / f"lr=0.1,seed={seed}").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert quoted_runs(written) == read
