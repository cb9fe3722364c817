"""Averaged weights follow torch's formula, survive a resume, and are evaluated and exported."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from orders import steps_of
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from train_states import (
    MNIST_NET,
    STEPS_PER_EPOCH,
    TOY,
    Trace,
    build,
    compose_config,
    equal,
    evaluated,
    flat_weights,
    kept_in,
    run_loop,
    take_steps,
    with_work,
)

from ddp_runner.checkpoint.store import load_checkpoint
from ddp_runner.checkpoint.weights import averaged_weights
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.train.best_model import export_best
from ddp_runner.train.ema import Ema
from ddp_runner.train.loop import take_step
from ddp_runner.train.snapshot import snapshot

NUM_STEPS = 6
DECAY = "ema.decay=0.5"


class Buffered(nn.Module):
    """Has every kind of buffer: statistics, whole numbers, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("positions", torch.arange(100))
        self.register_buffer("mask", torch.full((2,), -torch.inf))


def test_statistics_are_averaged_and_other_buffers_copied() -> None:
    """The average of two whole numbers would be rounded down, and that of two masks be NaN."""
    module = Buffered()
    ema = Ema(module, decay=0.9, build=Buffered)
    expected = 0.0
    for step in range(3):
        running_mean = module.norm.running_mean
        assert running_mean is not None
        running_mean.fill_(float(step))
        module.norm.num_batches_tracked = torch.tensor(step)
        expected = float(step) if step == 0 else 0.9 * expected + 0.1 * step
        ema.update(module)
    found = ema.module.state_dict()
    assert found["norm.running_mean"].tolist() == pytest.approx([expected] * 2)
    assert equal(found["positions"], module.state_dict()["positions"])
    assert equal(found["mask"], module.state_dict()["mask"])
    assert int(found["norm.num_batches_tracked"]) == 2


def averages(env: DistEnv, config: Config) -> tuple[Tensor, Tensor]:
    """Return the averaged weights after some steps, and what the formula gives."""
    state, expected = build(env, config), torch.zeros(0)
    assert state.ema is not None
    batches = state.batches
    for number in range(NUM_STEPS):
        take_step(state, batches.step_at(number % STEPS_PER_EPOCH))
        weights = flat_weights(state.module)
        expected = weights if number == 0 else expected.lerp(weights, 0.5)
    return flat_weights(state.ema.module), expected


@pytest.mark.parametrize(
    "keys",
    [("parallelism=single",), ("parallelism=ddp", "params.freeze=[net1.*]"),
     ("model=toy_mp", "parallelism=ddp_mp"), ("parallelism=fsdp",), ("parallelism=tp",)],
    ids=lambda keys: keys[-1],
)  # fmt: skip
def test_the_average_follows_the_formula(keys: tuple[str, ...]) -> None:
    """On every rank alike, with frozen parameters and in a model of two stages."""
    world_size = 1 if "single" in keys[0] else 2
    config = compose_config(*TOY, DECAY, *keys, world_size=world_size)
    for found, expected in run_ranks(averages, world_size, config):
        assert torch.equal(found, expected)


def skipped(env: DistEnv, config: Config) -> tuple[int, int]:
    """Take steps whose scaled gradients overflow at first; return updates and averaged steps."""
    state, updates = build(env, config), 0
    large = state.work.step_fn

    def step(model: nn.Module, batch: Any) -> Any:
        found = large(model, batch)
        return replace(found, loss_sum=2.0**20 * found.loss_sum)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-30)
    state = replace(with_work(state, step_fn=step), scaler=scaler)
    assert state.ema is not None
    for batch in steps_of(state.batches):
        before = flat_weights(state.module)
        take_step(state, batch)
        updates += not torch.equal(before, flat_weights(state.module))
    return updates, int(state.ema.averaged.n_averaged)


def test_a_step_that_the_scaler_skipped_is_not_averaged() -> None:
    """It changed no weight, and would count the old ones twice."""
    ((updates, averaged),) = run_ranks(skipped, 1, compose_config(*TOY, DECAY))
    assert 0 < updates == averaged < STEPS_PER_EPOCH


def loop(env: DistEnv, config: Config, folder: Path, stop_after: int | None = None) -> Trace:
    """Run from the newest checkpoint to the end or a stop."""
    return run_loop(env, config, max_steps=NUM_STEPS, folder=folder, stop_after=stop_after)


