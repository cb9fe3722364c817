"""The collectives benchmark: what is called is right, what is wrong is found, figures follow."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from commands import refusal as refused
from commands import resolved
from ranks import run_ranks

from ddp_runner.collectives.messages import prepare, refusal
from ddp_runner.collectives.operations import OPERATIONS, REDUCE_OPS, Variant
from ddp_runner.collectives.task import message_sizes, validate_reduce_ops, variants
from ddp_runner.collectives.timing import WrongResultError, check, summary, time_calls
from ddp_runner.config.schema import DTYPES, OPS, BackendConfig, CollectivesConfig
from ddp_runner.config.schema import REDUCE_OPS as REDUCE_OP_NAMES
from ddp_runner.dist_env import DistEnv

EVERYTHING = CollectivesConfig(reduce_ops=list(REDUCE_OP_NAMES), dtypes=list(DTYPES))
CPU = torch.device("cpu")
ODD_SIZES = (1, 1001, 2437)  # bytes: no whole elements, no equal shares
FACTORS = {  # nccl-tests' at 4 ranks
    **{"broadcast": 1.0, "reduce": 1.0, "send_recv": 1.0, "all_reduce": 1.5},
    **dict.fromkeys(("scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"), 0.75),
}


def check_everything(env: DistEnv, backend: str, dtypes: list[str]) -> dict[str, str]:
    """Check each variant at each odd size; return those that are refused, and why."""
    device = CPU if backend == "gloo" else torch.device("cuda", env.local_rank)
    told = {}
    for variant in variants(replace(EVERYTHING, dtypes=dtypes)):
        reason = refusal(variant, device=device, backend=backend)
        if reason is not None:
            told[str(variant)] = reason
            continue
        for num_bytes in ODD_SIZES:
            prepared = prepare(variant, num_bytes=num_bytes, device=device, backend=backend)
            if variant.op != "barrier":
                assert num_bytes <= prepared.num_bytes <= num_bytes + 8 * env.world_size
            check(variant, prepared, device=device)
        latencies = time_calls(prepared, warmup_steps=1, steps=2, device=device)
        assert latencies is not None
        assert len(latencies) == 2
        assert min(latencies) > 0
    return told


@pytest.mark.parametrize(
    ("world_size", "dtypes"), [(2, ["float32"]), (3, list(DTYPES)), (4, ["bfloat16", "uint8"])]
)
def test_every_collective_gives_what_is_due(world_size: int, dtypes: list[str]) -> None:
    """Each operation, dtype and reduction; what gloo cannot do is the same on all ranks."""
    answers = run_ranks(check_everything, world_size, "gloo", dtypes, timeout_s=600)
    assert all(answer == answers[0] for answer in answers)
    whole = [name for name in DTYPES if not getattr(torch, name).is_floating_point]
    reducing = [op for op in OPERATIONS if OPERATIONS[op].reduces]
    assert set(answers[0]) <= {f"{op}_{dtype}_mean" for op in reducing for dtype in whole}


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_collective_of_nccl_gives_what_is_due() -> None:
    """As with gloo, on CUDA tensors."""
    nccl = BackendConfig(name="nccl", device="cuda", timeout_s=240)
    answers = run_ranks(check_on_gpu, 2, backend=nccl, timeout_s=600)
    assert answers == [{}, {}]


def check_on_gpu(env: DistEnv) -> dict[str, str]:
    """Check everything on this rank's own GPU."""
    torch.cuda.set_device(env.local_rank)
    return check_everything(env, "nccl", list(DTYPES))


def sentence(variant: Variant, prepared: Any) -> str:
    """Return what the check says of a call."""
    try:
        check(variant, prepared, device=CPU)
    except WrongResultError as error:
        return str(error)
    return "right"


def check_calls_that_do_nothing(env: DistEnv) -> dict[str, str]:
    """Check every variant with a call that moves nothing, after one that did."""
    told = {}
    for variant in variants(replace(EVERYTHING, dtypes=["float32"])):
        prepared = prepare(variant, num_bytes=1001, device=CPU, backend="gloo")
        check(variant, prepared, device=CPU)
        told[str(variant)] = sentence(variant, replace(prepared, call=lambda: None))
    return told


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_collective_that_moves_nothing_is_found(world_size: int) -> None:
    """Of every operation, on every rank alike: neither an input nor an old result passes."""
    answers = run_ranks(check_calls_that_do_nothing, world_size)
    assert all(answer == answers[0] for answer in answers)
    assert {name.partition("_float32")[0] for name in answers[0]} == set(OPS)
    for name, told in answers[0].items():
        assert told.startswith(f"{name} of "), told
        assert " bytes gave a wrong result: rank " in told


