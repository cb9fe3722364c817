"""Training on a stream: steps that all ranks agree on, ends of any kind, and exact resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from orders import steps_of
from ranks import run_ranks
from train_states import TOLERANCES, Trace, build, compose_config, run_loop

from ddp_runner.check.check_task import run_checks
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.train.first_batch import try_first_batch
from ddp_runner.train.step import supervised

OF_STREAM = (
    "dataset=torch_dataset",
    "dataset.eval={_target_:own_streams.Plain,size:7}",
    "model=toy",
    "model._target_=torch.nn.Linear",
    "+model.in_features=4",
    "+model.out_features=1",
    "train.step=own_streams.numbered",
    "optimizer.lr=0.01",
    "train.log_every_steps=1",
    "allowed_targets=[own_streams]",
)
PLAIN = (*OF_STREAM, "dataset.train={_target_:own_streams.Plain,size:23}")
QUIET = (*OF_STREAM, "dataset.train={_target_:own_streams.Plain,size:23,draws:false}")
# Rank 0 has 3 samples, rank 1 has 14.
UNEVEN = (*OF_STREAM, "dataset.train={_target_:own_streams.Sharded,sizes:[1,9,2,5]}")
EMPTY_RANK = (*OF_STREAM, "dataset.train={_target_:own_streams.Sharded,sizes:[0,9,0,5]}")
ENDLESS = (*OF_STREAM, "dataset.train={_target_:own_streams.Stateful,size:null}")


def config_of(*keys: str, world_size: int = 2) -> Config:
    """Return a resolved config."""
    return compose_config(*keys, world_size=world_size)


def steps(env: DistEnv, config: Config, num_epochs: int) -> list[list[dict[str, Any]]]:
    """Return what this rank has of each step of each epoch."""
    batches = build(env, config).batches
    return [
        [
            {
                "numbers": [
                    int(number)
                    for part in step.micro_batches
                    if part.weight
                    for number in part.data[1].unique()
                ],
                "sizes": [(part.num_samples, part.weight) for part in step.micro_batches],
                "count": step.global_count,
                "is_last": step.is_last,
            }
            for step in steps_of(batches, epoch)
        ]
        for epoch in range(num_epochs)
    ]


@pytest.mark.parametrize("keys", [PLAIN, UNEVEN, EMPTY_RANK], ids=["plain", "uneven", "empty"])
def test_every_sample_counts_once_an_epoch(keys: tuple[str, ...]) -> None:
    """With equally many micro-batches on all ranks, whichever rank ends first."""
    config = config_of(*keys, "batch.per_rank=2", "train.grad_accum_steps=2")
    of_ranks = run_ranks(steps, 2, config, 2)
    size = {PLAIN: 23, UNEVEN: 17, EMPTY_RANK: 14}[keys]
    for epochs in zip(*of_ranks, strict=True):
        found = sorted(n for rank in epochs for step in rank for n in step["numbers"])
        assert found == list(range(size))
        for own, other in zip(*epochs, strict=True):
            assert len(own["sizes"]) == len(other["sizes"]) <= 2
            assert own["count"] == other["count"] == len(own["numbers"]) + len(other["numbers"])
        assert [step["is_last"] for step in epochs[0]] == [False] * (len(epochs[0]) - 1) + [True]
        assert len(epochs[0][0]["sizes"]) == 2


def train(env: DistEnv, config: Config, **keys: Any) -> Trace:
    """Run the loop to the config's end."""
    return run_loop(env, config, max_steps=keys.pop("max_steps", None), **keys)


@pytest.mark.parametrize(
    "keys",
    [(), ("train.grad_accum_steps=2",), ("batch.count=tokens",)],
    ids=["whole", "accumulated", "tokens"],
)
def test_ranks_take_the_steps_of_one_process(keys: tuple[str, ...]) -> None:
    """Two ranks without workers split each step's samples, to the last one of an odd number."""
    config = (*QUIET, "batch.global_size=4", "train.epochs=2")
    (alone,) = run_ranks(train, 1, config_of(*config, world_size=1))
    together = run_ranks(train, 2, config_of(*config, *keys))
    assert (alone.status, alone.progress.step, alone.place) == ("completed", 12, (2, 0))
    for trace in together:
        assert trace.stand == alone.stand
        assert torch.allclose(trace.weights, alone.weights, **TOLERANCES[torch.float32])
        assert trace.losses == pytest.approx(alone.losses, rel=1e-5)
    evaluated = [line for line in together[0].lines if "eval/loss" in line]
    assert [line["step"] for line in evaluated] == [6, 12]
    assert evaluated[0]["eval/numbers"] == pytest.approx(sum(range(7)) / 7)