@pytest.mark.full
def test_a_resumed_run_has_the_same_average_bit_for_bit(tmp_path: Path) -> None:
    """With its metrics, which are the average's."""
    config = compose_config(*MNIST_NET, DECAY, "train.log_every_steps=1", world_size=2)
    (whole, _) = run_ranks(loop, 2, config, tmp_path / "whole")
    first, _ = run_ranks(loop, 2, config, tmp_path / "cut", 3)
    rest, _ = run_ranks(loop, 2, config, tmp_path / "cut")
    name = f"step-{NUM_STEPS:08d}"
    one, other = (load_checkpoint(tmp_path / run / name)["objects"] for run in ("whole", "cut"))
    assert "module.conv1.weight" in one["ema"]
    assert equal(one["ema"], other["ema"])
    losses = [
        [line["eval/loss"] for trace in traces for line in trace.lines if "eval/loss" in line]
        for traces in ((whole,), (first, rest))
    ]
    assert losses[0] == losses[1]


def evaluations(env: DistEnv, config: Config) -> dict[str, float]:
    """Return the loss of a state's evaluation, and those of its trained and averaged weights."""
    state = build(env, config)
    take_steps(env, config, NUM_STEPS, state=state)
    found = {"state": evaluated(state)[0]["eval/loss"]}
    assert state.ema is not None
    for name, module in (("trained", state.module), ("average", state.ema.module)):
        other = replace(state, ema=None, module=copy.deepcopy(module))
        found[name] = evaluated(other)[0]["eval/loss"]
    return found


@pytest.mark.parametrize(("key", "name"), [("true", "average"), ("false", "trained")])
def test_evaluations_are_of_the_average_if_asked(key: str, name: str) -> None:
    """The other one has another loss."""
    config = compose_config(*TOY, DECAY, f"ema.evaluate={key}", world_size=2)
    for found in run_ranks(evaluations, 2, config):
        assert found["state"] == found[name]
        assert found["trained"] != found["average"]


def export(env: DistEnv, config: Config, run_dir: Path) -> tuple[Tensor, Tensor, list[str]]:
    """Train, and export; return the trained weights, the evaluated ones, and what was logged."""
    state = build(env, config)
    trace = run_loop(env, config, max_steps=8, folder=run_dir / "checkpoints", state=state)
    trained = flat_weights(state.module).clone()
    export_best(state, RunDir(run_dir), kept_in(run_dir, trace), log=trace.logged.append)
    return trained, flat_weights(state.evaluated), trace.logged


# The rate is highest at the first checkpoint.
BEST = ("checkpoint.monitor=train/lr", "checkpoint.load_best=true", "scheduler=cosine")


@pytest.mark.parametrize(("keys", "step"), [((), 8), (BEST, 4)], ids=["last", "best"])
def test_the_average_is_exported_and_says_so(
    tmp_path: Path, keys: tuple[str, ...], step: int
) -> None:
    """Of the best checkpoint as well, which every rank loads."""
    config = compose_config(*TOY, DECAY, "train.log_every_steps=1", *keys, world_size=2)
    (trained, evaluated, _), (_, other, _) = run_ranks(export, 2, config, tmp_path)
    path = tmp_path / "model.safetensors"
    content = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}")
    assert equal(load_file(path), averaged_weights(content["objects"]["ema"]))
    with safe_open(path, "pt") as file:
        assert (file.metadata()["weights"], file.metadata()["step"]) == ("ema", str(step))
    assert torch.equal(evaluated, other)
    assert not torch.equal(trained, evaluated)


def parts_of(env: DistEnv, config: Config) -> tuple[bool, list[str]]:
    """Return whether a state has an average, and the parts of its snapshot."""
    state = build(env, config)
    return state.ema is None, sorted(snapshot(state)["objects"])


def test_without_the_key_there_is_no_copy() -> None:
    """Neither memory nor a checkpoint holds one."""
    ((is_off, parts),) = run_ranks(parts_of, 1, compose_config(*TOY))
    assert is_off
    assert "ema" not in parts


def serve(env: DistEnv, config: Config) -> int | None:
    """Train under a parameter server; return how many steps this rank has averaged."""
    state = build(env, config)
    run_loop(env, config, max_steps=NUM_STEPS, state=state)
    return None if state.ema is None else int(state.ema.averaged.n_averaged)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_parameter_server_alone_has_the_average(mode: str) -> None:
    """It takes the steps; a trainer gets its parameters with each batch."""
    keys = ("parallelism=ps", f"parallelism.mode={mode}", "batch.global_size=8")
    config = compose_config(*TOY, DECAY, *keys, world_size=3)
    assert run_ranks(serve, 3, config) == [NUM_STEPS, None, None]
