"""A model, training steps and samples that meet the modes' edges, for configs to name.

What a sample adds to a sum depends on that sample alone, so every split of a batch adds up to it.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ddp_runner.data.sources.offline import RandomRegression
from ddp_runner.train.step import StepOutput

INPUTS, TARGETS, NUM_WORDS = 10, 5, 12
NUM_EVAL = 11
RARE = 1.0  # about one sample in six has a first input above it
Sample = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Three linear layers, whole or on two devices, and what a kind adds to them.

    Args:
        kind: ``plain``; ``tied``: net1 and net2 share their weight; ``scalar``: a parameter without
            dimensions; ``sparse``: an embedding whose gradient is sparse; ``rare``: a layer for
            some samples only, which is not called where a batch has none of them.
        dev0: device of net1.
        dev1: device of all else.
    """

    def __init__(
        self,
        *,
        kind: str = "plain",
        dev0: torch.device | None = None,
        dev1: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.dev0, self.dev1 = kind, dev0, dev1
        self.net1 = nn.Linear(INPUTS, INPUTS).to(dev0)
        self.net2 = nn.Linear(INPUTS, INPUTS).to(dev1)
        self.head = nn.Linear(INPUTS, TARGETS).to(dev1)
        if kind == "tied":
            self.net2.weight = self.net1.weight
        elif kind == "scalar":
            self.scale = nn.Parameter(torch.tensor(1.5, device=dev1))
        elif kind == "sparse":
            self.words = nn.Embedding(NUM_WORDS, TARGETS, sparse=True).to(dev1)
        elif kind == "rare":
            self.rare = nn.Linear(INPUTS, TARGETS).to(dev1)
        else:
            assert kind == "plain"

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        hidden = torch.tanh(self.net1(inputs.to(self.dev0)))
        outputs: Tensor = self.head(torch.tanh(self.net2(hidden.to(self.dev1))))
        if self.kind == "scalar":
            return outputs * self.scale
        if self.kind == "sparse":
            return outputs + self.words(words_of(inputs).to(self.dev1))
        if self.kind == "rare" and (is_rare := inputs[:, 0] > RARE).any():
            places = is_rare.nonzero().flatten()
            found = self.rare(inputs[places].to(self.dev1)).to(outputs.dtype)
            return outputs.index_add(0, places.to(self.dev1), found)
        return outputs


def words_of(inputs: Tensor) -> Tensor:
    """Return a word for each sample, int64 (batch,)."""
    return (inputs[:, 1].abs() * 1000).long() % NUM_WORDS


def _errors(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor, Tensor]:
    outputs, targets = model(batch[0]), batch[1]
    return (outputs - targets).square().mean(dim=1), outputs, targets


def counted(model: nn.Module, batch: Sample) -> StepOutput:
    """Return the squared errors, and scalars that tell which samples were in the batch."""
    errors, outputs, targets = _errors(model, batch)
    first = batch[0][:, 0].double()
    scalars = {
        "error": errors.detach().sum(),
        "first": first.sum(),
        "squared": first.square().sum(),
    }
    return StepOutput(errors.sum(), len(errors), outputs, targets, scalars)


def weighed(model: nn.Module, batch: Sample) -> StepOutput:
    """Return a loss that is summed over 1 to 7 tokens of each sample, and their number."""
    errors, outputs, targets = _errors(model, batch)
    tokens = 1 + (batch[0][:, 2].abs() * 100).long() % 7
    return StepOutput(
        (errors * tokens).sum(), tokens.sum(), outputs, targets, {"tokens": tokens.sum()}
    )


def named_by_data(model: nn.Module, batch: Sample) -> StepOutput:
    """Return a scalar that only batches with a rare sample have."""
    errors, outputs, targets = _errors(model, batch)
    is_rare = batch[0][:, 0] > RARE
    scalars = {"rare": is_rare.double().sum()} if is_rare.any() else {}
    return StepOutput(errors.sum(), len(errors), outputs, targets, scalars)


def rows(size: int) -> tuple[list[Sample], list[Sample]]:
    """Return the samples of dataset=random, in torch's default dtype: to train on and to evaluate.

    Those to evaluate depend on how many come before them.
    """
    source = RandomRegression("random", size, NUM_EVAL, INPUTS, TARGETS, seed=0)
    drawn = {key: one.to(torch.get_default_dtype()) for key, one in source.build(Path()).items()}
    train, evaluation = (
        list(zip(drawn[f"{split}_inputs"], drawn[f"{split}_targets"], strict=True))
        for split in ("train", "eval")
    )
    return train, evaluation


class Numbered(Dataset[Sample]):
    """The samples by their numbers.

    Args:
        size: number of training samples.
        split: 0 for these, 1 for those to evaluate.
    """

    def __init__(self, size: int, split: int) -> None:
        self.samples = rows(size)[split]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


class Stream(IterableDataset[Sample]):
    """The same samples one after another."""

    def __init__(self, size: int, split: int) -> None:
        self.samples = rows(size)[split]

    def __iter__(self) -> Iterator[Sample]:
        assert get_worker_info() is None  # the runner splits the samples
        yield from self.samples


class StreamOfLength(Stream):
    """A stream that tells its length."""

    def __len__(self) -> int:
        return len(self.samples)
