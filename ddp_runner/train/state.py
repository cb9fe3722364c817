"""What a rank trains: the state that a checkpoint saves, and what measures it."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ddp_runner.data.batches import Batches
from ddp_runner.data.splits import NUM_FIRST, MicroBatch
from ddp_runner.parallelism.mode import Engine
from ddp_runner.parallelism.shards import reshard
from ddp_runner.tracking.run_record import RunFields
from ddp_runner.train.ema import Ema
from ddp_runner.train.profiler import AnyProfiler, NullProfiler
from ddp_runner.train.progress import Progress
from ddp_runner.train.same_data import Samples
from ddp_runner.train.schedules import Schedule
from ddp_runner.train.skew import Skew
from ddp_runner.train.step import modules_of
from ddp_runner.train.step_timer import StepTimer
from ddp_runner.train.work import Work


@dataclass
class TrainState:
    """Everything that the next step depends on, and what measures the steps."""

    work: Work
    module: nn.Module  # the bare model, which is evaluated and saved
    model: nn.Module  # the same model wrapped by its mode, which is trained
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scaler: torch.amp.GradScaler
    batches: Batches
    engine: Engine  # how this rank computes a step
    timer: StepTimer
    profiler: AnyProfiler = field(default_factory=NullProfiler)
    progress: Progress = field(default_factory=Progress)
    # What the optimizer and the schedule held when they were built: see ``checkpoint.state``.
    settings: Mapping[str, Any] = field(default_factory=dict)
    samples: Samples | None = None  # what tells the data; None: nobody has compared it
    # Names of the scalars that the training step returns in training; None: it was not tried.
    scalars: Sequence[str] | None = None
    # The buffers, by owner and name, that training changes: all ranks take rank 0's each step.
    changing: Sequence[tuple[nn.Module, str]] = ()
    ema: Ema | None = None  # the averaged weights; None without ema.decay
    skew: Skew = field(default_factory=Skew)  # of this session
    # Two training samples, as the trial has loaded them: amid an epoch none can be loaded.
    sample: MicroBatch | None = None
    # Of this session: see ``measure_peaks``.
    peaks: tuple[float, float] | None = None  # None: not measured yet
    memory_gib: Sequence[float] = ()  # the peak of each rank in this session, as last logged

    @property
    def evaluated(self) -> nn.Module:
        """The bare model that is evaluated and exported."""
        if self.ema is not None and self.work.config.ema.evaluate:
            return self.ema.module
        return self.module

    @property
    def step(self) -> int:
        """The optimizer steps taken."""
        return self.progress.step

    @property
    def last_step(self) -> int | None:
        """The step at which the run ends: train.max_steps, or the end of its last epoch.

        Epochs are counted from where the run stands: earlier ones may have had another batch size.
        None: the epochs of a stream end when it ends.
        """
        config, batches = self.work.config.train, self.batches
        if config.max_steps is not None or batches.steps_per_epoch is None:
            return config.max_steps
        num_left = (config.epochs - batches.epoch) * batches.steps_per_epoch - batches.step
        return self.step + max(0, num_left)

    @property
    def total_epochs(self) -> int | None:
        """The epochs of the run, the last one perhaps begun; None: only a stream will tell."""
        config, batches = self.work.config.train, self.batches
        if config.max_steps is None:
            return config.epochs
        if batches.steps_per_epoch is None:
            return None
        num_left = batches.step + max(0, config.max_steps - self.step)
        return batches.epoch + math.ceil(num_left / batches.steps_per_epoch)

    @property
    def is_done(self) -> bool:
        """Whether the run has taken its last step."""
        config = self.work.config.train
        if config.max_steps is None:
            return self.batches.epoch >= config.epochs
        return self.step >= config.max_steps

    def steps_ahead(self, number: int) -> int:
        """Return how many steps from batch `number` on come before the next save or evaluation.

        The run's last step ends them as well, and an epoch's. Amid the step of this batch.
        """
        config, batches = self.work.config, self.batches
        assert batches.steps_per_epoch is not None
        periods = config.checkpoint.every_steps, config.train.eval_every_steps
        steps_left = [every - self.step % every for every in periods if every]
        if config.train.max_steps is not None:
            steps_left.append(config.train.max_steps - self.step)
        return min([batches.steps_per_epoch - number % batches.steps_per_epoch, *steps_left])

    @property
    def measured(self) -> RunFields:
        """What run.json keeps of this session's measurements."""
        by_rank = [round(one, 4) for one in self.memory_gib] or None
        flops, peak = self.peaks or (None, None)
        return self.skew.fields() | RunFields(
            flops_per_sample=flops or None,
            matmul_flops_per_s=peak or None,
            peak_memory_gib_by_rank=by_rank,
        )

    def first(self, numbers: Sequence[int] = range(NUM_FIRST)) -> MicroBatch:
        """Return training samples by their numbers; see ``Split``."""
        return self.batches.split.first(numbers, seed=self.work.config.seed)


@contextmanager
def restored_after(state: TrainState) -> Iterator[None]:
    """Evaluate in the block, then restore buffers and each module's mode.

    That goes for the model, and for what keeps a state in the training step: of this also the
    parameters, since a step may average weights into them.
    """
    parts = modules_of(state.work.step_fn)
    others = [value for value in parts.values() if isinstance(value, nn.Module)]
    modules = [(one, one.training) for root in (state.module, *others) for one in root.modules()]
    buffers = [
        (owner, name, buffer, None if buffer is None else buffer.clone())
        for owner, _ in modules
        for name, buffer in owner._buffers.items()
    ]
    states = [(value, copy.deepcopy(value.state_dict())) for value in parts.values()]
    state.module.eval()
    try:
        yield
    finally:
        reshard(state.module)
        for module, was_training in modules:
            module.training = was_training
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner._buffers[name] = buffer  # the block may have assigned another tensor
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        for part, content in states:
            part.load_state_dict(content)
