"""Each mode on the simulated GPU has the CPU's numbers, no NaN, and only the waits listed below.

A task of a stream begins 300 us late, so what does not wait for it reads NaN or old numbers.
"""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from simgpu_runs import (
    ACCUMULATED,
    IS_SIMULATED,
    TRUSTED,
    Row,
    States,
    host_waits,
    last_numbers,
    need_devices,
    on_cpu,
    on_device,
    predictions,
    states,
)
from tiers import named

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
AVERAGED = "ema.decay=0.9"
VIRTUAL = "batch.virtual_ranks=4"
OFFLOADED = "parallelism.cpu_offload=true"
SHARDED = ("fsdp", "hsdp", "tp", "fsdp_tp", "pp")
USUAL = {mode: 2 if 2 in sizes else sizes[-1] for mode, sizes in RANKS.items()}
MEMORY = [Row(mode, size) for mode, sizes in RANKS.items() for size in sizes]
WORKERS = [Row(mode, size, source="workers") for mode, size in USUAL.items()]
MORE = [
    Row("fsdp", 2, more=(OFFLOADED,)),
    Row("ddp", 2, more=(ACCUMULATED, "train.clip_norm=1.0")),
    Row("ddp", 2, source="loader", more=(AVERAGED,)),
    Row("ddp", 2, source="padded"),
    Row("ddp", 2, more=(VIRTUAL, "train.clip_norm=1.0")),
    Row("fsdp", 2, more=(VIRTUAL, "train.clip_norm=1.0")),
    Row("pp", 2, more=(ACCUMULATED, "train.clip_norm=1.0")),
]
HALF = [
    *(Row(mode, size, "bf16") for mode, size in USUAL.items()),
    # A sharded model's loss cannot be scaled, nor a parameter server's.
    *(Row(mode, USUAL[mode], "fp16") for mode in ("single", "ddp", "ddp_mp")),
    Row("ddp", 2, "bf16", source="workers"),
    Row("ddp", 2, "fp16", source="workers", more=("train.clip_norm=1.0",)),
]
FULL = {
    *(Row("ddp", 2), Row("ddp_mp", 2), Row("fsdp", 2), Row("tp", 2), Row("ps", 2)),
    *(Row("ddp", 2, "fp16"), Row("fsdp", 2, "bf16")),
    *(Row("ddp", 2, source="workers"), Row("ddp", 2, source="padded")),
    Row("ddp", 2, source="loader", more=(AVERAGED,)),
    Row("fsdp", 2, more=(VIRTUAL, "train.clip_norm=1.0")),
}
ROUNDING = 3e-7 if IS_SIMULATED else 1e-3  # relative
SAME = {"rtol": 1e-4, "atol": 1e-5}  # AdamW's first steps divide by small gradients
NEAR = {"bf16": 0.02, "fp16": 0.1}  # of losses; fp16's first step overflows and is left out


def marked(rows: list[Row]) -> list[object]:
    """Return the rows as parameters, with the marks of their tiers."""
    slow = [pytest.mark.full, pytest.mark.slow]
    tiers = {row: slow[:1] if row in FULL else slow for row in rows}
    return [pytest.param(row, id=str(row), marks=tiers[row]) for row in rows]


