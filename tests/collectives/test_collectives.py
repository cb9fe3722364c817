"""task=collectives: every operation is right, wrong results are found, bandwidths are computed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import config_error, resolved
from ranks import run_ranks
from tiers import first_of

from ddp_runner.collectives.collectives_task import message_sizes, variants
from ddp_runner.collectives.measurement import (
    PreparedCall,
    WrongResultError,
    prepare,
    summarize,
    time_calls,
    unsupported_reason,
)
from ddp_runner.collectives.operations import OPERATIONS, REDUCTIONS, Variant
from ddp_runner.config.sections import DTYPES, OPS, REDUCE_OPS, BackendConfig, CollectivesConfig
from ddp_runner.dist_env import DistEnv

EVERYTHING = CollectivesConfig(reduce_ops=list(REDUCE_OPS), dtypes=list(DTYPES))
CPU = torch.device("cpu")
ODD_SIZES = (1, 1001, 2437)  # bytes: neither whole elements nor equal shares
FACTORS = {  # nccl-tests' at 4 ranks
    "broadcast": 1.0,
    "reduce": 1.0,
    "send_recv": 1.0,
    "all_reduce": 1.5,
    "scatter": 0.75,
    "gather": 0.75,
    "all_gather": 0.75,
    "reduce_scatter": 0.75,
    "all_to_all": 0.75,
}


def check_everything(env: DistEnv, backend: str, dtypes: list[str]) -> dict[str, str]:
    """Verify each variant at each odd size; return the unsupported ones with the reason."""
    device = CPU if backend == "gloo" else torch.device("cuda", env.local_rank)
    unsupported = {}
    for variant in variants(replace(EVERYTHING, dtypes=dtypes)):
        reason = unsupported_reason(variant, device=device)
        if reason is not None:
            unsupported[str(variant)] = reason
            continue
        for num_bytes in ODD_SIZES:
            prepared = prepare(variant, num_bytes=num_bytes, device=device)
            if variant.op != "barrier":
                assert num_bytes <= prepared.num_bytes <= num_bytes + 8 * env.world_size
            prepared.verify()
        latencies = time_calls(prepared, CollectivesConfig(warmup_steps=1, steps=2))
        assert latencies is not None
        assert len(latencies) == 2
        assert min(latencies) > 0
    return unsupported


@pytest.mark.parametrize(
    ("world_size", "dtypes"),
    first_of([(2, ["float32"]), (3, list(DTYPES)), (4, ["bfloat16", "uint8"])]),
)
def test_every_collective_gives_the_expected_result(world_size: int, dtypes: list[str]) -> None:
    """Each operation, dtype and reduction; every rank agrees on what gloo does not support."""
    answers = run_ranks(check_everything, world_size, "gloo", dtypes, timeout_s=600)
    assert all(answer == answers[0] for answer in answers)
    whole = [name for name in DTYPES if not getattr(torch, name).is_floating_point]
    reducing = [op for op in OPERATIONS if OPERATIONS[op].reduces]
    assert set(answers[0]) <= {f"{op}_{dtype}_mean" for op in reducing for dtype in whole}


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_collective_of_nccl_gives_the_expected_result() -> None:
    """It holds on CUDA tensors as it does with gloo."""
    nccl = BackendConfig(name="nccl", device="cuda", timeout_s=240)
    answers = run_ranks(check_on_gpu, 2, backend=nccl, timeout_s=600)
    assert answers == [{}, {}]


def check_on_gpu(env: DistEnv) -> dict[str, str]:
    """Verify everything on this rank's GPU."""
    torch.cuda.set_device(env.local_rank)
    return check_everything(env, "nccl", list(DTYPES))


def verdict(prepared: PreparedCall) -> str:
    """Return the message of the verification, or "right"."""
    try:
        prepared.verify()
    except WrongResultError as error:
        return str(error)
    return "right"


def check_calls_that_do_nothing(env: DistEnv) -> dict[str, str]:
    """Verify every variant with a call that moves nothing, after a call that did."""
    verdicts = {}
    for variant in variants(replace(EVERYTHING, dtypes=["float32"])):
        prepared = prepare(variant, num_bytes=1001, device=CPU)
        prepared.verify()
        verdicts[str(variant)] = verdict(replace(prepared, call=lambda: None))
    return verdicts


@pytest.mark.parametrize("world_size", first_of([3, 2]))
def test_a_collective_that_moves_nothing_is_found(world_size: int) -> None:
    """On every rank, neither an input nor an old result passes as a result."""
    answers = run_ranks(check_calls_that_do_nothing, world_size)
    assert all(answer == answers[0] for answer in answers)
    assert {name.partition("_float32")[0] for name in answers[0]} == set(OPS)
    for name, message in answers[0].items():
        assert message.startswith(f"{name} of "), message
        assert " bytes gave a wrong result: rank " in message