def check_one_wrong_element(env: DistEnv, dtype: str) -> list[str]:
    """Check an all-reduce and an all-gather whose last rank spoils one element by one."""
    told = []
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
        told.append(sentence(variant, prepare(variant, num_bytes=2400, device=CPU, backend="gloo")))
    return told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_one_wrong_element_is_named(dtype: str) -> None:
    """Operation, dtype, reduction, size, rank and place, told by every rank."""
    answers = run_ranks(check_one_wrong_element, 3, dtype)
    assert answers == [answers[0]] * 3
    for told, name in zip(
        answers[0], (f"all_reduce_{dtype}_sum", f"all_gather_{dtype}"), strict=True
    ):
        assert told.startswith(f"{name} of 2400 bytes gave a wrong result: rank 2 holds ")
        assert " at element 150 where " in told
        assert "(1 of the " in told


def test_the_tables_have_the_same_names() -> None:
    """What the config may ask for is what can be called."""
    assert set(OPS) == {*OPERATIONS, "barrier"}
    assert set(REDUCE_OP_NAMES) == set(REDUCE_OPS)
    assert {op for op in OPERATIONS if OPERATIONS[op].reduces} == {
        *("reduce", "all_reduce", "reduce_scatter")
    }


@pytest.mark.parametrize("op", FACTORS)
def test_bandwidths_are_those_of_nccl_tests(op: str) -> None:
    """Bytes through the median of the slowest ranks; busbw by the factor of the operation."""
    reduce_op = "sum" if OPERATIONS[op].reduces else None
    by_rank = [[1e-3, 1e-3, 1e-3], [2e-3, 4e-3, 8e-3], [1e-3, 1e-3, 1e-3], [5e-4, 1e-3, 1e-3]]
    row = summary(Variant(op, "float32", reduce_op), 8_000_000, by_rank)
    assert row.latency_us == pytest.approx(
        {"median": 4000.0, "p95": 7600.0, "min": 500.0, "max": 8000.0}
    )
    assert row.algbw_gb_per_s == pytest.approx(2.0)
    assert row.busbw_gb_per_s == pytest.approx(2.0 * FACTORS[op])


def test_a_barrier_has_no_bandwidth() -> None:
    """It moves no data, and is measured once, whatever sizes and dtypes are asked for."""
    row = summary(Variant("barrier"), 0, [[1e-3], [3e-3]])
    assert (row.algbw_gb_per_s, row.busbw_gb_per_s) == (None, None)
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
    """The largest is measured even where the factor does not meet it."""
    config, _ = resolved(*(f"collectives.{key}" for key in keys.split()))
    assert message_sizes(config.collectives) == sizes


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("steps=0", "steps (0) must be 1 or greater"),
        ("warmup_steps=-1", "warmup_steps (-1) must be 0 or greater"),
        ("min_bytes=0", "min_bytes (0) must be 1 or greater"),
        ("max_bytes=-5", "max_bytes (-5) must be 1 or greater"),
        ("size_factor=1", "size_factor (1) must be 2 or greater"),
        ("max_bytes=8", "min_bytes (1024) is greater than collectives.max_bytes (8); give both, "
         "the smaller as min_bytes"),
        ("ops=[allreduce]", f"ops (allreduce) must be among {', '.join(OPS)}; "
         "did you mean all_reduce?"),
        ("dtypes=[float]", f"dtypes (float) must be among {', '.join(DTYPES)}; "
         "did you mean float64?"),
        ("reduce_ops=[avg]", f"reduce_ops (avg) must be among {', '.join(REDUCE_OP_NAMES)}"),
        ("ops=[]", "ops ([]) must name at least one, and none twice; choose from "
         f"{', '.join(OPS)}"),
        ("dtypes=[int8,int8]", "dtypes ([int8, int8]) must name at least one, and none twice; "
         f"choose from {', '.join(DTYPES)}"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_in_one_line(overrides: str, told: str) -> None:
    """Key, value and what is allowed."""
    assert refused(*(f"collectives.{key}" for key in overrides.split())) == f"collectives.{told}"


def test_one_rank_has_nobody_to_talk_to() -> None:
    """The refusal says what to write; other tasks run on one rank as ever."""
    assert refused("task=collectives", "world_size=1") == (
        "task=collectives measures what ranks send each other, world_size is 1; "
        "write world_size=2 or more"
    )
    resolved("world_size=1")


def test_a_reduction_asked_for_by_name_must_be_there() -> None:
    """Refused where no dtype has it; where one has it, the others are rows of the table."""
    mean = {dtype: Variant("reduce", dtype, "mean") for dtype in ("float32", "int32")}
    both = CollectivesConfig(reduce_ops=["sum", "mean"], dtypes=["float32", "int32"])
    validate_reduce_ops(both, {mean["float32"]: None, mean["int32"]: "no"}, backend="gloo")
    with pytest.raises(Exception, match=r"\(mean\) is not in gloo for .*reduce_ops=\[sum\]"):
        validate_reduce_ops(both, {mean["float32"]: "no", mean["int32"]: "no"}, backend="gloo")
    validate_reduce_ops(CollectivesConfig(), dict.fromkeys(mean.values(), "no"), backend="gloo")
