"""A predicted step: the computing of the baseline plus a measured all-reduce."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import yaml
from generated_runs import lines_of, write_run
from ranks import run_ranks
from tiers import first_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_runner.compare.analysis import Comparison, ComparisonRow, compare
from ddp_runner.compare.formats import as_text
from ddp_runner.compare.run_reader import read_runs
from ddp_runner.compare.speedup import Prediction, num_buckets
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.ddp import DDP

GRADIENTS = {"gradient_bytes": 4 * 2**20}
COMPUTED = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0}  # ms, of 16


def write_step(folder: Path, speed: float, parts: dict[str, float], **config: Any) -> None:
    """Write a run with four equal lines."""
    metrics = {f"perf__{part}_ms": [value] * 4 for part, value in parts.items()}
    keys = {key.replace("__", "."): value for key, value in config.items()}
    write_run(folder, config=keys, lines=lines_of([speed] * 4, **metrics), record=GRADIENTS)


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
    """Write a benchmark with all-reduces on a line, and other calls that must not count.

    Args:
        folder: Folder of the run.
        world_size: Number of ranks.
        latency_us: Intercept of the line.
        gb_per_s: Bandwidth, which gives the slope of the line.
        backend: Backend of the run.
        sizes: Sizes of the messages in bytes.
        slow: Factors of the time of single sizes.
    """
    calls = [
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
    write_run(folder, config=config, record={"task": "collectives", "collectives": calls})


def compared(folder: Path) -> Comparison:
    """Compare all runs of a folder."""
    return compare(read_runs([folder]))


def predictions(row: ComparisonRow) -> dict[str, Prediction]:
    """Return the predictions of a row by the kind of scaling."""
    return {kind: one.predicted for kind, one in row.scalings.items() if one.predicted}


def test_a_step_is_predicted_from_its_parts_and_the_all_reduce(tmp_path: Path) -> None:
    """Half the samples per rank: half the computing, the same optimizer, plus an all-reduce."""
    write_step(tmp_path / "one", 4000.0, COMPUTED)  # 64 samples in 16 ms
    halved = {"data": 1.0, "forward": 2.0, "backward": 4.0, "optimizer": 2.0}
    parts = {**halved, "comm": 3.0, "wait": 1.0}  # in 14 ms
    write_step(tmp_path / "two", 4571.0, parts, world_size=2, batch__per_rank=32)
    write_benchmark(tmp_path / "benchmark", world_size=2, latency_us=100, gb_per_s=2.0)
    comparison = compared(tmp_path)
    (fit,) = comparison.all_reduces
    assert (fit.latency_us, fit.gb_per_s) == pytest.approx((100, 2.0))
    assert [row.runs[0].world_size for row in comparison.rows] == [1, 2]  # the benchmark has no row
    (base, row) = comparison.rows
    assert predictions(base) == {}
    prediction = predictions(row)["strong"]
    exchange_ms = 0.1 + 4 * 2**20 / 2e6  # one bucket of 4 MiB: one latency
    assert prediction.parts_ms == pytest.approx(
        {
            "data": 0.5,
            "forward": 2.0,
            "backward": 4.0,
            "optimizer": 2.0,
            "rest": 1.0,
            "comm": exchange_ms,
            "wait": 0.0,
        }
    )
    assert prediction.samples_per_s == pytest.approx(64_000 / (9.5 + exchange_ms))
    assert prediction.speedup == pytest.approx(16 / (9.5 + exchange_ms))
    assert sum(prediction.measured_ms.values()) == pytest.approx(64_000 / 4571)
    text = as_text(comparison)
    assert "2 ranks (strong): 14.00 ms, predicted 11.70; wait +1, comm +0.803, data +0.5" in text
    assert "gloo, 2 ranks: 100 us + bytes / 2.00 GB/s, from 4 sizes, median error 0%" in text


def write_prediction(folder: Path) -> None:
    """Write a baseline, a run on two ranks and the benchmark that its prediction needs."""
    write_step(folder / "one", 4000.0, COMPUTED)
    write_step(folder / "two", 4571.0, COMPUTED | {"comm": 3.0}, world_size=2)
    write_benchmark(folder / "benchmark", world_size=2, latency_us=100, gb_per_s=2.0)


@pytest.mark.parametrize(
    ("key", "value", "sent"),
    [
        ("comm_hook", "bf16", 0.5),
        ("comm_hook", "int8", None),
        ("comm_hook._target_", "my_hooks.clipped", None),
    ],
)
def test_a_prediction_counts_the_bytes_that_a_hook_sends(
    tmp_path: Path, key: str, value: object, sent: float | None
) -> None:
    """Half of them with 16 bits; where they are unknown there is no prediction."""
    write_step(tmp_path / "one", 4000.0, COMPUTED)
    write_benchmark(tmp_path / "benchmark", world_size=2, latency_us=100, gb_per_s=2.0)
    parts = COMPUTED | {"comm": 3.0}
    write_step(tmp_path / "two", 4571.0, parts, world_size=2, **{f"parallelism__{key}": value})
    found = predictions(compared(tmp_path).rows[1])
    assert bool(found) is (sent is not None)
    for prediction in found.values():
        assert prediction.parts_ms["comm"] == pytest.approx(0.1 + (sent or 0) * 4 * 2**20 / 2e6)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every field of a tree; of a list, those in its first item."""
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:1]
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


