"""Build the train state of a rank from a command line, and train it by steps or by the loop."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from configs import resolved
from torch import Tensor, nn

from ddp_runner import distributed
from ddp_runner.checkpoint.model_file import export_weights
from ddp_runner.checkpoint.shard_notes import Shards
from ddp_runner.checkpoint.store import save_checkpoint
from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config, mode_needs
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.load_dataset import build_dataset
from ddp_runner.data.splits import TensorSplit
from ddp_runner.data.stream import Split
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.files import json_safe
from ddp_runner.job import Status
from ddp_runner.parallelism.mode import Mode, rank_devices
from ddp_runner.parallelism.shards import full_tensor
from ddp_runner.parallelism.virtual_ranks import with_virtual_ranks
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.train.build_state import build_state, build_work
from ddp_runner.train.evaluation import evaluate
from ddp_runner.train.loop import build_engine, take_step, train
from ddp_runner.train.progress import Progress
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.state import TrainState
from ddp_runner.train.step import supervised
from ddp_runner.train.step_metrics import global_loss

# 27 samples in batches of 8: an epoch has three full batches, and a last one of three samples.
SMALL = ("dataset.num_samples=27", "batch.global_size=8", "optimizer.lr=0.05")
TOY = ("model=toy", *SMALL)
MNIST_NET = ("model=mnist_net", "dataset=fake_images", "optimizer.momentum=0.9", *SMALL)
NO_DROPOUT = ("model.dropout1=0.0", "model.dropout2=0.0")
STEPS_PER_EPOCH = 4
# For losses and weights after about ten steps that differ only by rounding, as between world sizes,
# micro-batches, shapes or numbers of threads: over fifty times the largest measured difference.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.float64: {"rtol": 1e-13, "atol": 1e-14},
}


@dataclass
class Trace:
    """What a rank's training produced; also the logger that records it."""

    losses: list[float] = field(default_factory=list)  # of each step, over the global batch
    lines: list[dict[str, float]] = field(default_factory=list)  # as logged, with their step
    logged: list[str] = field(default_factory=list)
    saved_steps: list[int] = field(default_factory=list)
    saved: dict[int, dict[str, float]] = field(default_factory=dict)  # by step, without perf/
    scalars: dict[str, float] = field(default_factory=dict)  # of ``take_steps``' last one
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))  # flat
    progress: Progress = field(default_factory=Progress)
    place: tuple[int, int] = (0, 0)  # completed epochs, and steps in the epoch
    status: str = ""
    error: str = ""
    num_evaluations: int = 0  # begun

    @property
    def stand(self) -> tuple[Progress, tuple[int, int]]:
        """How far the run has come."""
        return self.progress, self.place

    def log(
        self, metrics: Mapping[str, float], *, step: int, epoch: int, confusion: object = None
    ) -> None:
        """Record a line as metrics.jsonl has it: NaN becomes None, which compares equal."""
        self.lines.append({"step": step, **json_safe(metrics)})

    def first_loss(self, loss: float, *, has_gradient: bool) -> None:
        """Do nothing."""

    def exported(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Do nothing."""

    def step_done(self, *, step: int, epoch: int) -> None:
        """Do nothing."""

    def evaluating(self) -> None:
        """Count an evaluation that begins."""
        self.num_evaluations += 1


def kept_in(folder: Path, trace: Trace) -> Any:
    """Return records of a run in a folder, as far as an export needs them."""

    def export(specs: Mapping[str, Tensor], tensors: Iterator[Tensor], **facts: Any) -> None:
        if dist.get_rank() == 0:
            export_weights(RunDir(folder).export, specs, tensors, **facts)
        deque(tensors, maxlen=0)

    return SimpleNamespace(logger=trace, export=export)


def compose_config(*overrides: str, world_size: int = 1) -> Config:
    """Return the resolved config of a command line, on a machine with four cores."""
    return resolved(f"world_size={world_size}", "backend.device=cpu", *overrides)[0]


def build(env: DistEnv, config: Config) -> TrainState:
    """Build a rank's state as a run does. Collective: every rank must call.

    Samples and parameters have torch's default dtype.
    """
    dataset = build_dataset(config, log=lambda _: None)
    if torch.get_default_dtype() != torch.float32:
        dataset = replace(
            dataset, train=_cast(dataset, dataset.train), eval=_cast(dataset, dataset.eval)
        )
    mode = make("parallelism", config.parallelism, kind=Mode, allowed=config.allowed_targets)
    mode = with_virtual_ranks(mode, config.batch.virtual_ranks)
    per_rank = mode_needs(config.parallelism).devices_per_rank
    devices = rank_devices(env, kind=config.backend.device, per_rank=per_rank)
    return build_state(build_work(config, env, mode, devices=devices, dataset=dataset))


def rejection(env: DistEnv, config: Config) -> str:
    """Build a state; return why it cannot be built, empty if it can."""
    try:
        build(env, config)
    except UserError as error:
        return str(error)
    return ""


def _cast(dataset: Dataset, split: Split) -> Split:
    if not isinstance(split, TensorSplit):  # a dataset of the test's own chooses its dtype
        return split
    dtype, targets = torch.get_default_dtype(), split.targets
    if targets.is_floating_point():
        targets = targets.to(dtype)
    return TensorSplit(dataset.normalize(split.inputs).to(dtype), targets)


def flat_weights(module: nn.Module) -> Tensor:
    """Return all parameters as a flat vector. Collective if they are split."""
    return torch.cat(
        [full_tensor(parameter.detach()).flatten() for parameter in module.parameters()]
    )


def at(
    state: TrainState,
    *,
    step: int,
    epoch: int = 0,
    in_epoch: int = 0,
    owes_evaluation: bool = False,
) -> TrainState:
    """Return the state at another place; the batches are moved."""
    state.batches.epoch, state.batches.step = epoch, in_epoch
    return replace(state, progress=Progress(step, owes_evaluation=owes_evaluation))


def with_work(state: TrainState, **changes: Any) -> TrainState:
    """Return the state with other fields of its work."""
    return replace(state, work=replace(state.work, **changes))


def evaluated(state: TrainState) -> tuple[dict[str, float], list[list[int]] | None]:
    """Return what an evaluation of the state gives. Collective: every rank must call."""
    return evaluate(state.work, state.evaluated, step=state.step)


def loss_of(state: TrainState) -> Callable[[Any, Any], Tensor]:
    """Return the loss of a state that takes the ordinary training step."""
    loss: Callable[[Any, Any], Tensor] = cast("partial[Any]", state.work.step_fn).keywords["loss"]
    return loss


def with_loss(state: TrainState, loss: Callable[[Any, Any], Tensor]) -> TrainState:
    """Return the state with another loss."""
    return with_work(state, step_fn=partial(supervised, loss=loss))


def equal(tree: Any, other: Any) -> bool:
    """Return whether two nested states are equal, tensors bit for bit."""
    if isinstance(tree, Tensor):
        return torch.equal(tree, other)
    if isinstance(tree, dict):
        return tree.keys() == other.keys() and all(equal(tree[key], other[key]) for key in tree)
    if isinstance(tree, list | tuple):
        return len(tree) == len(other) and all(map(equal, tree, other))
    return bool(tree == other)


def end_at(state: TrainState, step: int) -> None:
    """Make the state's run end at a step; its schedule stays that of its config."""
    config = state.work.config
    config = replace(config, train=replace(config.train, max_steps=step))
    state.work = replace(state.work, config=config)


def take_steps(
    env: DistEnv, config: Config, num_steps: int, *, state: TrainState | None = None
) -> Trace:
    """Take steps from the first epoch on. Collective: every rank must call."""
    state, trace = state or build(env, config), Trace()
    batches = state.batches
    end_at(state, num_steps)
    state.engine = build_engine(state)
    if state.engine.serve(state) is None:
        for batch in islice(batches, num_steps):
            sums = take_step(state, batch)
            trace.losses.append(global_loss(state, sums))
            trace.scalars = {name: float(one) for name, one in sums.scalars.items()}
        state.engine.close(Status.COMPLETED)
    trace.weights = flat_weights(state.module)
    return trace


def save_state(state: TrainState, folder: Path, *, log: Callable[[str], None] = print) -> None:
    """Save a checkpoint in the config's format. Collective: every rank must call."""
    env, metrics = state.work.env, dict(state.progress.metrics)
    config = CheckpointConfig(keep=state.work.config.checkpoint.keep)
    if state.work.config.checkpoint.format == "sharded":
        shards = Shards(env.rank, env.world_size)
        with CheckpointWriter(folder, config, wire=None, log=log, shards=shards) as writer:
            writer.begin(state.step)
            writer.save(snapshot(state), step=state.step, metrics=metrics)
        return
    content = snapshot(state)
    if env.is_rank_zero:
        save_checkpoint(folder, content, step=state.step, metrics=metrics, config=config, log=log)


def run_loop(
    env: DistEnv,
    config: Config,
    *,
    max_steps: int | None,
    folder: Path | None = None,
    stop_after: int | None = None,
    state: TrainState | None = None,
) -> Trace:
    """Run the training loop from the newest checkpoint, if any. Collective: every rank must call.

    Args:
        env: this rank's place.
        config: resolved.
        max_steps: the last step; None for the config's.
        folder: of the checkpoints; None saves none, but records their steps.
        stop_after: the step after which the last rank asks to stop.
        state: the state to train; None builds it.

    Returns:
        The trace; it has the error if the loop raised ValueError.
    """
    state, trace = state or build(env, config), Trace()
    if folder is not None:
        restore(state, folder, log=trace.logged.append)
    progress = state.progress

    def save() -> None:
        metrics = dict(state.progress.metrics)
        if folder is None:
            snapshot(state)
        else:
            save_state(state, folder, log=trace.logged.append)
        trace.saved_steps.append(progress.step)
        trace.saved[progress.step] = {k: v for k, v in metrics.items() if "perf/" not in k}

    def stop_requested() -> bool:
        is_last = env.rank == env.world_size - 1
        return stop_after is not None and is_last and progress.step >= stop_after

    distributed.VOTE_S = 0.0  # ask at each step, to stop where the test says
    if max_steps is not None:
        end_at(state, max_steps)
    state.engine = build_engine(state)
    served = state.engine.serve(state)
    if served is not None:
        trace.status, trace.weights = served, flat_weights(state.module)
        return trace
    try:
        trace.status = train(state, save=save, stop_requested=stop_requested, logger=trace)
    except ValueError as error:
        trace.error = f"{type(error).__name__}: {error}"
    if trace.status:
        state.engine.close(Status(trace.status))
    trace.losses = [line["train/loss"] for line in trace.lines if "train/loss" in line]
    trace.progress = progress
    trace.place = (state.batches.epoch, state.batches.step)
    if not trace.error:  # the other ranks may have none, and wait for this one elsewhere
        trace.weights = flat_weights(state.module)
    return trace
