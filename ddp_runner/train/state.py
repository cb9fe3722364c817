"""What a rank trains: the state that a checkpoint saves, and the setup that stays the same."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ddp_runner.config.schema import TrainConfig
from ddp_runner.data.batches import GlobalBatches
from ddp_runner.data.dataset import Dataset
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.mode import GradientSource, Mode
from ddp_runner.train.schedules import Schedule
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

    def last_step(self, config: TrainConfig, *, steps_per_epoch: int) -> int:
        """Return the step at which the run ends: train.max_steps, or the end of its last epoch.

        Epochs are counted from this position: earlier ones may have had another batch size.
        """
        if config.max_steps is not None:
            return config.max_steps
        epoch_began = self.step - self.step_in_epoch
        return max(self.step, epoch_began + (config.epochs - self.epoch) * steps_per_epoch)


@dataclass(frozen=True)
class Setup:
    """What a rank trains with; it does not change during a run."""

    mode: Mode
    loss_fn: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> the sum over samples
    dataset: Dataset
    batches: GlobalBatches
    eval_batch_size: int
    devices: tuple[torch.device, ...]  # inputs go to the first, targets to the last
    config: TrainConfig
    env: DistEnv  # this rank's place among the ranks of the loop
    timer: StepTimer
    group: ProcessGroup | None = None  # the ranks of the loop; None: all


@dataclass
class TrainState:
    """Everything that the next step depends on, and the setup of the rank."""

    module: nn.Module  # the bare model, which is evaluated and saved
    model: nn.Module  # the same model wrapped by its mode, which is trained
    optimizer: torch.optim.Optimizer
    scheduler: Schedule
    scaler: torch.amp.GradScaler
    setup: Setup
    gradients: GradientSource  # this rank's backward, unless the mode has another source
    position: Position = field(default_factory=Position)
    grad_norm: Tensor | None = None  # of the last step, before clipping; None without clipping
