"""The first lines of a run: they fit a terminal, and explain the words only when asked to."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import resolved
from torch import nn

from ddp_runner.config.identity import config_hash, work_hash
from ddp_runner.config.schema import RunConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.job import Job
from ddp_runner.tracking.start_block import fact_lines, shown_path, starting_lines, word_lines
from ddp_runner.train.train_task import training_facts

RUN = Path("outputs/mobilenet_v3_small-fashion_mnist-ddp_mp-ws128/2026-11-21_10-30-00")
WORDS = ("world size", "rank", "local rank", "node rank", "timeout", "versions")


def block(config: RunConfig, env: DistEnv, num_trained: int = 11_173_962) -> list[str]:
    """Return the names and the facts of a training, as lines."""
    train, evaluation = SimpleNamespace(num_samples=60_000), SimpleNamespace(num_samples=10_000)
    dataset = SimpleNamespace(name="fashion_mnist", train=train, eval=evaluation)
    work = SimpleNamespace(config=config, dataset=dataset, devices=[torch.device("cpu")])
    steps = {"steps_per_epoch": 600, "grad_accum_steps": config.train.grad_accum_steps}
    batches = SimpleNamespace(num_shares=env.world_size, **steps)
    state: Any = SimpleNamespace(work=work, batches=batches, final_step=12_345)
    trained, frozen = (
        nn.Parameter(torch.empty(size, device="meta"), requires_grad=is_trained)
        for size, is_trained in ((num_trained, True), (11_173_962 - num_trained, False))
    )
    return fact_lines(training_facts(env, state, [trained, frozen])).splitlines()


def test_the_facts_and_the_words_of_a_run_fit_80_columns() -> None:
    """A few lines each."""
    config = resolved("train.grad_accum_steps=2", "world_size=8")[0]
    env = DistEnv(rank=0, local_rank=0, world_size=8, local_world_size=4)
    versions = {"torch": "2.15.0+cu132", "python": "3.11.7"}
    words = word_lines(config, env, device=torch.device("cpu"), versions=versions).splitlines()
    facts = block(config, env, num_trained=5_130)
    assert facts[0] == "model        convnet, 11,173,962 parameters (5,130 trained), fp32"
    assert block(config, env)[0] == "model        convnet, 11,173,962 parameters, fp32"
    assert max(map(len, [*facts, *words])) <= 80
    names = ("model", "data", "parallelism", "batch", "steps")
    assert tuple(line[:12].strip() for line in facts) == names
    assert tuple(line[:12].strip() for line in words) == WORDS
    assert "8 ranks on 2 nodes (" in facts[2]


def test_one_rank_is_written_in_the_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of one has no plural."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    env = DistEnv(rank=0, local_rank=0, world_size=1, local_world_size=1)
    line = block(resolved("world_size=1")[0], env)[2]
    assert line == "parallelism  ddp, gloo, 1 rank on 1 node (2 CPU threads)"


def test_ranks_that_compute_the_same_samples_are_a_group() -> None:
    """A batch is split among the groups, not among the ranks."""
    config = resolved("model=toy", "parallelism=fsdp_tp", "world_size=4", "batch.per_rank=5")[0]
    env = DistEnv(rank=0, local_rank=0, world_size=2, local_world_size=2)  # two shares
    assert block(config, env)[3] == "batch        10 a step = 5 a group x 2 groups of 2 ranks"


def test_the_first_line_says_what_starts_and_where(tmp_path: Path) -> None:
    """Before torch is imported; the folder as short as the user's own folder allows."""
    job = Job(
        config=resolved("world_size=2")[0], started_at=time.time(), provenance={}, run_dir=RUN
    )
    assert starting_lines(job).splitlines() == [
        f"run          {RUN}",
        "starting 2 ranks, gloo on CPU; importing torch …",
    ]
    nodes = resolved("world_size=4", "launch.nnodes=2", "launch.rdzv_endpoint=here:1")[0]
    (line,) = starting_lines(replace(job, config=nodes, run_dir=None)).splitlines()
    assert line == "starting 4 ranks on 2 nodes, gloo on CPU; importing torch …"
    assert shown_path(Path.cwd() / "outputs" / "a") == Path("outputs/a")
    assert shown_path(tmp_path) == tmp_path


def test_how_much_is_shown_is_no_part_of_a_runs_identity() -> None:
    """A run that is resumed or compared is the same with and without it."""
    plain, verbose = (resolved(f"verbose={value}")[0] for value in (False, True))
    assert config_hash(plain) == config_hash(verbose)
    assert work_hash(plain) == work_hash(verbose)
