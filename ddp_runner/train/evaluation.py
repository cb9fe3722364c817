"""The forward of a batch, and the evaluation of a whole split, while training and afterwards."""

from typing import Protocol

import torch
from torch import nn

from ddp_runner.data.batches import MicroBatch, eval_batches
from ddp_runner.data.streams import AnySplit
from ddp_runner.distributed import broadcast_buffers
from ddp_runner.train.eval_totals import EvalSetup, EvalTotals
from ddp_runner.train.step import Step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Evaluable(Protocol):
    """What an evaluation needs of a rank: ``TrainState`` has it, and a model that only computes."""

    @property
    def setup(self) -> EvalSetup:
        """Return what the rank computes with."""

    @property
    def evaluated(self) -> nn.Module:
        """Return the bare model."""


def forward(state: Evaluable, model: nn.Module, batch: MicroBatch) -> Step:
    """Run the training step on the devices, and return what it returns."""
    setup, precision = state.setup, state.setup.config.train.precision
    device = setup.devices[0]
    data = setup.dataset.prepare(batch.data, device, randoms=batch.randoms)
    with torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision != "fp32"):
        return setup.step(model, data)


@torch.no_grad()
def evaluate(
    state: Evaluable, *splits: AnySplit
) -> tuple[dict[str, float], list[list[int]] | None]:
    """Evaluate whole splits; without any, the evaluation set. Each sample counts once.

    That holds at every world size. Collective: every rank of the loop must call.

    Returns:
        Metrics: eval/loss, the scalars of the training step, the configured metrics and, if the
        dataset has classes, eval/accuracy, eval/precision, eval/recall and eval/f1. Confusion
        counts (num_classes, num_classes), a row per true class, or None without classes. A
        prediction outside the classes counts as wrong and is in no column.
    """
    setup, totals = state.setup, EvalTotals(state.setup)
    # The bare module: DDP's forward is a collective, and ranks may have unequal numbers of batches.
    module = state.evaluated
    broadcast_buffers(module, group=setup.group)
    module.eval()
    for split in splits or (setup.dataset.eval,):
        for batch in eval_batches(
            split,
            batch_size=setup.eval_batch_size,
            rank=setup.env.rank,
            world_size=setup.env.world_size,
            seed=setup.config.seed,
        ):
            totals.add(forward(state, module, batch))
    return totals.compute()
