"""What a rank trains: the state that a checkpoint saves, and the setup that stays the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ddp_runner.config.schema import RunConfig
from ddp_runner.data.batches import GlobalBatches
from ddp_runner.data.dataset import Dataset
from ddp_runner.dist_env import DistEnv
from ddp_runner.metrics.metric import Metric
from ddp_runner.parallelism.mode import GradientSource, Mode, Role
from ddp_runner.train.ema import Ema
from ddp_runner.train.schedules import Schedule
from ddp_runner.train.step import StepFunction
from ddp_runner.train.step_timer import StepTimer


@dataclass
class Position:
    """How far a run has come. A resumed run continues from here."""

    epoch: int = 0  # completed epochs
    step: int = 0  # optimizer steps since the run began
    step_in_epoch: int = 0
    # Metrics of the last step; a checkpoint keeps them in its manifest.
    metrics: dict[str, float] = field(default_factory=dict, compare=False)
    # Batches before this position whose gradients were never applied, numbered from the start of
    # the run. Only an asynchronous mode has them, since it applies batches out of order.
    outstanding: tuple[int, ...] = ()
    # Of early stopping: the metric and its direction, its best value, and the evaluations in a row
    # since then that were no better.
    watched: str = ""
    best: float | None = None
    bad_evaluations: int = 0


@dataclass(frozen=True)
class Setup:
    """What a rank trains with; it does not change during a run."""

    config: RunConfig
    mode: Mode
    role: Role  # of this rank in the run
    env: DistEnv  # its place among the ranks of the loop
    devices: tuple[torch.device, ...]  # batches go to the first, outputs are on the last
    dataset: Dataset
    batches: GlobalBatches
    eval_batch_size: int
    step: StepFunction
    metrics: Mapping[str, Metric]  # of evaluations, besides those of every run
    timer: StepTimer
    group: ProcessGroup | None  # the ranks of the loop; None: all


@dataclass
class TrainState:
    """Everything that the next step depends on, and the setup of the rank."""

    module: nn.Module  # the bare model, which is evaluated and saved
    model: nn.Module  # the same model wrapped by its mode, which is trained
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scaler: torch.amp.GradScaler
    setup: Setup
    gradients: GradientSource  # this rank's backward, unless the mode has another source
    position: Position = field(default_factory=Position)
    grad_norm: Tensor | None = None  # of the last step, before clipping; None without clipping
    # Of the last step: this rank's part of the mean of each scalar that the training step returned.
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    ema: Ema | None = None  # the averaged weights; None without ema.decay

    @property
    def evaluated(self) -> nn.Module:
        """The bare model that is evaluated and exported."""
        if self.ema is not None and self.setup.config.ema.evaluate:
            return self.ema.module
        return self.module

    @property
    def next_batch(self) -> int:
        """The number of the next batch, counted from the start of the run."""
        position, batches = self.position, self.setup.batches
        return position.epoch * batches.steps_per_epoch + position.step_in_epoch

    @property
    def last_step(self) -> int:
        """The step at which the run ends: train.max_steps, or the end of its last epoch.

        Epochs are counted from the position: earlier ones may have had another batch size.
        """
        config, step = self.setup.config.train, self.position.step
        if config.max_steps is not None:
            return config.max_steps
        num_steps = config.epochs * self.setup.batches.steps_per_epoch
        return max(step, step + num_steps - self.next_batch)
