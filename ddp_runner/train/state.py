"""What one rank trains: the state that a checkpoint holds, and what surrounds it."""

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
    """Where a run stands, so that a resumed run goes on from there."""

    epoch: int = 0  # epochs that have ended
    step: int = 0  # optimizer steps since the run began
    step_in_epoch: int = 0
    # Metrics logged at the last step; a checkpoint keeps them in its manifest.
    metrics: dict[str, float] = field(default_factory=dict, compare=False)
    # Batches before this position whose gradients were never applied, numbered from the start of
    # the run. Only an asynchronous mode leaves some, since it takes batches as they come.
    outstanding: tuple[int, ...] = ()

    def last_step(self, config: TrainConfig, *, steps_per_epoch: int) -> int:
        """Return the step at which the run ends: train.max_steps, or the end of its last epoch.

        Epochs count from this position on, since earlier ones may have had another batch size.
        """
        if config.max_steps is not None:
            return config.max_steps
        epoch_began = self.step - self.step_in_epoch
        return max(self.step, epoch_began + (config.epochs - self.epoch) * steps_per_epoch)


@dataclass(frozen=True)
class Setup:
    """What a rank trains with. It stays the same during a run."""

    mode: Mode
    loss_fn: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> the sum over samples
    dataset: Dataset
    batches: GlobalBatches
    eval_batch_size: int
    devices: tuple[torch.device, ...]  # inputs go to the first, targets to the last
    config: TrainConfig
    env: DistEnv  # this rank among those of the loop
    timer: StepTimer
    group: ProcessGroup | None = None  # the ranks of the loop; None: all


@dataclass
class TrainState:
    """What a rank trains: all that the next step depends on, and its setup."""

    module: nn.Module  # the bare model: evaluated and saved
    model: nn.Module  # the same model as its mode wrapped it: trained
    optimizer: torch.optim.Optimizer
    scheduler: Schedule
    scaler: torch.amp.GradScaler
    setup: Setup
    gradients: GradientSource  # this rank's own backward, unless its mode has another source
    position: Position = field(default_factory=Position)
    grad_norm: Tensor | None = None  # of the last step before clipping; None: nothing is clipped
