"""A predicted step: the baseline's computing, and an all-reduce as it was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from generated_runs import lines_of, write_run
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_runner.compare.analysis import Comparison, compare
from ddp_runner.compare.prediction import num_buckets
from ddp_runner.compare.render.tables import as_text
from ddp_runner.compare.runs import read_runs
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.ddp import replicate

GRADIENTS = {"gradient_bytes": 4 * 2**20}
COMPUTED = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0}  # ms, of 16 in all


def write_step(folder: Path, pace: float, parts: dict[str, float], **config: Any) -> None:
    """Write a run of four lines that all say the same of its steps."""
    figures = {f"perf__{part}_ms": [value] * 4 for part, value in parts.items()}
    keys = {key.replace("__", "."): value for key, value in config.items()}
    write_run(folder, config=keys, lines=lines_of([pace] * 4, **figures), record=GRADIENTS)


def write_benchmark(
    folder: Path,
    *,
    world_size: int,
    latency_us: float,
    gb_per_s: float,
    backend: str = "gloo",
    sizes: Sequence[int] = (4096, 65536, 2**20, 2**24),
    slow: Mapping[int, float] = MappingProxyType({}),
) -> None:
    """Write a benchmark whose all-reduces lie on a line; its other rows must not count.

    Args:
        folder: of the run.
        world_size: of it.
        latency_us: of the line.
        gb_per_s: of the line.
        backend: of the run.
        sizes: of the messages, in bytes.
        slow: how many times as long some sizes took.
    """
    rows = [
        {
            "op": op,
            "dtype": dtype,
            "reduce_op": reduce_op,
            "bytes": size,
            "latency_us": {
                "median": factor * slow.get(size, 1) * (latency_us + size / gb_per_s / 1e3)
            },
        }
        for size in sizes
        for op, reduce_op, dtype, factor in (
            ("all_reduce", "sum", "float32", 1),
            ("all_reduce", "sum", "bfloat16", 5),
            ("all_reduce", "max", "float32", 7),
            ("broadcast", None, "float32", 9),
        )
    ]
    config = {"task": "collectives", "world_size": world_size, "backend.name": backend}
    write_run(folder, config=config, record={"task": "collectives", "collectives": rows})


def compared(folder: Path) -> Comparison:
    """Compare all runs of a folder."""
    return compare(read_runs([folder]))


def test_a_step_is_predicted_from_its_parts_and_the_link(tmp_path: Path) -> None:
    """Half the samples a rank: half the computing, the same optimizer, an all-reduce on top."""
    write_step(tmp_path / "one", 4000.0, COMPUTED)  # 64 samples in 16 ms
    halved = {"data": 1.0, "forward": 2.0, "backward": 4.0, "optimizer": 2.0}
    write_step(
        *(tmp_path / "two", 4571.0, {**halved, "comm": 3.0, "wait": 1.0}),  # in 14 ms
        world_size=2,
        batch__per_rank=32,
    )
    write_benchmark(tmp_path / "link", world_size=2, latency_us=100, gb_per_s=2.0)
    comparison = compared(tmp_path)
    (link,) = comparison.links
    assert (link.latency_us, link.gb_per_s) == pytest.approx((100, 2.0))
    assert [row.world_size for row in comparison.rows] == [1, 2]  # the benchmark is no row
    (base, row) = comparison.rows
    assert base.predicted == {}
    one = row.predicted["strong"]
    exchange = 0.1 + 4 * 2**20 / 2e6  # one bucket: one latency, and 4 MiB at 2 GB/s
    assert one.parts_ms == pytest.approx(
        {
            **{"data": 0.5, "forward": 2.0, "backward": 4.0, "optimizer": 2.0},
            **{"rest": 1.0, "comm": exchange, "wait": 0.0},
        }
    )
    assert one.samples_per_s == pytest.approx(64_000 / (9.5 + exchange))
    assert one.speedup == pytest.approx(16 / (9.5 + exchange))
    assert sum(one.measured_ms.values()) == pytest.approx(64_000 / 4571)
    text = as_text(comparison)
    assert "2 ranks (strong): 14.00 ms, predicted 11.70; wait +1, comm +0.803, data +0.5" in text
    assert "gloo, 2 ranks: 100 us + bytes / 2.00 GB/s, from 4 sizes" in text


def buckets(env: DistEnv, caps: Sequence[float]) -> list[int]:
    """Return in how many buckets DDP reduces gradients of 4 MiB under each cap."""
    found = []
    for cap in caps:
        module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
        model = replicate(module, forward_sync_buffers=False, bucket_cap_mb=cap)
        assert isinstance(model, DistributedDataParallel)
        for _ in range(3):  # the first backward tells it the order of the gradients
            model(torch.ones(1, 256)).sum().backward()
        found.append(model._get_ddp_logging_data()["num_buckets_reduced"])
    return found


def test_buckets_are_counted_as_ddp_cuts_them() -> None:
    """One by one, since the latency of each counts."""
    caps = (25, 4, 2.5, 1, 0.25)
    expected = [num_buckets(4 * 2**20, cap) for cap in caps]
    assert expected == [1, 1, 2, 4, 16]
    assert run_ranks(buckets, 2, caps) == [expected] * 2


def test_each_bucket_costs_a_latency(tmp_path: Path) -> None:
    """A cap of 1 MiB makes four of 4 MiB."""
    write_step(tmp_path / "one", 4000.0, COMPUTED, parallelism__bucket_cap_mb=1)
    write_step(
        *(tmp_path / "two", 4000.0, {**COMPUTED, "comm": 3.0, "wait": 1.0}),
        **{"world_size": 2, "batch__per_rank": 32, "parallelism__bucket_cap_mb": 1},
    )
    write_benchmark(tmp_path / "link", world_size=2, latency_us=100, gb_per_s=2.0)
    parts = compared(tmp_path).rows[1].predicted["strong"].parts_ms
    assert parts["comm"] == pytest.approx(4 * 0.1 + 4 * 2**20 / 2e6)


def test_each_size_weighs_the_same_in_a_link(tmp_path: Path) -> None:
    """By its relative error: a slow 1 MiB changes little of what 4 KiB take."""
    write_benchmark(
        tmp_path / "link", world_size=2, latency_us=100, gb_per_s=2.0, slow={2**20: 1.3}
    )
    (link,) = compared(tmp_path).links
    assert link.latency_us == pytest.approx(100, rel=0.01)
    assert link.error == pytest.approx(0.063, abs=0.001)  # the median of 0.1, 2.4, 10 and 16 %


def test_a_link_has_no_negative_latency_and_more_sizes_than_one(tmp_path: Path) -> None:
    """Two runs that measured the same single size make no line."""
    write_benchmark(tmp_path / "link", world_size=2, latency_us=-2, gb_per_s=2.0)
    for name in ("first", "second"):
        write_benchmark(tmp_path / name, world_size=4, latency_us=100, gb_per_s=2.0, sizes=(2**20,))
    (link,) = compared(tmp_path).links
    assert (link.world_size, link.latency_us) == (2, 0.0)


def test_equal_batches_per_rank_predict_equal_computing(tmp_path: Path) -> None:
    """Weak scaling: the rank's own work stays, twice the samples come out of it."""
    write_step(tmp_path / "one", 4000.0, COMPUTED)
    write_step(
        *(tmp_path / "two", 6400.0, {**COMPUTED, "comm": 4.0, "wait": 0.0}),
        world_size=2,
        batch__global_size=128,
    )
    write_benchmark(tmp_path / "link", world_size=2, latency_us=0, gb_per_s=4 * 2**20 / 4e6)
    row = compared(tmp_path).rows[1]
    assert row.strong is None
    assert row.predicted["weak"].speedup == pytest.approx(2 * 16 / 20)


