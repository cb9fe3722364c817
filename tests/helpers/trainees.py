"""What the ranks of a test train: a composed config, its trainee, and two ways to step it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from ddp_runner.checkpoint.store import save_checkpoint
from ddp_runner.cli.compose import register
from ddp_runner.config.instantiate import make
from ddp_runner.config.load import chosen_keys, to_config
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import CONFIG_DIR, Config
from ddp_runner.data.cache import load_dataset
from ddp_runner.data.dataset import Dataset, Split
from ddp_runner.dist_env import DistEnv
from ddp_runner.host.hardware import Hardware
from ddp_runner.train.build import build_trainee
from ddp_runner.train.loop import Control, Position, train
from ddp_runner.train.roles import take_part
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.step import Trainee, global_loss, train_step

MACHINE = Hardware(num_gpus=0, num_cores=4)  # the same on every machine that runs the tests
# 27 samples: with 8 a step an epoch has three whole batches and one of three samples.
SMALL = ("dataset.num_samples=27", "batch.global_size=8", "optimizer.lr=0.05")
TOY = ("model=toy", *SMALL)
MNIST_NET = ("model=mnist_net", "dataset=fake_images", "optimizer.momentum=0.9", *SMALL)
NO_DROPOUT = ("model.dropout1=0.0", "model.dropout2=0.0")
STEPS_PER_EPOCH = 4
# Of losses and weights after some ten steps that differ by rounding alone, as they do between world
# sizes, micro-batches, shapes or numbers of threads: more than fifty times what was measured.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.float64: {"rtol": 1e-13, "atol": 1e-14},
}


@dataclass
class Trace:
    """What a run leaves on one rank; also the reporter that records it."""

    losses: list[float] = field(default_factory=list)  # of each step, over the global batch
    lines: list[dict[str, float]] = field(default_factory=list)  # as logged, with their step
    said: list[str] = field(default_factory=list)
    saved_steps: list[int] = field(default_factory=list)
    saved: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics by step, no perf/
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))  # flat
    position: Position = field(default_factory=Position)
    status: str = ""
    error: str = ""

    def log(self, metrics: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Record a line."""
        self.lines.append({"step": step, **metrics})

    def first_loss(self, loss: float) -> None:
        """Do nothing."""

    def step_done(self, *, step: int, epoch: int) -> None:
        """Do nothing."""

    def evaluated(self, confusion: list[list[int]] | None, *, step: int) -> None:
        """Do nothing."""


def compose_config(*overrides: str, world_size: int = 1) -> Config:
    """Return the resolved config of a command line, as for a machine of four cores."""
    register()
    keys = [f"world_size={world_size}", "backend.device=cpu", *overrides]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        raw = compose("config", keys)
    return resolve(to_config(raw), hardware=MACHINE, chosen=chosen_keys(keys))[0]


def build(env: DistEnv, config: Config) -> Trainee:
    """Build one rank's trainee as a run does. Collective: every rank must call.

    Its samples have torch's default dtype, as its parameters do.
    """
    source = make("dataset", config.dataset)
    data_root = Path(config.data_root)
    dataset = load_dataset(source, data_root=data_root, log=lambda _: None)
    if torch.get_default_dtype() != torch.float32:
        dataset = replace(
            dataset, train=_cast(dataset, dataset.train), eval=_cast(dataset, dataset.eval)
        )
    mode = make("parallelism", config.parallelism)
    devices = mode.devices(env, kind=config.backend.device)
    return build_trainee(config, env, mode=mode, devices=devices, dataset=dataset)


def _cast(dataset: Dataset, split: Split) -> Split:
    dtype, targets = torch.get_default_dtype(), split.targets
    if targets.is_floating_point():
        targets = targets.to(dtype)
    return Split(dataset.normalize(split.inputs).to(dtype), targets)


def flat_weights(module: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def equal(one: Any, other: Any) -> bool:
    """Compare two states, tensors bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def take_steps(
    env: DistEnv, config: Config, num_steps: int, *, trainee: Trainee | None = None
) -> Trace:
    """Take steps from the first epoch on. Collective: every rank must call."""
    trainee, trace = trainee or build(env, config), Trace()
    part = take_part(
        trainee,
        env,
        seed=config.seed,
        position=Position(),
        num_steps=num_steps,
        timeout_s=240,
        ended=set,
        log=trace.said.append,
    )
    if isinstance(part, str):
        trace.weights = flat_weights(trainee.module)
        return trace
    trainee = part
    while len(trace.losses) < num_steps:
        for batch in trainee.batches.epoch(len(trace.losses) // trainee.batches.steps_per_epoch):
            step = len(trace.losses) + 1
            trace.losses.append(global_loss(trainee, train_step(trainee, batch), step=step))
            if step == num_steps:
                break
    if trainee.gradients is not None:
        trainee.gradients.close("completed")
    trace.weights = flat_weights(trainee.module)
    return trace


def run_loop(
    env: DistEnv,
    config: Config,
    *,
    max_steps: int | None,
    folder: Path | None = None,
    stop_after: int | None = None,
    trainee: Trainee | None = None,
) -> Trace:
    """Run the training loop, from the newest checkpoint on if there is one. Collective.

    Args:
        env: this rank's place.
        config: resolved.
        max_steps: where the loop ends; None: where the config says.
        folder: of the checkpoints; None: they are counted, not written.
        stop_after: the step from which the last rank, and only it, wants to stop.
        trainee: one that is built already.

    Returns:
        The trace; an error of the loop is its `error`.
    """
    trainee, trace, position = trainee or build(env, config), Trace(), Position()
    if folder is not None:
        restore(trainee, position, config, folder, log=trace.said.append)

    def save(position: Position, metrics: dict[str, float]) -> None:
        state = snapshot(trainee, position, config)
        trace.saved_steps.append(position.step)
        trace.saved[position.step] = {k: v for k, v in metrics.items() if "perf/" not in k}
        if folder is not None and env.is_rank_zero:
            save_checkpoint(
                folder,
                state,
                step=position.step,
                metrics=metrics,
                keep=config.checkpoint.keep,
                monitor=None,
                mode="max",
                log=trace.said.append,
            )

    def stop_requested() -> bool:
        is_last = env.rank == env.world_size - 1
        return stop_after is not None and is_last and position.step >= stop_after

    if max_steps is None:
        steps_per_epoch = trainee.batches.steps_per_epoch
        max_steps = position.last_step(config.train, steps_per_epoch=steps_per_epoch)
    part = take_part(
        trainee,
        env,
        seed=config.seed,
        position=position,
        num_steps=max(0, max_steps - position.step),
        timeout_s=240,
        ended=set,
        log=trace.said.append,
    )
    if isinstance(part, str):  # this rank has served the loop
        trace.status, trace.weights = part, flat_weights(trainee.module)
        return trace
    trainee = part
    control = Control(
        max_steps=max_steps,
        save_every_steps=config.checkpoint.every_steps,
        save_every_epochs=config.checkpoint.every_epochs,
        save=save,
        stop_requested=stop_requested,
    )
    try:
        trace.status = train(trainee, position=position, control=control, logger=trace)
    except ValueError as error:
        trace.error = f"{type(error).__name__}: {error}"
    if trainee.gradients is not None and trace.status:
        trainee.gradients.close(trace.status)
    trace.losses = [line["train/loss"] for line in trace.lines if "train/loss" in line]
    trace.weights, trace.position = flat_weights(trainee.module), position
    return trace