def test_an_endless_stream_ends_at_max_steps() -> None:
    """It is evaluated once, at the end."""
    config = config_of(*ENDLESS, "batch.per_rank=2", "train.max_steps=5")
    for trace in run_ranks(train, 2, config):
        assert (trace.status, trace.progress.step, trace.place) == ("completed", 5, (0, 5))
        assert [line["step"] for line in trace.lines if "eval/loss" in line] == [5]


def interrupted(env: DistEnv, config: Config, folder: Path, stops: list[int]) -> list[Trace]:
    """Stop a run after each of these steps, resume it each time, and let it end."""
    return [
        run_loop(env, config, max_steps=None, folder=folder, stop_after=stop)
        for stop in (*stops, None)
    ]


RESUMED = {
    "replayed": (PLAIN, [3, 5], 6),
    "stateful": ((*OF_STREAM, "dataset.train={_target_:own_streams.Stateful,size:23}"), [2, 8], 6),
    # Rank 0's part ends before the stop; then the stop is after the last step of an epoch.
    "uneven": ((*UNEVEN, "dataset.shuffle_buffer=4"), [3, 7], 7),
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_run_equals_one_that_nobody_stopped(kind: str, tmp_path: Path) -> None:
    """Amid an epoch and at its end: bit for bit, with the draws of the model and the stream."""
    keys, stops, steps_per_epoch = RESUMED[kind]
    config = config_of(*keys, "batch.per_rank=2", "train.epochs=2")
    whole = run_ranks(train, 2, config)
    for traces, expected in zip(
        run_ranks(interrupted, 2, config, tmp_path, stops), whole, strict=True
    ):
        assert [trace.status for trace in traces] == ["preempted"] * 2 + ["completed"]
        # A vote is counted in the next step.
        assert [trace.progress.step for trace in traces] == [
            *(stop + 1 for stop in stops),
            2 * steps_per_epoch,
        ]
        lines = [line for trace in traces for line in trace.lines]
        for line, wanted in zip(lines, expected.lines, strict=True):
            assert {k: v for k, v in line.items() if "perf/" not in k} == {
                k: v for k, v in wanted.items() if "perf/" not in k
            }
        assert torch.equal(traces[-1].weights, expected.weights)


def resume_error(env: DistEnv, config: Config, folder: Path) -> str:
    """Resume a run; return its error, else its status."""
    try:
        return run_loop(env, config, max_steps=None, folder=folder).status
    except UserError as error:
        return str(error)


def test_other_ranks_or_workers_resume_between_epochs_only(tmp_path: Path) -> None:
    """Inside an epoch the error names both numbers and the fix."""
    keys = (*PLAIN, "batch.global_size=4", "train.epochs=2")
    amid, between = tmp_path / "amid", tmp_path / "between"
    run_ranks(stopped, 2, config_of(*keys), amid, 2)
    run_ranks(stopped, 2, config_of(*keys, "train.epochs=1"), between, None)
    (error,) = run_ranks(resume_error, 1, config_of(*keys, world_size=1), amid)
    assert (
        "it was saved inside epoch 1 with ranks with samples of their own=2, samples of a "
        "micro-batch=2, and this run has ranks with samples of their own=1, samples of a "
    ) in error
    errors = run_ranks(resume_error, 2, config_of(*keys, "dataset.num_workers=1"), amid)
    assert all(
        "dataset.num_workers=0, and this run has dataset.num_workers=1: " in error
        for error in errors
    )
    smaller = config_of(*keys, "train.grad_accum_steps=2")
    errors = run_ranks(resume_error, 2, smaller, amid)
    assert all("and this run has samples of a micro-batch=1: " in error for error in errors)
    other = config_of(*keys, "dataset.num_workers=1", world_size=1)
    assert run_ranks(resume_error, 1, other, between) == ["completed"]


def stopped(env: DistEnv, config: Config, folder: Path, stop: int | None) -> Trace:
    """Run until a stop."""
    return run_loop(env, config, max_steps=None, folder=folder, stop_after=stop)


def messages(env: DistEnv, wrong: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Return what training says of each command line."""
    found = {}
    for name, keys in wrong.items():
        try:
            found[name] = run_loop(env, config_of(*keys), max_steps=None).error
        except UserError as error:
            found[name] = str(error)
    return found


def test_what_a_stream_cannot_do_is_one_line(tmp_path: Path) -> None:
    """With the fix, on all ranks."""
    once = f"dataset.train={{_target_:own_streams.Once,size:4,folder:{tmp_path}}}"
    wrong = {
        "servers": (*PLAIN, "parallelism=ps"),
        "cosine": (*PLAIN, "scheduler=cosine"),
        "step": (*PLAIN, "scheduler=step", "train.max_steps=5"),
        "once": (*OF_STREAM, once, "train.epochs=3"),
        "no sample": (*OF_STREAM, "dataset.train={_target_:own_streams.Plain,size:0}"),
        "no evaluation": (*PLAIN, "dataset.eval={_target_:own_streams.Plain,size:0}"),
    }
    for found in run_ranks(messages, 2, wrong):
        assert "parallelism=ps gives out batches by number" in found["servers"]
        assert found["cosine"] == (
            "scheduler=cosine needs total_steps, which is unknown for a stream such as "
            "dataset=torch_dataset; write train.max_steps"
        )
        assert "needs steps_per_epoch" in found["step"]
        assert "the train stream has no sample in epoch 2; let its __iter__" in found["once"]
        assert "the train stream has no sample" in found["no sample"]
        assert "has no eval samples; give at least 1" in found["no evaluation"]


def test_a_schedule_of_steps_works_with_max_steps() -> None:
    """Also one that could take the steps of an epoch instead."""
    one_cycle = (
        "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR",
        "+scheduler.max_lr=0.1",
        "+scheduler.epochs=null",
    )
    for keys in (("scheduler=cosine",), one_cycle):
        config = config_of(*PLAIN, *keys, "train.max_steps=3", world_size=1)
        (trace,) = run_ranks(train, 1, config)
        assert (trace.status, trace.progress.step) == ("completed", 3)


def trial(env: DistEnv, config: Config) -> tuple[float, list[list[dict[str, Any]]]]:
    """Try the first batch, and then read an epoch."""
    found = try_first_batch(build(env, config)).once
    return found, steps(env, config, 1)


def test_the_trial_uses_up_no_sample() -> None:
    """All ranks try the same two samples, and the epoch still begins with them."""
    results = run_ranks(trial, 2, config_of(*QUIET, "batch.per_rank=3"))
    assert results[0][0] == results[1][0]
    firsts = sorted(n for _, epochs in results for n in epochs[0][0]["numbers"])
    assert firsts == [0, 1, 2, 3, 4, 5]


def checked(env: DistEnv, config: Config) -> list[tuple[str, bool, str]]:
    """Return the findings of task=check."""
    return [(one.name, one.ok, one.detail) for one in run_checks(build(env, config))]


def test_the_check_skips_what_needs_numbers() -> None:
    """And says so; the rest holds."""
    for findings in run_ranks(checked, 2, config_of(*QUIET, "batch.per_rank=2")):
        assert all(ok for _, ok, _ in findings)
        details = [detail for _, _, detail in findings]
        assert details.count("not checked: the samples of a stream have no numbers") == 2
        assert len(findings) > 8


def test_the_ordinary_step_takes_a_stream() -> None:
    """A pair of inputs and targets, as from any dataset."""
    keys = [key for key in PLAIN if not key.startswith("train.step")]
    config = config_of(*keys, "batch.per_rank=4", "train.epochs=1", world_size=1)
    (trace,) = run_ranks(train, 1, config)
    assert supervised.__name__ in config.train.step
    assert (trace.status, trace.progress.step) == ("completed", 6)
