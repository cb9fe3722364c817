"""The fixed part of a rank's run, shared by all tasks with a model, and the forward of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ddp_runner.config.schema import RunConfig
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.splits import MicroBatch
from ddp_runner.dist_env import DistEnv
from ddp_runner.metrics.metric import Metric
from ddp_runner.parallelism.mode import Layout, Mode
from ddp_runner.train.step import StepFunction, StepOutput

DTYPES = {  # dtype of matrix products, by train.precision
    **dict.fromkeys(("fp32", "tf32"), torch.float32),
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """The objects that config and launch determine for a rank; immutable."""

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


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context for a forward in this ``train.precision``."""
    is_half = precision in ("bf16", "fp16")
    return torch.autocast(device.type, dtype=DTYPES[precision], enabled=is_half)


def forward(work: Work, model: nn.Module, batch: MicroBatch) -> StepOutput:
    """Run the training step on a batch."""
    device = work.devices[0]
    data = work.dataset.prepare(batch.data, device, randoms=batch.randoms)
    with autocast(device, work.config.train.precision):
        return work.step_fn(model, data)
