"""What real commands leave behind."""

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import (
    TORCHRUN,
    CommandResult,
    background,
    free_port,
    run_command,
    wait_for,
    wait_for_end,
)
from configs import write_experiment
from run_folders import (
    assert_same_state,
    checkpoint_dir,
    checkpoint_steps,
    last_step,
    metrics,
    rank_log,
    record,
    reproducible_metrics,
    scalars,
    tensorboard_scalars,
)
from texts import write_reviews
from tiers import named, runs_full, selected

from ddp_runner.config.schema import CONFIG_DIR
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
ODD_NAME = "a b=1,c='d' {é}"  # special characters of the shell, Hydra and URLs
TOY = ("model=toy", "train.max_steps=6", "train.log_every_steps=2", "train.num_threads=1")
STOPPABLE = (
    "model=mnist_net",
    "dataset=fake_images",
    "dataset.num_samples=64",
    "dataset.eval_samples=16",
    "batch.global_size=8",
    "train.epochs=8",
    "train.log_every_steps=1",
    "train.num_threads=1",
)
STAGES = ("model=gpt", "model.num_layers=2", "train.grad_accum_steps=2", "train.max_steps=2")
# Overrides and number of ranks.
TABLE = {
    "single": (("parallelism=single", *TOY), 1),
    "dp": (("parallelism=dp", *TOY), 1),
    "ddp": (("parallelism=ddp", *TOY), 2),
    "ddp_mp": (("model=toy_mp", "parallelism=ddp_mp", *TOY[1:]), 2),
    "toy_slow": (("model=toy_slow", "model.delay_s=0.2", *TOY[1:]), 2),
    "fsdp": (("parallelism=fsdp", *TOY), 2),
    "hsdp": (("parallelism=hsdp", *TOY), 4),
    "tp": (("parallelism=tp", *TOY), 2),
    "fsdp_tp": (("parallelism=fsdp_tp", *TOY), 4),
    "gpt": (("model=gpt", "model.num_layers=1", "train.max_steps=2"), 2),
    "pp": (("parallelism=pp", *STAGES), 2),
    "ddp_pp": (("parallelism=ddp_pp", *STAGES), 4),
    "ps": (("parallelism=ps", "parallelism.mode=async", *TOY), 2),
    "toy_mp": (("model=toy_mp", "parallelism=ddp_mp", "world_size=1", *TOY[1:]), 1),
    "convnet": (("model=convnet", "train.max_steps=2"), 2),
    "convnet_mp": (("model=convnet_mp", "parallelism=ddp_mp", "train.max_steps=2"), 2),
    "mnist_net": (("model=mnist_net", "train.max_steps=2"), 2),
    "mnist_net_mp": (("model=mnist_net_mp", "parallelism=ddp_mp", "train.max_steps=2"), 2),
    "resnet18": (("model=resnet18", "dataset.augmentation.crop_padding=2", "train.max_steps=2"), 2),
    "mobilenet_v3_small": (
        ("model=mobilenet_v3_small", "dataset=fake_images", "train.max_steps=2"),
        2,
    ),
    "bert": (
        ("model=bert", "dataset.path=FOLDER/texts.csv", "model.ngrams=3", "train.max_steps=2"),
        2,
    ),
    "accumulation": (("train.grad_accum_steps=3", *TOY), 2),
    "bf16": (("train.precision=bf16", *TOY), 2),
    "deterministic": (("train.deterministic=true", *TOY), 2),
    "cosine": (("scheduler=cosine", *TOY), 2),
    "step": (("scheduler=step", *TOY), 2),
    "plateau": (("scheduler=plateau", *TOY), 2),
    "sgd": (("optimizer=sgd", *TOY), 2),
    "momentum": (("optimizer=momentum", *TOY), 2),
    "adam": (("optimizer=adam", *TOY), 2),
    "adamw": (("optimizer=adamw", *TOY), 2),
    "adadelta": (("optimizer=adadelta", *TOY), 2),
    "onecyclelr": (("scheduler=onecyclelr", "optimizer=momentum", *TOY), 2),
    "strong": (("batch.global_size=40", "world_size=4", *TOY), 4),
    "tcp": (("launch.init_method=tcp://127.0.0.1:PORT", *TOY), 2),
    "file": (("launch.init_method=file://FOLDER/store", *TOY), 2),
    "uninterrupted": (STOPPABLE, 2),  # the resumed run below must equal it
}
# By default; the other rows are `full`. Those are `slow` that other tests train as well:
# test_text_runs.py, test_experiments.py, those of parity and of resuming, of optimizers and rates.
SLOW = (
    *("bert", "dp", "resnet18", "mnist_net", "mnist_net_mp", "accumulation"),
    *("sgd", "momentum", "adam", "adamw", "adadelta", "cosine", "step", "plateau", "onecyclelr"),
)
QUICK = ("single", "ddp", "ps", "gpt")
NAPPING = '''
import os, time
from ddp_runner.models.toy import ToyModel

class Toy(ToyModel):
    """The toy model, whose forward takes 200 ms longer on rank 1."""

    def forward(self, inputs):
        time.sleep(0.2 * (self.training and os.environ["RANK"] == "1"))
        return super().forward(inputs)
'''