@cache
def on_the_cpu(row: Row) -> tuple[dict[str, float], States]:
    """Return what a row computes in one go on the CPU, in fp32 and with its shards in memory."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [key for key in row.keys if key != OFFLOADED]
        run = on_cpu(*keys, "train.max_steps=8", folder=Path(folder))
        return last_numbers(run), states(run)


@pytest.mark.parametrize("row", marked([*MEMORY, *WORKERS, *MORE]))
def test_a_run_computes_what_it_does_on_the_cpu(row: Row, tmp_path: Path) -> None:
    """Trained, evaluated, saved and resumed, with every tensor of its checkpoints.

    Streams beside the default one are ahead of it in the first run, and behind it in the second.
    """
    need_devices(row)
    run = on_device(*row.keys, folder=tmp_path, waits=tmp_path / "waits")
    more = (f"resume={run}", "train.max_steps=8", TRUSTED)
    on_device(*more, folder=tmp_path, has_late_streams=True)
    numbers, expected = on_the_cpu(row)
    assert last_numbers(run) == pytest.approx(numbers, rel=ROUNDING, abs=ROUNDING)
    saved = states(run)
    assert list(saved) == list(expected) == [3, 6, 8]
    for step, tensors in saved.items():
        for name, tensor in tensors.items():
            assert tensor.isfinite().all()
            if IS_SIMULATED:  # else the kernels are others
                torch.testing.assert_close(tensor, expected[step][name], **SAME)
    # A server sends each gradient from the CPU, and FSDP2 waits for each that it has offloaded.
    if row.mode != "ps" and OFFLOADED not in row.more:
        wait_as_written(row, tmp_path / "waits", num_steps=6)


@pytest.mark.parametrize("row", marked(HALF))
def test_a_run_in_half_precision_rounds_and_is_right(row: Row, tmp_path: Path) -> None:
    """Its losses are near to those of fp32, and no tensor is NaN."""
    need_devices(row)
    longer = (f"train.precision={row.precision}", "train.max_steps=8", "checkpoint.every_steps=5")
    run = on_device(*row.keys, *longer, folder=tmp_path, waits=tmp_path / "waits")
    numbers, _ = on_the_cpu(replace(row, precision="fp32"))
    losses = {key: value for key, value in numbers.items() if key.endswith("loss")}
    found = last_numbers(run)
    assert {key: found[key] for key in losses} == pytest.approx(losses, rel=NEAR[row.precision])
    for tensors in states(run).values():
        assert all(tensor.isfinite().all() for tensor in tensors.values())
    if row.mode != "ps":
        wait_as_written(row, tmp_path / "waits", num_steps=8)


def wait_as_written(row: Row, path: Path, *, num_steps: int) -> None:
    """Compare how often the host of rank 0 has waited."""
    if not IS_SIMULATED:  # nothing else counts them
        return
    number = row.micro_batches * (2 if VIRTUAL in row.more else 1)  # parts of a rank
    waits = host_waits(path, rank=0, num_steps=num_steps, micro_batches=number)
    devices, is_scaled = 2 if row.mode == "ddp_mp" else 1, row.precision == "fp16"
    # The sums of a virtual rank, before the next one's share is evaluated.
    assert waits.evaluation == ({"item": 2} if VIRTUAL in row.more else {})
    assert waits.pageable == 0
    # Whether the gradients overflowed, for each device.
    assert waits.step == ({"item": devices} if is_scaled else {})
    if row.mode in SHARDED:  # each of its tensors is put together and copied before the next one is
        return
    # Whether the parameters are finite, and an average; and until each device has copied its part.
    expected = {"copy d2h": 1 + (AVERAGED in row.more), "device.synchronize": devices}
    # The step beside it, and two numbers of the scaler: the scale, and since when it has not grown.
    expected |= {"item": devices + 2} if is_scaled else {}
    assert waits.checkpoint == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", named(["single", "ddp_mp", "fsdp"], quick=[], slow=["single", "fsdp"])
)
def test_a_trained_model_is_used_as_on_the_cpu(mode: str, tmp_path: Path) -> None:
    """task=evaluate repeats the run's own evaluation to the last digit; task=predict agrees."""
    row = Row(mode, USUAL[mode])
    need_devices(row)
    run = on_device(*row.keys, folder=tmp_path)
    evaluated = on_device("task=evaluate", f"resume={run}", TRUSTED, folder=tmp_path)
    own, again = last_numbers(run), last_numbers(evaluated)
    assert again == {key: value for key, value in own.items() if key in again}
    assert "eval/loss" in again
    on_gpu, on_host = (
        predictions(run_on("task=predict", f"resume={run}", TRUSTED, folder=tmp_path / kind))
        for kind, run_on in (("device", on_device), ("cpu", on_cpu))
    )
    assert on_gpu == pytest.approx(on_host, rel=1e-5, abs=1e-5 if IS_SIMULATED else 1e-3)
