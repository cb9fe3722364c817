"""A predicted step: the baseline's computing, and an all-reduce as it was measured."""

from pathlib import Path
from typing import Any

import pytest
from generated_runs import lines_of, write_run

from ddp_runner.comparison.analysis import Comparison, compare
from ddp_runner.comparison.runs import read_runs
from ddp_runner.comparison.tables import as_text

GRADIENTS = {"gradient_bytes": 4 * 2**20}
COMPUTED = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0}  # ms, of 16 in all


def write_step(folder: Path, pace: float, parts: dict[str, float], **config: Any) -> None:
    """Write a run of four lines that all say the same of its steps."""
    figures = {f"perf__{part}_ms": [value] * 4 for part, value in parts.items()}
    keys = {key.replace("__", "."): value for key, value in config.items()}
    write_run(folder, config=keys, lines=lines_of([pace] * 4, **figures), record=GRADIENTS)


def write_benchmark(
    folder: Path, *, world_size: int, latency_us: float, gb_per_s: float, backend: str = "gloo"
) -> None:
    """Write a benchmark whose all-reduces lie exactly on a line; its other rows must not count."""
    sizes = (4096, 65536, 2**20, 2**24)
    rows = [
        {
            "op": op,
            "dtype": "float32",
            "reduce_op": reduce_op,
            "bytes": size,
            "latency_us": {"median": factor * (latency_us + size / gb_per_s / 1e3)},
        }
        for size in sizes
        for op, reduce_op, factor in (
            ("all_reduce", "sum", 1),
            ("all_reduce", "max", 7),
            ("broadcast", None, 9),
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
    # Two buckets, of 1 MiB and the rest: two latencies, and 4 MiB at 2 GB/s.
    exchange = 2 * 0.1 + 4 * 2**20 / 2e6
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
    assert "2 ranks (strong): 14.00 ms, predicted 11.80; wait +1, comm +0.703, data +0.5" in text
    assert "gloo, 2 ranks: 100 us + bytes / 2.00 GB/s, from 4 sizes" in text


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