@pytest.fixture(scope="module")
def table(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CommandResult:
    """Return the rows as one sweep over experiments, because no grid has just these."""
    folder = tmp_path_factory.mktemp("table")
    write_reviews(folder / "texts.csv")
    port = str(free_port())
    rows = selected(request, "name")
    if runs_full(request) and "uninterrupted" not in rows:
        rows.append("uninterrupted")
    for name in rows:
        overrides, _ = TABLE[name]
        filled = [key.replace("PORT", port).replace("FOLDER", str(folder)) for key in overrides]
        write_experiment(folder / "conf", name, *filled)
    return run_command(
        "-m",
        "--config-dir",
        "conf",
        f"experiment={','.join(rows)}",
        "hydra.sweep.dir=sweep",
        folder=folder,
    )


def check_run(run_dir: Path, *, world_size: int) -> dict[str, Any]:
    """Check what every completed run must leave in its folder; return its run.json."""
    fields = record(run_dir)
    assert set(FIELDS) <= set(fields)
    assert (fields["status"], fields["error"]) == ("completed", None)
    assert fields["world_size"] == world_size
    assert 0 < fields["startup_s"] < fields["wall_s"]
    assert fields["started_at"] < fields["finished_at"]
    assert (checkpoint_dir(run_dir, fields["step"]) / "manifest.json").exists()

    (_,) = run_dir.glob("events.out.tfevents.*")
    logged = scalars(run_dir)
    assert logged
    assert tensorboard_scalars(run_dir) == pytest.approx(logged, rel=1e-6)
    assert fields["metrics"] == {key: value for (_, key), value in logged.items()}

    frozen = (run_dir / ".hydra" / "config.yaml").read_text()
    assert yaml.safe_load(frozen)["world_size"] == world_size  # not auto: resolved
    assert "${" not in frozen
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    assert logs == {f"rank-{rank}.log" for rank in range(world_size)}
    for rank in range(world_size):
        text = rank_log(run_dir, rank)
        assert all(f" rank {rank} " in line for line in text.splitlines())
    ranks = f"{world_size} rank{'' if world_size == 1 else 's'} on 1 node"
    for fact in (f", {fields['backend']}, {ranks} (", "local rank ", "torch 2."):
        assert fact in rank_log(run_dir)
    return fields


@pytest.mark.parametrize("name", named(TABLE, quick=QUICK, slow=SLOW))
def test_each_row_leaves_a_complete_run(table: CommandResult, name: str) -> None:
    """Exit code 0, and each row's folder has a run whose files agree."""
    overrides, world_size = TABLE[name]
    assert (table.exit_code, table.stderr) == (0, "")
    fields = check_run(table.folder / "sweep" / f"experiment={name}", world_size=world_size)
    chosen = dict(override.split("=", 1) for override in overrides)
    assert fields["parallelism"] == chosen.get("parallelism", "ddp")
    assert fields["step"] == int(chosen.get("train.max_steps", fields["step"]))
    cores = len(os.sched_getaffinity(0))
    num_threads = chosen.get("train.num_threads", max(1, cores // world_size))
    assert fields["num_threads"] == int(num_threads)


def test_every_mode_model_optimizer_and_schedule_has_a_row() -> None:
    """A new option needs a row as soon as its YAML exists.

    But for those that are a class of torch and its arguments: two of them stand for all.
    """
    torchs = {name.lower() for name in [*dir(torch.optim), *dir(torch.optim.lr_scheduler)]}
    chosen = {override for overrides, _ in TABLE.values() for override in overrides}
    for group in ("parallelism", "model", "optimizer", "scheduler"):
        names = {path.stem for path in (CONFIG_DIR / group).glob("*.yaml")}
        options = {f"{group}={name}" for name in names - torchs}
        sizes = {option for option in options if option.startswith("model=gpt_")}  # of one model
        assert options - chosen - sizes <= {"scheduler=constant"}


@pytest.mark.full
def test_the_default_run_learns_the_digits_in_a_folder_of_any_name(tmp_path: Path) -> None:
    """It reaches accuracy 0.95 without an argument; odd paths work and secrets are not written."""
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
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hush-hush" in path.read_bytes()]
    (run_dir / ".hydra" / "config.yaml").write_text(frozen.replace("${oc.env:MY_SECRET}", "x"))
    fields = check_run(run_dir, world_size=2)
    assert fields["metrics"]["eval/accuracy"] >= 0.95
    assert len(fields["skew_ms_by_rank"]) == 2

    again = run_command(f"hydra.run.dir='{quoted}'", folder=tmp_path)
    assert again.exit_code == 2
    argument = RunDir(run_dir).resume_argument
    assert again.stderr.splitlines()[-1].endswith(f"another folder, or {argument}")
    assert record(run_dir)["status"] == "completed"


@pytest.mark.full
def test_a_slow_rank_is_named_at_the_end(tmp_path: Path) -> None:
    """In the summary, in run.json and in each line of metrics."""
    (tmp_path / "napping.py").write_text(NAPPING)
    end = run_command(
        *(*TOY, "train.max_steps=8", "model._target_=napping.Toy", "allowed_targets=[napping]"),
        *("world_size=3", "batch.global_size=12", "train.log_every_steps=2", "hydra.run.dir=run"),
        folder=tmp_path,
        environ={"PYTHONPATH": str(tmp_path)},
    )
    assert end.exit_code == 0
    assert re.search(
        r"^rank 1 kept the others waiting \d+ ms of a step of \d+ ms$", end.stdout, re.M
    )
    fields = record(tmp_path / "run")
    assert max(fields["skew_ms_by_rank"]) == fields["skew_ms_by_rank"][1] > 100
    assert fields["skew_step_ms"] > 200
    assert any(line.get("perf/skew_rank") == 1 for line in metrics(tmp_path / "run"))


@pytest.mark.full
def test_torchrun_starts_one_run(tmp_path: Path) -> None:
    """Ranks that torchrun starts share one folder, which rank 0 chose."""
    end = run_command("-m", "ddp_runner", *TOY, folder=tmp_path, program=TORCHRUN)
    assert end.exit_code == 0
    check_run(end.run_dir, world_size=2)
    assert end.run_dir.parent == tmp_path / "outputs" / "toy-random-ddp-ws2"


@pytest.mark.full
def test_a_run_stopped_by_ctrl_c_continues_where_it_stopped(
    table: CommandResult, tmp_path: Path
) -> None:
    """Stopped in mid-epoch and resumed, it equals the uninterrupted run bit for bit."""
    uninterrupted = table.folder / "sweep" / "experiment=uninterrupted"
    with background(*STOPPABLE, folder=tmp_path) as process:
        wait_for(lambda: last_step(tmp_path) >= 11)
        os.kill(process.pid, signal.SIGINT)
        end = wait_for_end(process, tmp_path)
    assert (end.exit_code, end.stderr) == (130, "")
    stopped = record(end.run_dir)
    assert stopped["status"] == "preempted"
    assert checkpoint_steps(end.run_dir)[-1] == stopped["step"] < record(uninterrupted)["step"]
    assert f"resume={end.run_dir}" in end.stdout

    run_dir = end.run_dir
    resumed = run_command(f"resume={run_dir}", folder=tmp_path)
    assert (resumed.exit_code, resumed.stderr) == (0, "")
    assert resumed.run_dir == run_dir
    assert reproducible_metrics(run_dir) == reproducible_metrics(uninterrupted)
    assert record(run_dir)["status"] == "completed"
    assert checkpoint_steps(run_dir) == checkpoint_steps(uninterrupted)
    assert_same_state(run_dir, uninterrupted)


def test_runs_that_start_in_the_same_second_get_separate_folders(tmp_path: Path) -> None:
    """A name that is taken gets a number."""
    names = [claim(tmp_path / "2026-01-01_00-00-00").name for _ in range(3)]
    assert names == ["2026-01-01_00-00-00", "2026-01-01_00-00-00-2", "2026-01-01_00-00-00-3"]
    shutil.rmtree(tmp_path / names[1])
