"""Real commands, and what each must leave behind."""

import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import (
    CONFIG_DIR,
    TORCHRUN,
    Ended,
    assert_same_state,
    background,
    ended,
    last_step,
    metrics,
    numbers,
    record,
    run_command,
    steps,
    wait_for,
    write_experiment,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from texts import write_reviews

from ddp_runner.tracking.outputs import claim
from ddp_runner.tracking.run_dir import RunDir

FIELDS = (
    "status",
    "config_hash",
    "git_revision",
    "versions",
    "world_size",
    "parallelism",
    "backend",
    "num_threads",
    "started_at",
    "finished_at",
    "wall_s",
    "startup_s",
    "epoch",
    "step",
    "metrics",
    "error",
)
ODD_NAME = "a b=1,c='d' {é}"  # what a shell, Hydra and a URL each read in their own way
TOY = ("model=toy", "train.max_steps=6", "train.log_every_steps=2", "train.num_threads=1")
STOPPABLE = (
    "model=mnist_net",
    "dataset=fake_images",
    "dataset.num_samples=64",
    "batch.global_size=8",
    "train.epochs=20",
    "train.log_every_steps=1",
    "train.num_threads=1",
)
# arguments, what is special about them, number of ranks
TABLE = {
    "single": (("parallelism=single", *TOY), "one process", 1),
    "dp": (("parallelism=dp", *TOY), "DataParallel without GPUs", 1),
    "ddp": (("parallelism=ddp", *TOY), "replicas", 2),
    "ddp_mp": (("model=toy_mp", "parallelism=ddp_mp", *TOY[1:]), "replicas of two stages", 2),
    "toy_slow": (("model=toy_slow", "model.delay_s=0.2", *TOY[1:]), "a rank that is late", 2),
    "ps": (("parallelism=ps", "parallelism.mode=async", *TOY), "a server and a trainer", 2),
    "toy_mp": (("model=toy_mp", "parallelism=ddp_mp", "world_size=1", *TOY[1:]), "one replica", 1),
    "convnet": (("model=convnet", "train.max_steps=2"), "BatchNorm under DDP", 2),
    "convnet_mp": (
        ("model=convnet_mp", "parallelism=ddp_mp", "train.max_steps=2"),
        "BatchNorm in two stages",
        2,
    ),
    "mnist_net": (("model=mnist_net", "train.max_steps=2"), "dropout", 2),
    "mnist_net_mp": (
        ("model=mnist_net_mp", "parallelism=ddp_mp", "train.max_steps=2"),
        "dropout in two stages",
        2,
    ),
    "resnet18": (
        ("model=resnet18", "dataset.augmentation.crop_padding=2", "train.max_steps=2"),
        "torchvision, augmented",
        2,
    ),
    "mobilenet_v3_small": (
        ("model=mobilenet_v3_small", "dataset=fake_images", "train.max_steps=2"),
        "an object among the model's keys",
        2,
    ),
    "bert": (
        ("model=bert", "dataset.path=FOLDER/texts.csv", "model.ngrams=3", "train.max_steps=2"),
        "texts of many lengths",
        2,
    ),
    "accumulation": (("train.grad_accum_steps=3", *TOY), "skipped syncs", 2),
    "bf16": (("train.precision=bf16", *TOY), "autocast", 2),
    "deterministic": (("train.deterministic=true", *TOY), "deterministic operations", 2),
    "cosine": (("scheduler=cosine", *TOY), "a schedule", 2),
    "step": (("scheduler=step", *TOY), "a schedule by epochs", 2),
    "plateau": (("scheduler=plateau", *TOY), "a schedule by a metric", 2),
    "sgd": (("optimizer=sgd", *TOY), "plain SGD", 2),
    "momentum": (("optimizer=momentum", *TOY), "SGD with momentum", 2),
    "adam": (("optimizer=adam", *TOY), "Adam", 2),
    "adamw": (("optimizer=adamw", *TOY), "AdamW", 2),
    "strong": (("batch.global_size=40", "world_size=4", *TOY), "a fixed global batch", 4),
    "tcp": (("launch.init_method=tcp://127.0.0.1:PORT", *TOY), "a rendezvous by port", 2),
    "file": (("launch.init_method=file://FOLDER/store", *TOY), "a rendezvous by file", 2),
    "undisturbed": (STOPPABLE, "what the resumed run below must equal", 2),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The whole table as one sweep: every row is a config file, since no grid holds them all."""
    folder = tmp_path_factory.mktemp("table")
    write_reviews(folder / "texts.csv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, (overrides, _, _) in TABLE.items():
        filled = [one.replace("PORT", port).replace("FOLDER", str(folder)) for one in overrides]
        write_experiment(folder / "conf", name, *filled)
    return run_command(
        "-m",
        "--config-dir",
        "conf",
        f"experiment={','.join(TABLE)}",
        "hydra.sweep.dir=sweep",
        folder=folder,
    )


def check_run(run_dir: Path, *, world_size: int) -> dict[str, Any]:
    """Hold a completed run's folder to what every run leaves; return its run.json."""
    fields = record(run_dir)
    assert set(FIELDS) <= set(fields)
    assert (fields["status"], fields["error"]) == ("completed", None)
    assert fields["world_size"] == world_size
    assert 0 < fields["startup_s"] < fields["wall_s"]
    assert fields["started_at"] < fields["finished_at"]
    assert (run_dir / "checkpoints" / f"step-{fields['step']:08d}" / "manifest.json").exists()

    lines = metrics(run_dir)
    scalars = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    (_,) = run_dir.glob("events.out.tfevents.*")
    told = {(line["step"], key): line[key] for line in lines for key in line if "/" in key}
    shown = {
        (event.step, key): event.value
        for key in scalars.Tags()["scalars"]
        for event in scalars.Scalars(key)
    }
    assert told
    assert shown == pytest.approx(told, rel=1e-6)
    assert fields["metrics"] == {
        key: value for line in lines for key, value in line.items() if "/" in key
    }

    frozen = (run_dir / ".hydra" / "config.yaml").read_text()
    assert yaml.safe_load(frozen)["world_size"] == world_size  # not auto: resolved
    assert "${" not in frozen
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    assert logs == {f"rank-{rank}.log" for rank in range(world_size)}
    for rank in range(world_size):
        text = (run_dir / "logs" / f"rank-{rank}.log").read_text()
        assert all(f" rank {rank} " in line for line in text.splitlines())
    start = (run_dir / "logs" / "rank-0.log").read_text()
    ranks = f"{world_size} rank{'' if world_size == 1 else 's'} on 1 node"
    for fact in (f", {fields['backend']}, {ranks} (", "local rank ", "torch 2."):
        assert fact in start
    return fields


@pytest.mark.parametrize("name", TABLE)
def test_each_row_leaves_a_whole_run(table: Ended, name: str) -> None:
    """Exit code 0, and each row's folder holds one run with the numbers told twice."""
    overrides, _, world_size = TABLE[name]
    assert (table.exit_code, table.stderr) == (0, "")
    fields = check_run(table.folder / "sweep" / f"experiment={name}", world_size=world_size)
    chosen = dict(one.split("=", 1) for one in overrides)
    assert fields["parallelism"] == chosen.get("parallelism", "ddp")
    assert fields["step"] == int(chosen.get("train.max_steps", fields["step"]))
    cores = len(os.sched_getaffinity(0))
    wanted = chosen.get("train.num_threads", max(1, cores // world_size))
    assert fields["num_threads"] == int(wanted)


def test_every_mode_model_optimizer_and_schedule_has_a_row() -> None:
    """A new option is run for real as soon as its YAML is there."""
    chosen = {one for overrides, _, _ in TABLE.values() for one in overrides}
    for group in ("parallelism", "model", "optimizer", "scheduler"):
        options = {f"{group}={path.stem}" for path in (CONFIG_DIR / group).glob("*.yaml")}
        assert options - chosen <= {"scheduler=constant"}


def test_the_default_run_learns_the_digits_in_a_folder_of_any_name(tmp_path: Path) -> None:
    """No argument chooses a model: 0.95 and more of the digits; odd paths and secrets are safe."""
    run_dir, data = tmp_path / ODD_NAME, tmp_path / f"data {ODD_NAME}"
    data.mkdir()
    quoted = str(run_dir).replace("'", "\\'")
    end = run_command(
        f"hydra.run.dir='{quoted}'",
        "launch.rdzv_id=${oc.env:MY_SECRET}",
        folder=tmp_path,
        environ={"DDP_RUNNER_DATA_ROOT": str(data), "MY_SECRET": "hush-hush"},
    )
    assert (end.exit_code, end.stderr) == (0, "")
    assert end.run_dirs == [run_dir]
    frozen = (run_dir / ".hydra" / "config.yaml").read_text()
    assert yaml.safe_load(frozen)["data_root"] == str(data)
    assert yaml.safe_load(frozen)["launch"]["rdzv_id"] == "${oc.env:MY_SECRET}"
    kept = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"hush-hush" in path.read_bytes()]
    (run_dir / ".hydra" / "config.yaml").write_text(frozen.replace("${oc.env:MY_SECRET}", "x"))
    assert check_run(run_dir, world_size=2)["metrics"]["eval/accuracy"] >= 0.95

    again = run_command(f"hydra.run.dir='{quoted}'", folder=tmp_path)
    assert again.exit_code == 2
    argument = RunDir(run_dir).resume_argument
    assert again.stderr.splitlines()[-1].endswith(f"another folder, or {argument}")
    assert record(run_dir)["status"] == "completed"


def test_torchrun_starts_one_run(tmp_path: Path) -> None:
    """Ranks that torchrun starts share one folder, which rank 0 chose."""
    end = run_command("-m", "ddp_runner", *TOY, folder=tmp_path, program=TORCHRUN)
    assert end.exit_code == 0
    check_run(end.run_dir, world_size=2)
    assert end.run_dir.parent == tmp_path / "outputs" / "toy-random-ddp-ws2"


def test_ranks_with_different_configs_refuse_each_other(tmp_path: Path) -> None:
    """The key, its values and their ranks are named, and nothing is left."""
    script = tmp_path / "each_its_own.py"
    script.write_text(
        "import os, runpy, sys\n"
        "sys.argv.append('seed=' + os.environ['RANK'])\n"
        "runpy.run_module('ddp_runner', run_name='__main__')\n"
    )
    end = run_command(str(script), *TOY, folder=tmp_path, program=TORCHRUN)
    assert end.exit_code != 0
    assert "seed is 0 on rank 0 and 1 on rank 1; start every rank with the same" in end.stderr
    assert end.run_dirs == []


def test_a_run_that_ctrl_c_stopped_goes_on_where_it_stood(table: Ended, tmp_path: Path) -> None:
    """Stopped in mid-epoch and resumed: every number and the final state equal the undisturbed."""
    undisturbed = table.folder / "sweep" / "experiment=undisturbed"
    with background(*STOPPABLE, folder=tmp_path) as process:
        wait_for(lambda: last_step(tmp_path) >= 11)
        os.kill(process.pid, signal.SIGINT)
        end = ended(process, tmp_path)
    assert (end.exit_code, end.stderr) == (130, "")
    stopped = record(end.run_dir)
    assert stopped["status"] == "preempted"
    assert steps(end.run_dir)[-1] == stopped["step"] < record(undisturbed)["step"]
    assert f"resume={end.run_dir}" in end.stdout

    run_dir = end.run_dir
    resumed = run_command(f"resume={run_dir}", folder=tmp_path)
    assert (resumed.exit_code, resumed.stderr) == (0, "")
    assert resumed.run_dir == run_dir
    assert numbers(run_dir) == numbers(undisturbed)
    assert record(run_dir)["status"] == "completed"
    assert steps(run_dir) == steps(undisturbed)
    assert_same_state(run_dir, undisturbed)


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    """A name that is taken already gets a number; nobody shares a folder."""
    names = [claim(tmp_path / "2026-01-01_00-00-00").name for _ in range(3)]
    assert names == ["2026-01-01_00-00-00", "2026-01-01_00-00-00-2", "2026-01-01_00-00-00-3"]
    shutil.rmtree(tmp_path / names[1])
