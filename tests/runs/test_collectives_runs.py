"""Real runs of ``task=collectives``: what they leave, a wrong result, Ctrl-C."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import CommandResult, background, run_command, wait_for, wait_for_end
from configs import write_experiment
from run_folders import last_step, metrics, rank_log, record, scalars, tensorboard_scalars
from torch import Tensor

from ddp_runner.collectives import operations
from ddp_runner.collectives.operations import OPERATIONS
from ddp_runner.config.sections import OPS

pytestmark = pytest.mark.full

TINY = (
    "task=collectives",
    "collectives.min_bytes=1001",
    "collectives.max_bytes=5005",
    "collectives.size_factor=5",
    "collectives.warmup_steps=1",
    "collectives.steps=3",
)


def lose_a_broadcast() -> None:
    """Let rank 1 receive no broadcast."""
    right = operations.OPERATIONS["broadcast"]

    def bind(source: Tensor, target: Tensor, op: Any) -> Any:
        is_lost = os.environ["RANK"] == "1"
        return right.bind(source.clone() if is_lost else source, target, op)

    operations.OPERATIONS["broadcast"] = replace(right, bind=bind)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    """Return two world sizes, each with all operations, also those that gloo does not support."""
    folder = tmp_path_factory.mktemp("sweep")
    write_experiment(folder / "conf", "all", *TINY, "collectives.dtypes=[float32,int32]")
    unsupported = ("collectives.dtypes=[int32]", "collectives.reduce_ops=[sum,mean]")
    write_experiment(folder / "conf", "unsupported", *TINY, *unsupported)
    return run_command(
        "-m",
        "--config-dir",
        "conf",
        "experiment=all,unsupported",
        "world_size=2,3",
        "hydra.sweep.dir=sweep",
        folder=folder,
    )


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a row of run.json."""
    name = "_".join(filter(None, (row["op"], row["dtype"], row["reduce_op"])))
    values = {f"latency_us_{key}": value for key, value in row["latency_us"].items()}
    if row["op"] != "barrier":
        values |= {key: row[key] for key in ("algbw_gb_per_s", "busbw_gb_per_s")}
    return {f"collectives/{name}/{key}": value for key, value in values.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_files_of_a_run_have_the_same_numbers(sweep: CommandResult, world_size: int) -> None:
    """run.json, metrics.jsonl and the event file agree; bandwidths follow from latencies."""
    run_dir = sweep.folder / "sweep" / f"experiment=all,world_size={world_size}"
    fields = record(run_dir)
    assert (fields["status"], fields["error"], fields["task"]) == ("completed", None, "collectives")
    assert (fields["world_size"], fields["backend"]) == (world_size, "gloo")
    assert 0 < fields["startup_s"] < fields["wall_s"]
    rows = fields["collectives"]
    assert {row["op"] for row in rows} == set(OPS)
    assert {row["dtype"] for row in rows} == {"float32", "int32", None}
    for row in rows:
        latency = row["latency_us"]
        assert 0 < latency["min"] <= latency["median"] <= latency["p95"] <= latency["max"]
        if row["op"] == "barrier":
            assert (row["bytes"], row["algbw_gb_per_s"], row["busbw_gb_per_s"]) == (0, None, None)
            continue
        assert row["bytes"] % (4 * world_size if OPERATIONS[row["op"]].is_split else 4) == 0
        assert row["algbw_gb_per_s"] == pytest.approx(row["bytes"] / latency["median"] / 1000)
        factor = OPERATIONS[row["op"]].bus_factor(world_size)
        assert row["busbw_gb_per_s"] == pytest.approx(row["algbw_gb_per_s"] * factor)

    measured = {
        (row["bytes"], key): value for row in rows for key, value in numbers_of(row).items()
    }
    assert scalars(run_dir) == measured
    assert fields["metrics"] == {
        key: value for row in rows for key, value in numbers_of(row).items()
    }
    assert tensorboard_scalars(run_dir) == pytest.approx(measured, rel=1e-6)
    assert [path.name for path in sorted((run_dir / "logs").iterdir())] == [
        f"rank-{rank}.log" for rank in range(world_size)
    ]


@pytest.mark.parametrize("experiment", ["all", "unsupported"])
def test_unsupported_operations_are_listed(sweep: CommandResult, experiment: str) -> None:
    """In the log and in run.json, also if the config names them; the others are measured."""
    assert sweep.exit_code == 0
    for world_size in (2, 3):
        run_dir = sweep.folder / "sweep" / f"experiment={experiment},world_size={world_size}"
        missing = {
            (row["op"], row["dtype"], row["reduce_op"]): row["reason"]
            for row in record(run_dir)["not_in_backend"]
        }
        ops = ("reduce", "all_reduce", "reduce_scatter")
        assert set(missing) == {(op, "int32", "mean") for op in ops}
        text = rank_log(run_dir)
        assert text.count(" unsupported by gloo: ") == 3
        assert all(reason in text for reason in missing.values())


def test_the_table_of_a_sweep_shows_a_bandwidth(sweep: CommandResult) -> None:
    """It is the bandwidth of the largest all-reduce."""
    name = "collectives/all_reduce_float32_sum/busbw_gb_per_s"
    for world_size in (2, 3):
        job = f"experiment=all,world_size={world_size}"
        (line,) = [line for line in sweep.stdout.splitlines() if line.startswith(f"{job} ")]
        value = record(sweep.folder / "sweep" / job)["metrics"][name]
        assert line.endswith(f"{name} {value:.4f}")


def test_a_wrong_result_fails_the_run(tmp_path: Path) -> None:
    """With a broadcast that rank 1 does not receive."""
    keys = (*TINY, "world_size=2", "collectives.ops=[all_gather,broadcast]")
    end = run_command(*keys, folder=tmp_path, prepare=lose_a_broadcast)
    assert end.exit_code != 0
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]["kind"]) == ("failed", "crash")
    sentence = fields["error"]["sentence"]
    assert "broadcast_float32 of 1004 bytes gave a wrong result: rank 1 holds " in sentence
    steps = {line["step"] for line in metrics(end.run_dir)}
    assert steps == {1008, 5008}  # all_gather came first, and was correct


def test_ctrl_c_ends_a_run_between_two_calls(tmp_path: Path) -> None:
    """Every rank ends, the status is preempted, and the measurements are kept."""
    with background(*TINY, "world_size=2", "collectives.steps=2000", folder=tmp_path) as process:
        wait_for(lambda: last_step(tmp_path) > 0)
        os.kill(process.pid, signal.SIGINT)
        end = wait_for_end(process, tmp_path)
    assert end.exit_code == 130
    fields = record(end.run_dir)
    assert fields["status"] == "preempted"
    assert 0 < len(fields["collectives"]) == len(metrics(end.run_dir))
