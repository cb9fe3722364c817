"""The experiments of conf/, shortened: each runs, and each YAML says what to expect."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import CommandResult, background, free_port, run_command, wait_for_end
from run_folders import metrics, rank_log, record

from ddp_runner.config.schema import CONFIG_DIR

pytestmark = pytest.mark.full

EXPERIMENTS = sorted((CONFIG_DIR / "experiment").glob("*.yaml"))
# Experiments that need no files and no other machine, with the mode that their runs must have.
OFFLINE = {
    "toy_ddp": "ddp",
    "toy_model_parallel": "ddp_mp",
    "data_parallel": "ddp",
    "split_net": "ddp_mp",
    "file_rendezvous": "ddp",
    "collectives": "ddp",
    "what_ddp_guarantees": "ddp",
    "slow_rank": "ddp",
}
# Experiments with tests of their own, here or in another file.
OTHERS = {
    "checkpoint_demo",
    "best_by_f1",
    "mnist_ddp",
    "parameter_server",
    "two_nodes",
    "start_from_weights",
    "gpt_text",
    "reviews_bert",
    "reviews_bert_finetune",
    "resnet18_cifar10",
    "scaling_study",
}


@pytest.mark.slow
def test_the_resnet_trains_on_pictures_of_cifars_size(tmp_path: Path) -> None:
    """CIFAR-10 itself has to be downloaded."""
    end = run_command(
        "experiment=resnet18_cifar10",
        "dataset=fake_images",
        "batch.global_size=32",
        "train.max_steps=2",
        "scheduler.warmup_steps=1",
        "optimizer.lr=0.01",
        "hydra.run.dir=run",
        folder=tmp_path,
    )
    assert end.exit_code == 0, end.stderr
    fields = record(tmp_path / "run")
    assert (fields["status"], fields["step"]) == ("completed", 2)
    assert fields["metrics"]["train/loss"] < 10


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    """Return all offline experiments as one sweep, six steps each."""
    return run_command(
        "-m",
        f"experiment={','.join(OFFLINE)}",
        "train.max_steps=6",
        "train.log_every_steps=2",
        "collectives.max_bytes=1024",
        "train.num_threads=1",
        "hydra.sweep.dir=sweep",
        folder=tmp_path_factory.mktemp("offline"),
    )


@pytest.mark.parametrize("name", [name for name in OFFLINE if name != "slow_rank"])
def test_each_offline_experiment_completes(offline: CommandResult, name: str) -> None:
    """It runs in its mode and leaves its results."""
    fields = record(offline.folder / "sweep" / f"experiment={name}")
    assert (fields["status"], fields["parallelism"]) == ("completed", OFFLINE[name])
    assert fields["world_size"] == 2
    assert fields.get("metrics") or fields["checks"]


def test_a_late_rank_is_named_with_its_stack(offline: CommandResult) -> None:
    """The others time out; the sentence has the late rank, the timeout and where the rank slept."""
    fields = record(offline.folder / "sweep" / "experiment=slow_rank")
    sentence = fields["error"]["sentence"]
    assert (fields["status"], fields["error"]["rank"]) == ("failed", 1)
    assert "waited for backend.timeout_s (3 s); it was at File" in sentence
    assert "models/toy.py" in sentence
    assert offline.exit_code == 1
    assert f"experiment=slow_rank: {sentence}" in offline.stdout


@pytest.mark.slow
@pytest.mark.real_data
def test_the_experiments_on_mnist_complete(data_root: Path, tmp_path: Path) -> None:
    """The tutorial's ConvNet and the parameter server take a few steps each."""
    end = run_command(
        "-m",
        "experiment=mnist_ddp,parameter_server",
        "train.max_steps=6",
        "train.log_every_steps=2",
        "train.eval_every_epochs=0",
        "hydra.sweep.dir=sweep",
        folder=tmp_path,
    )
    assert (end.exit_code, end.stderr) == (0, "")
    modes = {record(run_dir)["parallelism"]: metrics(run_dir)[-1] for run_dir in end.run_dirs}
    assert modes.keys() == {"ddp", "ps"}
    assert modes["ps"]["ps/pushes_per_s"] > 0


@pytest.mark.parametrize(
    "is_static",
    [
        pytest.param(True, id="static"),
        # test_restarts.py lets two launchers meet so, and lose a rank.
        pytest.param(False, id="c10d", marks=pytest.mark.slow),
    ],
)
def test_two_nodes_make_one_world(tmp_path: Path, is_static: bool) -> None:
    """Two launchers with two ranks each: four ranks, one run folder."""
    command = (
        "experiment=two_nodes",
        f"launch.rdzv_endpoint=127.0.0.1:{free_port()}",
        "train.max_steps=4",
    )
    folders = [tmp_path / "0", tmp_path / "1"]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                background(
                    *command,
                    *((f"launch.node_rank={node_rank}",) if is_static else ()),
                    f"name={tmp_path / 'shared' / 'run'}".replace("/", "_"),
                    folder=folder,
                )
            )
            for node_rank, folder in enumerate(folders)
        ]
        ends = [
            wait_for_end(process, folder)
            for process, folder in zip(processes, folders, strict=True)
        ]
    assert [end.exit_code for end in ends] == [0, 0]
    (run_dir,) = [run_dir for end in ends for run_dir in end.run_dirs]
    fields = record(run_dir)
    assert (fields["status"], fields["world_size"], fields["num_nodes"]) == ("completed", 4, 2)
    assert "0 to 3, over all nodes" in rank_log(run_dir)


@pytest.mark.slow
def test_a_scaling_study_ends_in_its_report(tmp_path: Path) -> None:
    """Strong and weak scaling: invalid jobs are skipped, ddp has a prediction, parity holds."""
    end = run_command(
        "experiment=scaling_study",
        "seed=0",
        "parallelism=single,ddp",
        "train.max_steps=6",
        "train.log_every_steps=2",
        "hydra.sweep.dir=sweep",
        folder=tmp_path,
    )
    assert (end.exit_code, end.stderr) == (0, "")
    assert "parallelism=single,world_size=2,scaling=weak" in end.stdout
    report = tmp_path / "sweep" / "report"
    comparison = json.loads((report / "comparison.json").read_text())
    assert [fit["world_size"] for fit in comparison["all_reduces"]] == [2]
    rows = {
        (row["setting"]["parallelism.name"], row["world_size"], kind): row
        for row in comparison["rows"]
        for kind in ("strong", "weak")
        if row[kind]
    }
    for kind in ("strong", "weak"):
        row = rows["ddp", 2, kind]
        predicted = row["predicted"][kind]
        assert row[kind]["base_num_devices"] == 1
        assert 0 < predicted["speedup"] < 2
        assert predicted["parts_ms"]["comm"] > 0
        assert set(predicted["parts_ms"]) == set(predicted["measured_ms"])
    assert all(verdict["first_break"] is None for verdict in comparison["parity"])
    assert comparison["parity"]
    assert {path.suffix for path in report.iterdir()} > {".png", ".svg", ".csv", ".md", ".txt"}


def test_every_experiment_has_a_test() -> None:
    """A new experiment needs a test as soon as its YAML exists."""
    assert {path.stem for path in EXPERIMENTS} == OFFLINE.keys() | OTHERS


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_opens_with_its_command_and_what_to_expect(path: Path) -> None:
    """Its first comment is the command that runs it; the expected result follows."""
    head = [line for line in path.read_text().splitlines() if line.startswith("#")][1:]
    assert head[0].startswith("# python -m ddp_runner ")
    assert f"experiment={path.stem}" in head[0]
    assert any("xpected" in line for line in head)
