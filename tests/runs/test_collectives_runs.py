"""Real commands of ``task=collectives``: what they leave, a wrong result, Ctrl-C."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import (
    Ended,
    background,
    ended,
    last_step,
    metrics,
    record,
    run_command,
    wait_for,
    write_experiment,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_runner.collectives.operations import OPERATIONS
from ddp_runner.config.schema import OPS

TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2")
TINY = (
    "task=collectives",
    "collectives.min_bytes=1001",
    "collectives.max_bytes=5005",
    "collectives.size_factor=5",
    "collectives.warmup_steps=1",
    "collectives.steps=3",
)
# The runner, but rank 1 gets nothing of a broadcast.
LOSING_A_BROADCAST = """
import os, runpy
from dataclasses import replace
from ddp_runner.collectives import operations as collective_ops
if os.environ["RANK"] == "1":
    right = collective_ops.OPERATIONS["broadcast"]
    bind = lambda source, target, op: right.bind(source.clone(), target, op)
    collective_ops.OPERATIONS["broadcast"] = replace(right, bind=bind)
runpy.run_module("ddp_runner", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two world sizes; whatever there is, and what gloo does not have."""
    folder = tmp_path_factory.mktemp("sweep")
    write_experiment(folder / "conf", "all", *TINY, "collectives.dtypes=[float32,int32]")
    refused = ("collectives.dtypes=[int32]", "collectives.reduce_ops=[sum,mean]")
    write_experiment(folder / "conf", "refused", *TINY, *refused)
    return run_command(
        "-m",
        "--config-dir",
        "conf",
        "experiment=all,refused",
        "world_size=2,3",
        "hydra.sweep.dir=sweep",
        folder=folder,
    )


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """Return what metrics.jsonl shall tell of a row of run.json."""
    name = "_".join(filter(None, (row["op"], row["dtype"], row["reduce_op"])))
    found = {f"collectives/{name}/latency_us_{key}": row["latency_us"][key] for key in
             ("median", "p95", "min", "max")}  # fmt: skip
    if row["op"] != "barrier":
        for key in ("algbw_gb_per_s", "busbw_gb_per_s"):
            found[f"collectives/{name}/{key}"] = row[key]
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_run_tells_the_same_numbers_everywhere(sweep: Ended, world_size: int) -> None:
    """run.json, metrics.jsonl and the event file agree; the figures follow from each other."""
    run_dir = sweep.folder / "sweep" / f"experiment=all,world_size={world_size}"
    fields = record(run_dir)
    assert (fields["status"], fields["error"], fields["task"]) == ("completed", None, "collectives")
    assert (fields["world_size"], fields["backend"]) == (world_size, "gloo")
    assert 0 < fields["startup_s"] < fields["wall_s"]
    rows = fields["collectives"]
    assert {row["op"] for row in rows} == set(OPS)
    assert {row["dtype"] for row in rows} == {"float32", "int32", None}
    for row in rows:
        assert row["verified"] is True
        latency = row["latency_us"]
        assert 0 < latency["min"] <= latency["median"] <= latency["p95"] <= latency["max"]
        if row["op"] == "barrier":
            assert (row["bytes"], row["algbw_gb_per_s"], row["busbw_gb_per_s"]) == (0, None, None)
            continue
        assert row["bytes"] % (4 * world_size if OPERATIONS[row["op"]].is_split else 4) == 0
        assert row["algbw_gb_per_s"] == pytest.approx(row["bytes"] / latency["median"] / 1000)
        factor = OPERATIONS[row["op"]].bus_factor(world_size)
        assert row["busbw_gb_per_s"] == pytest.approx(row["algbw_gb_per_s"] * factor)

    told = {(row["bytes"], key): value for row in rows for key, value in numbers_of(row).items()}
    lines = metrics(run_dir)
    assert {(line["step"], key): line[key] for line in lines for key in line if "/" in key} == told
    assert fields["metrics"] == {
        key: value for row in rows for key, value in numbers_of(row).items()
    }
    scalars = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    shown = {
        (event.step, key): event.value
        for key in scalars.Tags()["scalars"]
        for event in scalars.Scalars(key)
    }
    assert shown == pytest.approx(told, rel=1e-6)
    assert [path.name for path in sorted((run_dir / "logs").iterdir())] == [
        f"rank-{rank}.log" for rank in range(world_size)
    ]


def test_what_a_backend_lacks_is_listed(sweep: Ended) -> None:
    """By default in the table and in run.json; asked for by name it ends the job, in one line."""
    assert sweep.exit_code == 2
    for world_size in (2, 3):
        run_dir = sweep.folder / "sweep" / f"experiment=all,world_size={world_size}"
        missing = {(one["op"], one["dtype"], one["reduce_op"]): one["reason"]
                   for one in record(run_dir)["not_in_backend"]}  # fmt: skip
        ops = ("reduce", "all_reduce", "reduce_scatter")
        assert set(missing) == {(op, "int32", "mean") for op in ops}
        text = (run_dir / "logs" / "rank-0.log").read_text()
        assert text.count(" unsupported by gloo: ") == 3
        assert all(reason in text for reason in missing.values())
        other = record(run_dir.with_name(f"experiment=refused,world_size={world_size}"))
        assert (other["status"], other["error"]["kind"]) == ("failed", "user")
        assert other["error"]["sentence"].endswith("write collectives.reduce_ops=[sum]")


def test_the_table_of_a_sweep_shows_a_bandwidth(sweep: Ended) -> None:
    """All-reduce's, of the largest message."""
    name = "collectives/all_reduce_float32_sum/busbw_gb_per_s"
    for world_size in (2, 3):
        job = f"experiment=all,world_size={world_size}"
        (line,) = [one for one in sweep.stdout.splitlines() if one.startswith(f"{job} ")]
        value = record(sweep.folder / "sweep" / job)["metrics"][name]
        assert line.endswith(f"{name} {value:.4f}")


def test_a_wrong_result_fails_the_run(tmp_path: Path) -> None:
    """Under torchrun, with a broadcast that rank 1 does not get: operation, dtype, size, rank."""
    script = tmp_path / "losing.py"
    script.write_text(LOSING_A_BROADCAST)
    end = run_command(
        *TINY,
        "collectives.ops=[all_gather,broadcast]",
        folder=tmp_path,
        program=(*TORCHRUN, str(script)),
    )
    assert end.exit_code != 0
    fields = record(end.run_dir)
    assert (fields["status"], fields["error"]["kind"]) == ("failed", "crash")
    sentence = fields["error"]["sentence"]
    assert "broadcast_float32 of 1004 bytes gave a wrong result: rank 1 holds " in sentence
    steps = {line["step"] for line in metrics(end.run_dir)}
    assert steps == {1008, 5008}  # all_gather came first, and was right


def test_ctrl_c_ends_between_two_calls(tmp_path: Path) -> None:
    """Every rank ends, the status says preempted, and what was measured is kept."""
    with background(*TINY, "world_size=2", "collectives.steps=2000", folder=tmp_path) as process:
        wait_for(lambda: last_step(tmp_path) > 0)
        os.kill(process.pid, signal.SIGINT)
        end = ended(process, tmp_path)
    assert end.exit_code == 130
    fields = record(end.run_dir)
    assert fields["status"] == "preempted"
    assert 0 < len(fields["collectives"]) == len(metrics(end.run_dir))
