"""A rank's work, which config and launch determine, and its state, which training changes."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ddp_runner.config.schema import RunConfig
from ddp_runner.config.training import EarlyStopConfig
from ddp_runner.data.batches import Batches, StepBatch
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.splits import NUM_FIRST, MicroBatch
from ddp_runner.dist_env import DistEnv
from ddp_runner.metrics.metric import Metric
from ddp_runner.parallelism.mode import Engine, Layout, Mode
from ddp_runner.parallelism.shards import reshard
from ddp_runner.tracking.run_record import RunFields
from ddp_runner.train.ema import Ema
from ddp_runner.train.profiler import Profiler
from ddp_runner.train.progress import Progress, early_stop_of, stop_reason
from ddp_runner.train.same_data import Samples
from ddp_runner.train.schedules import Schedule
from ddp_runner.train.step import StepFunction, StepOutput, modules_of
from ddp_runner.train.step_timer import Skew, StepTimer

DTYPES = {  # dtype of matrix products, by train.precision
    **dict.fromkeys(("fp32", "tf32"), torch.float32),
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
HALF = {"bf16", "fp16"}  # by autocast


@dataclass(frozen=True, kw_only=True)
class Work:
    """The objects that config and launch determine for a rank, in all tasks with a model."""

    config: RunConfig
    mode: Mode
    layout: Layout  # this rank's part of the run
    devices: tuple[torch.device, ...]  # batches go to the first, outputs are on the last
    dataset: Dataset
    step_fn: StepFunction
    metrics: Mapping[str, Metric]  # the config's metrics for evaluations
    group: ProcessGroup | None  # the ranks of the loop; None: all
    data_group: ProcessGroup | None  # ranks that together have each sample once; None: all

    @property
    def env(self) -> DistEnv:
        """The rank's position among the ranks of the loop."""
        return self.layout.env

    @property
    def buffer_group(self) -> ProcessGroup | None:
        """The ranks that have the same buffers; None: all."""
        return self.data_group if self.layout.has_stages else self.group


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context for a forward in this ``train.precision``."""
    return torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision in HALF)


def forward(work: Work, model: nn.Module, batch: MicroBatch) -> StepOutput:
    """Run the training step on a batch."""
    device = work.devices[0]
    data = work.dataset.prepare(batch.data, device, randoms=batch.randoms)
    if (precision := work.config.train.precision) not in HALF:
        return work.step_fn(model, data)
    with autocast(device, precision):
        return work.step_fn(model, data)


@dataclass
class TrainState:
    """Everything that the next step depends on, and the measurements of this session."""

    work: Work
    module: nn.Module  # the bare model, which is evaluated and saved
    model: nn.Module  # the same model wrapped by its mode, which is trained
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    scaler: torch.amp.GradScaler
    batches: Batches
    engine: "Engine[TrainState, StepBatch]"  # how this rank computes a step
    timer: StepTimer
    profiler: Profiler | None = None
    progress: Progress = field(default_factory=Progress)
    # Settings of the optimizer and the schedule when they were built: see ``settings_of``.
    settings: Mapping[str, Any] = field(default_factory=dict)
    samples: Samples | None = None  # from ``agreed_samples``; None: not compared
    # Names of the scalars that the training step returns in training; None: not tried.
    scalars: Sequence[str] | None = None
    # Modules and names of the buffers that training changes: each step begins with rank 0's.
    changing: Sequence[tuple[nn.Module, str]] = ()
    ema: Ema | None = None  # the averaged weights; None without ema.decay
    skew: Skew = field(default_factory=Skew)
    # Two training samples, loaded before the loop: loaders cannot be used inside an epoch.
    sample: MicroBatch | None = None
    peaks: tuple[float, float] | None = None  # from ``measure_peaks``; None: not measured yet
    memory_gib: Sequence[float] = ()  # the peak of each rank, as last logged

    @property
    def evaluated(self) -> nn.Module:
        """The bare model that is evaluated and exported."""
        if self.ema is not None and self.work.config.ema.evaluate:
            return self.ema.module
        return self.module

    @property
    def step(self) -> int:
        """The number of optimizer steps taken."""
        return self.progress.step

    @property
    def final_step(self) -> int | None:
        """The step at which the run ends: train.max_steps, or the end of its last epoch.

        Past epochs may have had another batch size, so count from the current step. None for the
        epochs of a stream of unknown length.
        """
        config, batches = self.work.config.train, self.batches
        if config.max_steps is not None or batches.steps_per_epoch is None:
            return config.max_steps
        num_remaining = (config.epochs - batches.epoch) * batches.steps_per_epoch - batches.step
        return self.step + max(0, num_remaining)

    @property
    def total_epochs(self) -> int | None:
        """The epochs of the run, including a partial last epoch; None if a stream decides."""
        config, batches = self.work.config.train, self.batches
        if config.max_steps is None:
            return config.epochs
        if batches.steps_per_epoch is None:
            return None
        num_remaining = batches.step + max(0, config.max_steps - self.step)
        return batches.epoch + math.ceil(num_remaining / batches.steps_per_epoch)

    @property
    def is_done(self) -> bool:
        """Whether the run has taken its last step."""
        config = self.work.config.train
        if config.max_steps is None:
            return self.batches.epoch >= config.epochs
        return self.step >= config.max_steps

    @cached_property
    def early_stop(self) -> EarlyStopConfig:
        """The settings of early stopping, with the metric's best end as mode."""
        return early_stop_of(self.work.config.early_stop, self.work.metrics)

    @property
    def has_ended(self) -> bool:
        """Whether the run takes no further step: the last is done, or it stops early."""
        return self.is_done or stop_reason(self.progress, self.early_stop) is not None

    def steps_ahead(self, number: int) -> int:
        """Return the number of steps from batch `number` to the next save, evaluation or epoch end.

        Call it during the step of this batch; the step counts, and the run's last step is the end.
        """
        config, batches = self.work.config, self.batches
        assert batches.steps_per_epoch is not None
        periods = config.checkpoint.every_steps, config.train.eval_every_steps
        limits = [every - self.step % every for every in periods if every]
        if config.train.max_steps is not None:
            limits.append(config.train.max_steps - self.step)
        return min([batches.steps_per_epoch - number % batches.steps_per_epoch, *limits])

    @property
    def measured(self) -> RunFields:
        """This session's measurements, for run.json."""
        flops, peak = self.peaks or (None, None)
        return self.skew.fields() | RunFields(
            flops_per_sample=flops or None,
            matmul_flops_per_s=peak or None,
            peak_memory_gib_by_rank=[round(gib, 4) for gib in self.memory_gib] or None,
        )

    def first(self, numbers: Sequence[int] = range(NUM_FIRST)) -> MicroBatch:
        """Return training samples by their numbers; see ``NumberedSplit``."""
        batch: MicroBatch = self.batches.split.first(numbers, seed=self.work.config.seed)
        return batch


@contextmanager
def restored_after(state: TrainState) -> Iterator[None]:
    """Switch the model to evaluation; after the block restore buffers and each module's mode.

    Also restore the whole state of the training step: it may average weights into parameters.
    """
    parts = modules_of(state.work.step_fn)
    roots = [state.module, *(part for part in parts.values() if isinstance(part, nn.Module))]
    modules = [(module, module.training) for root in roots for module in root.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module, _ in modules
        for name, buffer in module._buffers.items()
    ]
    states = [(part, copy.deepcopy(part.state_dict())) for part in parts.values()]
    state.module.eval()
    try:
        yield
    finally:
        reshard(state.module)
        for module, was_training in modules:
            module.training = was_training
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # the block may have assigned another tensor
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        for part, content in states:
            part.load_state_dict(content)
