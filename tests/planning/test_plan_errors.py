"""What cannot be planned is one plain line, before any process starts."""

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from commands import run_command
from configs import config_error, resolved
from ranks import run_ranks
from torch import Tensor
from train_states import compose_config

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.models import gpt
from ddp_runner.planning.rank_trace import trace_rank
from ddp_runner.tracking.run_record import read_run_record

ALIKE = "cannot be planned: one rank on one device must stand for all; write parallelism=fsdp"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("parallelism=ps model=toy", f"parallelism=ps {ALIKE}"),
        ("parallelism=dp", f"parallelism=dp {ALIKE}"),
        ("parallelism=ddp_mp model=convnet_mp", f"parallelism=ddp_mp {ALIKE}"),
        (
            "parallelism=fsdp parallelism.cpu_offload=true",
            "parallelism.cpu_offload=true cannot be planned: a plan counts the memory of GPUs; "
            "write parallelism.cpu_offload=false",
        ),
        (
            "parallelism.sync_batchnorm=true",
            "parallelism.sync_batchnorm=true cannot be planned: it computes on GPUs only; write "
            "parallelism.sync_batchnorm=false",
        ),
        (
            "batch.virtual_ranks=4",
            "batch.virtual_ranks=4 cannot be planned: its sums need the numbers of other ranks; "
            "write batch.virtual_ranks=null",
        ),
        (
            "plan.gpu=b300",
            "plan.gpu (b300) must be h100, h200, a100 or null; for another GPU leave it out, and "
            "write plan.tflops=N plan.memory_gib=N plan.ranks_per_node=N plan.node_gb_s=N "
            "plan.net_gb_s=N plan.latency_us=N",
        ),
        (
            "plan.rank=4",
            "task=plan needs a world_size (4) greater than plan.rank (4); write world_size=64",
        ),
        (
            "batch.global_size=101",
            "batch.global_size (101) is not divisible by world_size (4); use 100 or 104",
        ),
    ],
)
def test_what_cannot_be_planned(words: str, sentence: str) -> None:
    """Rule, reason and fix."""
    assert config_error("task=plan", "world_size=4", *words.split()) == sentence


def test_a_plan_needs_no_machine() -> None:
    """Neither its cores, nor its GPUs, nor a batch that divides; torchrun starts no plan."""
    config, warnings = resolved(
        *("task=plan", "world_size=4096", "model=gpt_7b", "parallelism=fsdp"),
        *("train.precision=bf16", "launch.nnodes=512"),
    )
    assert (config.world_size, config.num_processes, config.launch.nnodes) == (4096, 1, 1)
    assert (config.batch.per_rank, config.batch.global_size) == (1, 4096)
    assert warnings == ["the default batch of 32 is not divisible by 4096: batch.per_rank is 1"]
    torchrun = DistEnv(0, 0, 2, 2, launcher="torchrun")
    assert config_error("task=plan", "world_size=2", env=torchrun) == (
        "task=plan runs in one process of its own, and torchrun starts ranks; leave torchrun out"
    )


def test_a_plan_is_a_run(tmp_path: Path) -> None:
    """One process plans 64 ranks in fp16; run.json has their number, metrics and collectives."""
    words = ("model=gpt", "parallelism=ddp", "train.precision=fp16", "train.grad_accum_steps=2")
    ended = run_command("task=plan", "world_size=64", *words, "plan.gpu=h100", folder=tmp_path)
    assert ended.exit_code == 0, ended.stderr
    record = read_run_record(ended.run_dir)
    assert (record["world_size"], record["num_devices"], record["task"]) == (64, 64, "plan")
    assert record["metrics"]["plan/gradients_gib"] == record["metrics"]["plan/parameters_gib"]
    assert record["metrics"]["plan/optimizer_gib"] > record["metrics"]["plan/parameters_gib"]
    assert record["metrics"]["plan/step_ms"] > record["metrics"]["plan/step_ms_overlapped"]
    assert {one["group_size"] for one in record["planned_collectives"]} == {64}
    assert record["verdict"].startswith("fits: ")
    assert record["verdict"] in ended.stdout
    assert len([*(ended.run_dir / "logs").glob("rank*")]) == 1
    assert max(map(len, ended.stdout.splitlines())) <= 100


STREAM = (
    *("model=toy", "dataset=torch_dataset", "allowed_targets=[own_streams]"),
    "dataset.train={_target_:own_streams.Plain,size:23}",
    "dataset.eval={_target_:own_streams.Plain,size:7}",
)


def error_of_trace(env: DistEnv, config: Config, *, reads_numbers: bool) -> str:
    """Trace rank 0; return the mistake."""

    def rotate(features: Tensor, rotary: Tensor) -> Tensor:
        return features * (len(features.nonzero()) if reads_numbers else 1)

    try:
        with patch.object(gpt, "rotate", rotate):
            trace_rank(config, rank=0, log=print)
    except UserError as error:
        return str(error)
    return ""


def test_a_trace_needs_shapes_alone() -> None:
    """A stream has no number of samples; a model that reads numbers has no shapes without them."""
    config = compose_config(*STREAM, "parallelism=single")
    (sentence,) = run_ranks(partial(error_of_trace, reads_numbers=False), 1, config, backend=None)
    assert sentence == (
        f"dataset={config.dataset['name']} cannot be planned: it is a stream, which has no number "
        "of samples; write a dataset with __len__, such as dataset=text"
    )
    config = compose_config("model=gpt", "parallelism=single")
    trace = (
        partial(error_of_trace, reads_numbers=False),
        partial(error_of_trace, reads_numbers=True),
    )
    assert run_ranks(trace[0], 1, config, backend=None) == [""]
    assert run_ranks(trace[1], 1, config, backend=None) == [
        "model=gpt cannot be planned: its step reads numbers of tensors (aten.nonzero.default); "
        "compute without them, or measure a run of a few steps"
    ]
