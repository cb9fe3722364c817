"""The forward of a batch, and the evaluation of a whole split, while training and afterwards."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Protocol

import torch
from torch import nn

from ddp_runner.data.splits import MicroBatch, Part, Split
from ddp_runner.distributed import broadcast_buffers, sum_over_ranks
from ddp_runner.parallelism.shards import reshard
from ddp_runner.seeds import seed_all
from ddp_runner.train.eval_totals import EvalSetup, EvalTotals
from ddp_runner.train.step import Step

DTYPES = {  # of matrix products, by train.precision
    **dict.fromkeys(("fp32", "tf32"), torch.float32),
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Evaluable(Protocol):
    """What an evaluation needs of a rank: ``TrainState`` has it, and a model that only computes."""

    @property
    def setup(self) -> EvalSetup:
        """Return what the rank computes with."""

    @property
    def evaluated(self) -> nn.Module:
        """Return the bare model."""

    @property
    def step(self) -> int:
        """Return the optimizer steps that made the weights."""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which a model computes in this ``train.precision``."""
    is_half = precision in ("bf16", "fp16")
    return torch.autocast(device.type, dtype=DTYPES[precision], enabled=is_half)


def forward(state: Evaluable, model: nn.Module, batch: MicroBatch) -> Step:
    """Run the training step on the devices, and return what it returns."""
    setup, precision = state.setup, state.setup.config.train.precision
    device = setup.devices[0]
    data = setup.dataset.prepare(batch.data, device, randoms=batch.randoms)
    with autocast(device, precision):
        return setup.step(model, data)


@torch.no_grad()
def evaluate(
    state: Evaluable, *splits: Split, most_batches: int | None = None
) -> tuple[dict[str, float], list[list[int]] | None]:
    """Evaluate whole splits; without any, the evaluation set. Each sample counts once.

    With `most_batches` each rank evaluates only its first ones, to try it.

    That holds at every world size. A model that draws random numbers draws those of this step, so
    the same weights give the same metrics whenever they are evaluated on as many ranks. Collective:
    every rank of the loop must call.

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
        share, num_shares = setup.layout.eval_share
        seed = setup.config.seed
        batches = split.in_order(Part(setup.eval_batch_size, share, num_shares, seed))
        for index, batch in enumerate(together(islice(batches, most_batches), split, setup)):
            # For each batch, since loading one may draw in this process.
            seed_all(seed, "eval", state.step, share, index)
            step = forward(state, module, batch)
            if batch.weight:
                totals.add(step)
    reshard(module)
    return totals.compute()


def together(batches: Iterable[MicroBatch], split: Split, setup: EvalSetup) -> Iterator[MicroBatch]:
    """Yield batches, and placeholders of weight 0 while other ranks still have some.

    Only where a forward waits for the other ranks; else the batches are yielded as they come.
    Collective there: every rank must take all of them.
    """
    if not setup.layout.forward_is_collective:
        yield from batches
        return
    placeholder: MicroBatch | None = None
    for batch in chain(batches, repeat(None)):
        (num_left,) = sum_over_ranks([batch is not None], group=setup.group)
        if not num_left:
            return
        if batch is None and placeholder is None:
            samples = split.first(seed=setup.config.seed)
            placeholder = replace(samples, num_samples=0, weight=0.0)
        one = placeholder if batch is None else batch
        assert one is not None
        yield one