@pytest.mark.parametrize(
    ("name", "load", "dump"),
    [("run.json", json.loads, json.dumps), (".hydra/config.yaml", yaml.safe_load, yaml.safe_dump)],
)
@pytest.mark.parametrize("run", first_of(["benchmark", "one", "two"]))
def test_whatever_a_damaged_field_holds_the_rest_is_compared(
    tmp_path: Path,
    run: str,
    name: str,
    load: Callable[[str], dict[str, Any]],
    dump: Callable[[object], str],
) -> None:
    """Every field of both files of each run: the comparison leaves it out, or shows it."""
    write_prediction(tmp_path)
    assert predictions(compared(tmp_path).rows[1])
    path = tmp_path / run / name
    content = path.read_text()
    for place in places(load(content)):
        for value in (None, "x", -1, 0, [1], {"a": None}):
            tree = load(content)
            reduce(getitem, place[:-1], tree)[place[-1]] = value
            path.write_text(dump(tree))
            assert "compared" in as_text(compared(tmp_path)), (place, value)


def buckets(env: DistEnv, caps: Sequence[float]) -> list[int]:
    """Return the number of buckets in which DDP reduces gradients of 4 MiB, for each cap."""
    counts = []
    for cap in caps:
        module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
        mode = DDP(
            "ddp",
            bucket_cap_mb=cap,
            find_unused_parameters=False,
            static_graph=False,
            forward_sync_buffers=False,
        )
        model = mode.wrap(module, (torch.device("cpu"),))
        assert isinstance(model, DistributedDataParallel)
        for _ in range(3):  # DDP rebuilds its buckets after the first backward
            model(torch.ones(1, 256)).sum().backward()
        counts.append(model._get_ddp_logging_data()["num_buckets_reduced"])
    return counts


def test_num_buckets_equals_the_count_of_ddp() -> None:
    """Each bucket costs a latency."""
    caps = (25, 4, 2.5, 1, 0.25)
    expected = [num_buckets(4 * 2**20, cap) for cap in caps]
    assert expected == [1, 1, 2, 4, 16]
    assert run_ranks(buckets, 2, caps) == [expected] * 2


def test_each_bucket_costs_a_latency(tmp_path: Path) -> None:
    """A cap of 1 MiB splits 4 MiB into four buckets."""
    cap = {"parallelism__bucket_cap_mb": 1}
    parts = {**COMPUTED, "comm": 3.0, "wait": 1.0}
    write_step(tmp_path / "one", 4000.0, COMPUTED, **cap)
    write_step(tmp_path / "two", 4000.0, parts, world_size=2, batch__per_rank=32, **cap)
    write_benchmark(tmp_path / "benchmark", world_size=2, latency_us=100, gb_per_s=2.0)
    predicted = predictions(compared(tmp_path).rows[1])["strong"].parts_ms
    assert predicted["comm"] == pytest.approx(4 * 0.1 + 4 * 2**20 / 2e6)


