"""What a rank computes with, whatever its task does with a model, and the forward of a batch."""

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

DTYPES = {  # of matrix products, by train.precision
    **dict.fromkeys(("fp32", "tf32"), torch.float32),
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the config and the launch decide for a rank; a task may replace it, and changes none."""

    config: RunConfig
    mode: Mode
    layout: Layout  # of this rank in the run
    devices: tuple[torch.device, ...]  # batches go to the first, outputs are on the last
    dataset: Dataset
    step_fn: StepFunction
    metrics: Mapping[str, Metric]  # of evaluations, besides those of every run
    group: ProcessGroup | None  # the ranks of the loop; None: all
    data_group: ProcessGroup | None  # those whose samples together are all of them; None: all

    @property
    def env(self) -> DistEnv:
        """Return the rank's place among the ranks of the loop."""
        return self.layout.env


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which a model computes in this ``train.precision``."""
    is_half = precision in ("bf16", "fp16")
    return torch.autocast(device.type, dtype=DTYPES[precision], enabled=is_half)


def forward(work: Work, model: nn.Module, batch: MicroBatch) -> StepOutput:
    """Run the training step on the devices, and return what it returns."""
    device = work.devices[0]
    data = work.dataset.prepare(batch.data, device, randoms=batch.randoms)
    with autocast(device, work.config.train.precision):
        return work.step_fn(model, data)