@pytest.mark.parametrize(
    "link",
    [
        {"world_size": 4, "latency_us": 100, "gb_per_s": 2.0},
        {"world_size": 2, "latency_us": 100, "gb_per_s": 2.0, "backend": "nccl"},
        {"world_size": 2, "latency_us": 100, "gb_per_s": -1.0e6},  # larger ones were quicker
    ],
)
def test_another_link_predicts_nothing(tmp_path: Path, link: dict[str, Any]) -> None:
    """A link of other ranks or another backend, or one that is noise alone, says nothing."""
    write_step(tmp_path / "one", 4000.0, COMPUTED)
    parts = {**COMPUTED, "comm": 3.0, "wait": 1.0}
    write_step(tmp_path / "two", 4000.0, parts, world_size=2, batch__per_rank=32)
    write_benchmark(tmp_path / "link", **link)
    assert all(row.predicted == {} for row in compared(tmp_path).rows)


def test_a_mode_without_buckets_has_no_prediction(tmp_path: Path) -> None:
    """A parameter server does not all-reduce."""
    for name, size in (("one", 1), ("two", 2)):
        write_step(
            *(tmp_path / name, 4000.0, COMPUTED),
            **{"world_size": size, "batch__per_rank": 64 // size, "parallelism__name": "ps"},
            parallelism__bucket_cap_mb=None,
        )
    write_benchmark(tmp_path / "link", world_size=2, latency_us=100, gb_per_s=2.0)
    assert all(row.predicted == {} for row in compared(tmp_path).rows)


def test_benchmarks_alone_are_rows(tmp_path: Path) -> None:
    """Where nothing was trained, the benchmarks are what is compared."""
    write_benchmark(tmp_path / "two", world_size=2, latency_us=100, gb_per_s=2.0)
    write_benchmark(tmp_path / "four", world_size=4, latency_us=100, gb_per_s=2.0)
    assert [row.world_size for row in compared(tmp_path).rows] == [2, 4]
