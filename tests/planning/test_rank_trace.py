"""A plan beside reality: real tensors on real ranks, counted by the same tracker."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from unittest.mock import patch

import pytest
from ranks import run_ranks
from tiers import first_of
from train_states import compose_config

from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism import mesh
from ddp_runner.parallelism.mode import Mode, rank_devices
from ddp_runner.planning.rank_trace import RankTrace, planned_dataset, trace_rank, traced
from ddp_runner.planning.step_tracker import Collective, StepTracker
from ddp_runner.train.build_state import build_work

GPT_10M = ("model=gpt_10m", "batch.per_rank=2", "dataset.sequence_length=32")
PP = ("parallelism=pp", "train.grad_accum_steps=4")
GLOO_S = 0.04  # a busy machine wakes its threads late
MODES = [  # keys, world size, tolerance of the peak
    (("parallelism=fsdp",), 2, 0.01),
    (PP, 2, 0.01),
    (("parallelism=ddp",), 2, 0.01),
    (("parallelism=tp",), 2, 0.01),
    (("parallelism=fsdp",), 4, 0.01),
    (("parallelism=ddp",), 4, 0.01),
    (("parallelism=tp", "model.num_heads=4"), 4, 0.01),
    (("parallelism=fsdp_tp",), 4, 0.01),
    (("parallelism=hsdp",), 4, 0.01),
    (("parallelism=fsdp", "train.precision=bf16"), 4, 0.03),
    ((*PP, "parallelism.schedule=gpipe"), 2, 0.01),
    ((*PP, "parallelism.schedule=interleaved", "parallelism.stages_per_rank=2"), 2, 0.01),
    (PP, 4, 0.01),
    (("parallelism=ddp_pp", "train.grad_accum_steps=4"), 4, 0.01),
]


def real_step(env: DistEnv, config: Config) -> RankTrace:
    """Take steps with real tensors, and FSDP's own reduce-scatter in place of gloo's.

    Gloo's threads hold a buffer for a moment after its collective: let them drop it.
    """
    count = StepTracker._count_collective

    def count_and_wait(tracker: StepTracker, *arguments: object) -> None:
        count(tracker, *arguments)
        time.sleep(GLOO_S)

    mode = make("parallelism", config.parallelism, kind=Mode, allowed=config.allowed_targets)
    devices = rank_devices(env, kind="cpu", per_rank=1)
    dataset = planned_dataset(config, log=print)
    with (
        patch.object(mesh.FSDPModule, "set_custom_reduce_scatter", lambda *_: None),
        patch.object(StepTracker, "_count_collective", count_and_wait),
    ):
        work = build_work(config, env, mode, devices=devices, dataset=dataset)
        return traced(work, tensors=nullcontext())


def planned_step(env: DistEnv, config: Config, rank: int) -> RankTrace:
    """Plan the same steps, in a process that is alone."""
    return trace_rank(config, rank=rank, log=print)


@pytest.mark.parametrize(("words", "world_size", "tolerance"), first_of(MODES, num_quick=2))
def test_a_plan_is_what_happens(words: tuple[str, ...], world_size: int, tolerance: float) -> None:
    """FLOP and the bytes of each collective are equal, and the peak is close."""
    config = compose_config(*GPT_10M, *words, world_size=world_size)
    reals = run_ranks(real_step, world_size, config)
    real = min(reals, key=lambda one: one.peak)
    # The ranks of a pipeline differ.
    pairs = enumerate(reals) if "pp" in words[0] else [(0, real)]
    for rank, real in pairs:
        (planned,) = run_ranks(planned_step, 1, config, rank, backend=None)
        assert planned.flops == real.flops
        assert _every_step(planned.calls) == _every_step(real.calls)
        assert _every_step(planned.sent) == _every_step(real.sent)
        assert (planned.parameters, planned.optimizer) == (real.parameters, real.optimizer)
        assert planned.gradients == real.gradients
        assert planned.peak == pytest.approx(real.peak, rel=tolerance)


def _every_step(counts: Mapping[Collective, int]) -> dict[Collective, int]:
    """Leave out the broadcasts with which DDP agrees on its buckets, after the first step alone."""
    return {one: count for one, count in counts.items() if one.kind != "broadcast"}


def test_what_shards_compute_is_counted() -> None:
    """A tensor-parallel rank has half of each block's FLOP, and all of the output layer's.

    DTensor's operators reach a tracker only if it lets DTensor come first.
    """
    words = ("model=gpt", "batch.global_size=2", "dataset.sequence_length=32")
    single, split = (
        run_ranks(planned_step, 1, compose_config(*words, mode, world_size=size), 0, backend=None)[
            0
        ]
        for mode, size in (("parallelism=single", 1), ("parallelism=tp", 2))
    )
    head = 3 * 2 * (2 * 32) * 256 * 128  # three products: tokens x vocabulary x width
    assert split.flops == (single.flops - head) / 2 + head
    assert split.peak >= split.parameters + split.gradients + split.optimizer
    assert [count for one, count in split.calls.items() if one.kind == "all-reduce"] != []