def test_each_size_has_the_same_weight_in_a_fit(tmp_path: Path) -> None:
    """The fit minimises relative errors: a slow 1 MiB hardly changes the latency."""
    write_benchmark(
        tmp_path / "benchmark", world_size=2, latency_us=100, gb_per_s=2.0, slow={2**20: 1.3}
    )
    (fit,) = compared(tmp_path).all_reduces
    assert fit.latency_us == pytest.approx(100, rel=0.01)
    assert fit.error == pytest.approx(0.063, abs=0.001)  # the median of 0.1, 2.4, 10 and 16 %


def test_a_fit_needs_two_sizes_and_has_no_negative_latency(tmp_path: Path) -> None:
    """Two runs that measured the same single size have no fit."""
    write_benchmark(tmp_path / "benchmark", world_size=2, latency_us=-2, gb_per_s=2.0)
    for name in ("first", "second"):
        write_benchmark(tmp_path / name, world_size=4, latency_us=100, gb_per_s=2.0, sizes=(2**20,))
    (fit,) = compared(tmp_path).all_reduces
    assert (fit.world_size, fit.latency_us) == (2, 0.0)


def test_equal_batches_per_rank_predict_equal_computing(tmp_path: Path) -> None:
    """Weak scaling: each rank computes the same, and there are twice the samples."""
    write_step(tmp_path / "one", 4000.0, COMPUTED)
    parts = {**COMPUTED, "comm": 4.0, "wait": 0.0}
    write_step(tmp_path / "two", 6400.0, parts, world_size=2, batch__global_size=128)
    write_benchmark(tmp_path / "benchmark", world_size=2, latency_us=0, gb_per_s=4 * 2**20 / 4e6)
    row = compared(tmp_path).rows[1]
    assert row.scalings.keys() == {"weak"}
    assert predictions(row)["weak"].speedup == pytest.approx(2 * 16 / 20)


@pytest.mark.parametrize(
    "benchmark",
    [
        {"world_size": 4, "latency_us": 100, "gb_per_s": 2.0},
        {"world_size": 2, "latency_us": 100, "gb_per_s": 2.0, "backend": "nccl"},
        {"world_size": 2, "latency_us": 100, "gb_per_s": -1.0e6},  # larger messages were faster
    ],
)
def test_another_benchmark_predicts_nothing(tmp_path: Path, benchmark: dict[str, Any]) -> None:
    """It has another world size or another backend, or it only measured noise."""
    write_step(tmp_path / "one", 4000.0, COMPUTED)
    parts = {**COMPUTED, "comm": 3.0, "wait": 1.0}
    write_step(tmp_path / "two", 4000.0, parts, world_size=2, batch__per_rank=32)
    write_benchmark(tmp_path / "benchmark", **benchmark)
    assert not any(predictions(row) for row in compared(tmp_path).rows)


def test_a_mode_without_all_reduce_has_no_prediction(tmp_path: Path) -> None:
    """A parameter server has no buckets."""
    keys = {"parallelism__name": "ps", "parallelism__bucket_cap_mb": None}
    write_step(tmp_path / "one", 4000.0, COMPUTED, **keys)
    write_step(tmp_path / "two", 4000.0, COMPUTED, world_size=2, batch__per_rank=32, **keys)
    write_benchmark(tmp_path / "benchmark", world_size=2, latency_us=100, gb_per_s=2.0)
    assert not any(predictions(row) for row in compared(tmp_path).rows)


def test_benchmarks_alone_are_rows(tmp_path: Path) -> None:
    """If there are no training runs, the benchmarks are compared."""
    write_benchmark(tmp_path / "two", world_size=2, latency_us=100, gb_per_s=2.0)
    write_benchmark(tmp_path / "four", world_size=4, latency_us=100, gb_per_s=2.0)
    assert [row.runs[0].world_size for row in compared(tmp_path).rows] == [2, 4]
