"""Each mode on the simulated GPU: the CPU's numbers, no NaN, no more waits than are written here.

A task of a stream begins 300 us late, so what does not wait for it reads NaN or old numbers.
"""

import json
from pathlib import Path

import pytest
import torch
from simgpu_runs import TRUSTED, Row, close, host_waits, last_numbers, on_cpu, on_device, states

pytestmark = pytest.mark.simgpu
RANKS = {
    "single": [1],
    "ddp": [1, 2, 4],
    "ddp_mp": [1, 2, 4],
    "fsdp": [1, 2, 4],
    "hsdp": [4],
    "tp": [2, 4],
    "fsdp_tp": [4],
    "ps": [2, 4],
}
SHARDED = ("fsdp", "hsdp", "tp", "fsdp_tp")
USUAL = {mode: 2 if 2 in sizes else sizes[-1] for mode, sizes in RANKS.items()}
ROWS = [
    *(Row(mode, size) for mode, sizes in RANKS.items() for size in sizes),
    *(Row(mode, size, "bf16") for mode, size in USUAL.items()),
    *(Row(mode, size, from_workers=True) for mode, size in USUAL.items()),
    # A sharded model's loss cannot be scaled, nor a parameter server's.
    *(Row(mode, USUAL[mode], "fp16") for mode in ("single", "ddp", "ddp_mp")),
    Row("ddp", 2, "bf16", from_workers=True),
    Row("ddp", 2, "fp16", from_workers=True, more=("train.clip_norm=1.0",)),
    Row("fsdp", 2, more=("parallelism.cpu_offload=true",)),
    Row("ddp", 2, more=("ema.decay=0.9", "train.grad_accum_steps=2")),
]
# Of each mode one; those without a mark run by default.
FIRST = (Row("ddp", 2), Row("tp", 2))
# Relative: the other precisions round where the CPU's autocast does not.
TOLERANCES = {"fp32": 3e-7, "bf16": 5e-3, "fp16": 5e-3}
# What a checkpoint may wait for on rank 0: whether the parameters are finite, and the copies, of
# each device. A scaled loss adds its scale. Where a state is split, each of its tensors is put
# together and copied before the next one is.
OF_A_CHECKPOINT = {"ddp_mp": 4}


def marked(rows: list[Row]) -> list[object]:
    """Return the rows as parameters, all but the first ones for the full tier."""
    return [row if row in FIRST else pytest.param(row, marks=pytest.mark.full) for row in rows]


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_a_run_computes_what_it_does_on_the_cpu(row: Row, tmp_path: Path) -> None:
    """Trained, evaluated, saved and resumed; and the host waits no more often than it must."""
    keys = (*row.keys, f"train.precision={row.precision}")
    run = on_device(*keys, folder=tmp_path / "device", waits=tmp_path / "waits")
    on_device(f"resume={run}", "train.max_steps=6", TRUSTED, folder=tmp_path / "device")
    if row.precision == "fp16":  # which a CPU has not
        keys = row.keys
    cpu = on_cpu(*keys, "train.max_steps=6", folder=tmp_path / "cpu")

    close(last_numbers(run), last_numbers(cpu), rel=TOLERANCES[row.precision])
    saved, expected = states(run), states(cpu)
    assert list(saved) == list(expected) == [2, 4, 6]
    for step, tensors in saved.items():
        for name, tensor in tensors.items():
            assert tensor.isfinite().all(), f"{name} at step {step}"
            if row.precision == "fp32":
                torch.testing.assert_close(tensor, expected[step][name], rtol=1e-5, atol=1e-6)

    if row.mode != "ps":  # which sends each gradient from the CPU
        waits = host_waits(tmp_path / "waits", rank=0)
        assert waits.evaluation == {}
        assert sum(waits.step.values()) == (row.precision == "fp16"), waits.step
        if row.mode not in SHARDED:
            most = OF_A_CHECKPOINT.get(row.mode, 2) + 6 * (row.precision == "fp16")
            assert sum(waits.checkpoint.values()) <= most, waits.checkpoint


@pytest.mark.full
@pytest.mark.parametrize("mode", RANKS)
def test_a_trained_model_is_used_as_on_the_cpu(mode: str, tmp_path: Path) -> None:
    """By task=evaluate, to the last digit of the run's own evaluation, and by task=predict."""
    row = Row(mode, USUAL[mode])
    run = on_device(*row.keys, folder=tmp_path)
    trained = last_numbers(run)
    on_device("task=evaluate", f"resume={run}", TRUSTED, folder=tmp_path)
    (results,) = run.rglob("*evaluat*.json")
    found = json.loads(results.read_text())
    print(found)
    assert {key: found["metrics"][key] for key in trained if key.startswith("eval/")} == {
        key: value for key, value in trained.items() if key.startswith("eval/")
    }
