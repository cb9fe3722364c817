"""Runs in MLflow's real server: a sweep, a server that dies and comes back, one that is mute."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import background, free_port, run_command, wait_for, wait_for_end
from mlflow_server import MlflowServer, fields
from run_folders import metrics, record, scalars, tensorboard_scalars

pytestmark = pytest.mark.full

TOY = (
    "model=toy",
    "dataset.num_samples=64",
    "batch.global_size=8",
    "train.num_threads=1",
    "train.log_every_steps=4",
    "trackers=[mlflow]",
    "trackers.mlflow.timeout_s=60",
    "trackers.mlflow.wait_s=120",
)
LONG = ("train.epochs=100000", "checkpoint.every_epochs=null", "world_size=1", "hydra.run.dir=run")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Give a server for all tests of this file."""
    one = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    with one.running():
        yield one


@pytest.mark.slow
def test_a_sweep_is_in_mlflow(server: MlflowServer, tmp_path: Path) -> None:
    """Its runs by name, with parameters, metrics, tags, notes and files, all as in the folders."""
    result = run_command(
        *TOY,
        "-m",
        "train.epochs=2",
        "optimizer.lr=0.1,0.01",
        "tags=[baseline,lr-study]",
        "notes='why I ran it'",
        f"trackers.mlflow.tracking_uri={server.url}",
        "trackers.mlflow.experiment_name=sweep",
        folder=tmp_path,
    )
    assert (result.exit_code, result.stderr) == (0, "")
    shown = {run["info"]["run_name"]: run for run in server.runs("sweep")}
    folders = {path.name: path for path in result.run_dirs}
    assert shown.keys() == folders.keys() == {"optimizer.lr=0.1", "optimizer.lr=0.01"}
    assert "warning" not in result.stdout
    for name, run in shown.items():
        folder, tags = folders[name], fields(run, "tags")
        assert run["info"]["status"] == "FINISHED"
        assert fields(run, "params")["optimizer.lr"] == name.partition("=")[2]
        assert fields(run, "params")["dataset.num_samples"] == "64"
        assert (tags["baseline"], tags["lr-study"]) == ("true", "true")
        assert tags["mlflow.note.content"] == "why I ran it"
        assert tags["ddp_runner.sweep"] == folder.parent.name
        local = scalars(folder)
        for metric in {metric for _, metric in local}:
            points = {(step, metric): value for step, value in server.history(run, metric)}
            expected = {key: value for key, value in local.items() if key[1] == metric}
            assert points == pytest.approx(expected, rel=1e-12)
        files = server.files(run)
        assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
        assert files["run.json"] == (folder / "run.json").read_bytes()
        assert files["config.yaml"] == (folder / ".hydra" / "config.yaml").read_bytes()


@pytest.mark.parametrize(
    "kind", ["nobody answers", pytest.param("nobody listens", marks=pytest.mark.slow)]
)
def test_a_server_that_is_not_there_costs_a_warning(kind: str, tmp_path: Path) -> None:
    """The run completes; the end waits for the time that the YAML gives, and no longer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody reads
        port = silent.getsockname()[1] if kind == "nobody answers" else free_port()
        result = run_command(
            *TOY,
            "train.epochs=2",
            "world_size=2",
            f"trackers.mlflow.tracking_uri=http://127.0.0.1:{port}",
            "trackers.mlflow.timeout_s=1",
            folder=tmp_path,
        )
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("warning") == 1
    (warning,) = [line for line in result.stdout.splitlines() if "warning" in line]
    assert warning.startswith("warning: trackers.mlflow failed (MlflowException: API request to ")
    assert warning.endswith("the run continues, and the tracker retries until it has everything")
    assert [line["step"] for line in metrics(result.run_dir) if "train/loss" in line] == [
        4,
        8,
        12,
        16,
    ]


@pytest.mark.slow
def test_a_server_dies_and_comes_back(server: MlflowServer, tmp_path: Path) -> None:
    """The run completes with one warning, and loses nothing; a resume sends what is missing.

    It is stopped, resumed with more steps while nobody listens, and resumed once more: one run of
    MLflow, each point once. It is the last test with this server.
    """
    uri = f"trackers.mlflow.tracking_uri={server.url}"
    keys = ("trackers.mlflow.experiment_name=dies", uri)
    with background(*TOY, *LONG, *keys, folder=tmp_path) as process:

        def is_shown() -> bool:
            runs = server.runs("dies") if (tmp_path / "run/trackers/mlflow.json").exists() else []
            return bool(runs) and "train/loss" in fields(runs[0], "metrics")

        wait_for(is_shown, every_s=0.5)
        server.kill()
        wait_for(lambda: "warning: trackers.mlflow failed" in (tmp_path / "stdout").read_text())
        seen = len(metrics(tmp_path / "run"))
        wait_for(lambda: len(metrics(tmp_path / "run")) > seen + 10)
        process.terminate()
        stopped = wait_for_end(process, tmp_path)
    assert stopped.exit_code == 128 + 15, stopped.stderr
    assert stopped.stdout.count("warning: trackers.mlflow failed") == 1
    assert f"resume={tmp_path / 'run'} " in stopped.stdout
    assert f" {uri}\n" in stopped.stdout  # the command to go on has the tracker's keys
    again = ("resume=run", *(one for one in TOY if one.startswith("trackers")), *keys)
    last = record(tmp_path / "run")["step"] + 8
    end = run_command(*again, f"train.max_steps={last}", folder=tmp_path)
    assert (end.exit_code, end.stderr) == (0, "")
    assert end.stdout.count("warning: trackers.mlflow failed") == 1
    run_dir = tmp_path / "run"
    local = scalars(run_dir)
    assert tensorboard_scalars(run_dir) == pytest.approx(local, rel=1e-6)
    with server.running():
        end = run_command(*again, "tags=[again]", folder=tmp_path)
        assert (end.exit_code, end.stderr) == (0, "")
        (run,) = server.runs("dies")
        assert server.history(run, "train/loss") == [
            (step, pytest.approx(value))
            for (step, name), value in local.items()
            if name == "train/loss"
        ]
        assert run["info"]["status"] == "FINISHED"
        assert fields(run, "tags")["again"] == "true"
        assert f"train.max_steps={last}" in fields(run, "tags")["ddp_runner.changed"]
        assert "model.safetensors" in server.files(run)