def check_one_wrong_element(env: DistEnv, dtype: str) -> list[str]:
    """Verify an all-reduce and an all-gather whose last rank changes one element by one."""
    verdicts = []
    for variant in (Variant("all_reduce", dtype, "sum"), Variant("all_gather", dtype)):
        right = OPERATIONS[variant.op]

        def bind(source: Any, target: Any, op: Any, right: Any = right) -> Any:
            call = right.bind(source, target, op)

            def spoil() -> None:
                call()
                if env.rank == env.world_size - 1:
                    target[150] += 1

            return spoil

        OPERATIONS[variant.op] = replace(right, bind=bind)
        verdicts.append(verdict(prepare(variant, num_bytes=2400, device=CPU)))
    return verdicts


@pytest.mark.parametrize("dtype", first_of(["float32", "bfloat16", "uint8"]))
def test_one_wrong_element_is_named(dtype: str) -> None:
    """Every rank names operation, dtype, reduction, size, rank and position."""
    answers = run_ranks(check_one_wrong_element, 3, dtype)
    assert answers == [answers[0]] * 3
    for message, name in zip(
        answers[0], (f"all_reduce_{dtype}_sum", f"all_gather_{dtype}"), strict=True
    ):
        assert message.startswith(f"{name} of 2400 bytes gave a wrong result: rank 2 holds ")
        assert " at element 150 and should hold " in message
        assert "(1 of the " in message


def test_the_tables_have_the_same_names() -> None:
    """The config's names and the implementations match."""
    assert set(OPS) == {*OPERATIONS, "barrier"}
    assert set(REDUCTIONS) == set(REDUCE_OPS)
    assert len({torch_op for torch_op, _ in REDUCTIONS.values()}) == len(REDUCE_OPS)
    reducing = {op for op in OPERATIONS if OPERATIONS[op].reduces}
    assert reducing == {"reduce", "all_reduce", "reduce_scatter"}


@pytest.mark.parametrize("op", FACTORS)
def test_bandwidths_are_those_of_nccl_tests(op: str) -> None:
    """The algbw is bytes over the slowest ranks' median; busbw has the operation's factor."""
    reduce_op = "sum" if OPERATIONS[op].reduces else None
    by_rank = [[1e-3, 1e-3, 1e-3], [2e-3, 4e-3, 8e-3], [1e-3, 1e-3, 1e-3], [5e-4, 1e-3, 1e-3]]
    measured = summarize(Variant(op, "float32", reduce_op), 8_000_000, by_rank)
    assert measured.latency_us == pytest.approx(
        {"median": 4000.0, "p95": 7600.0, "min": 500.0, "max": 8000.0}
    )
    assert measured.algbw_gb_per_s == pytest.approx(2.0)
    assert measured.busbw_gb_per_s == pytest.approx(2.0 * FACTORS[op])


def test_a_barrier_has_no_bandwidth() -> None:
    """It moves no data, and is measured once for all sizes and dtypes."""
    measured = summarize(Variant("barrier"), 0, [[1e-3], [3e-3]])
    assert (measured.algbw_gb_per_s, measured.busbw_gb_per_s) == (None, None)
    assert list(variants(CollectivesConfig(ops=["barrier"], dtypes=["int8", "float32"]))) == [
        Variant("barrier")
    ]


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ("min_bytes=1 max_bytes=100 size_factor=4", [1, 4, 16, 64, 100]),
        ("min_bytes=4 max_bytes=64 size_factor=4", [4, 16, 64]),
        ("min_bytes=9 max_bytes=9", [9]),
    ],
)
def test_sizes_grow_by_the_factor_and_end_at_the_largest(keys: str, sizes: list[int]) -> None:
    """The largest size is measured even if the factor skips it."""
    config, _ = resolved(*(f"collectives.{key}" for key in keys.split()))
    assert message_sizes(config.collectives) == sizes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("steps=0", "steps (0) must be greater than 0"),
        ("warmup_steps=-1", "warmup_steps (-1) must be 0 or greater"),
        ("min_bytes=0", "min_bytes (0) must be greater than 0"),
        ("max_bytes=-5", "max_bytes (-5) must be greater than 0"),
        ("size_factor=1", "size_factor (1) must be 2 or greater"),
        ("max_bytes=8", "min_bytes (1024) is greater than collectives.max_bytes (8); give both, "
         "the smaller as min_bytes"),
        ("ops=[allreduce]", f"ops (allreduce) must be among {', '.join(OPS)}; "
         "did you mean all_reduce?"),
        ("dtypes=[float]", f"dtypes (float) must be among {', '.join(DTYPES)}; "
         "did you mean float64?"),
        ("reduce_ops=[avg]", f"reduce_ops (avg) must be among {', '.join(REDUCE_OPS)}"),
        ("ops=[]", "ops ([]) must name at least one, and none twice"),
        ("dtypes=[int8,int8]", "dtypes ([int8, int8]) must name at least one, and none twice"),
    ],
)  # fmt: skip
def test_invalid_settings_are_answered_in_one_line(overrides: str, message: str) -> None:
    """The line has key, value and what is allowed."""
    assert (
        config_error(*(f"collectives.{key}" for key in overrides.split()))
        == f"collectives.{message}"
    )


def test_one_rank_cannot_measure_collectives() -> None:
    """The message has the fix; other tasks run on one rank."""
    assert config_error("task=collectives", "world_size=1") == (
        "task=collectives measures messages between ranks and world_size is 1; "
        "write world_size=2 or more"
    )
    resolved("world_size=1")
