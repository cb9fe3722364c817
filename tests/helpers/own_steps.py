"""Training steps and datasets of a user's own, right and wrong, for configs to name."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ddp_runner.train.step import StepOutput

NUM_WORDS = 12
# The command line of a model that classifies each word.
WORDS = (
    "dataset=torch_dataset",
    "dataset.train={_target_:own_steps.Sentences,size:27}",
    "dataset.eval={_target_:own_steps.Sentences,size:10}",
    "dataset.collate_fn={_target_:own_steps.padded,_partial_:true}",
    "model=toy",
    "model._target_=own_steps.Tagger",
    "train.step=own_steps.tag",
    "batch.count=tokens",
    "optimizer.lr=0.5",
    "allowed_targets=[own_steps]",
)


@dataclass(frozen=True)
class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Sentences of 1 to 7 words, and a class for each word."""

    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(1, NUM_WORDS, (1 + index % 7,), generator=generator)
        return words, words % 5


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Fill up the words with 0 and the classes with -100."""
    words, classes = zip(*samples, strict=True)
    return (
        pad_sequence(list(words), batch_first=True),
        pad_sequence(list(classes), batch_first=True, padding_value=-100),
    )


class Tagger(nn.Module):
    """Map words (batch, length) to class scores (batch, 5, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.classify = nn.Embedding(NUM_WORDS, 8), nn.Linear(8, 5)

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores."""
        scores: Tensor = self.classify(self.words(words)).transpose(1, 2)
        return scores


def tag(model: nn.Module, batch: tuple[Tensor, Tensor]) -> StepOutput:
    """Sum the cross-entropy over the words, and count them."""
    words, classes = batch
    scores = model(words)
    is_word = classes != -100
    hits = (scores.argmax(dim=1) == classes)[is_word].sum()
    loss = F.cross_entropy(scores, classes, reduction="sum")
    return StepOutput(loss, is_word.sum(), scalars={"hits": hits.float()})


def squares(model: nn.Module, batch: Any, *, factor: float = 1.0) -> StepOutput:
    """Sum the squared errors over the samples, times a factor."""
    outputs, targets = model(batch[0]), batch[1]
    errors = (outputs - targets).square().mean(dim=1)
    scalars = {"worst": errors.detach().max() * len(errors), "mean_error": errors.detach().sum()}
    return StepOutput(factor * errors.sum(), len(errors), outputs, targets, scalars)


class Squares(nn.Module):
    """The same step as a module with weights that nothing trains."""

    def __init__(self, loss: Any, factor: float) -> None:
        super().__init__()
        self.loss, self.factor = loss, nn.Parameter(torch.tensor(factor))

    def forward(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the loss of the config, times the factor."""
        outputs = model(batch[0])
        return StepOutput(self.factor.detach() * self.loss(outputs, batch[1]), len(outputs))


def by_sign(model: nn.Module, batch: Any) -> StepOutput:
    """Count the samples under a name that depends on the first of them."""
    step = squares(model, batch)
    name = "high" if batch[0][0, 0] > 0 else "low"
    return StepOutput(step.loss_sum, step.count, scalars={name: torch.tensor(float(step.count))})


def mean(model: nn.Module, batch: Any) -> StepOutput:
    """Return a mean in place of a sum."""
    step = squares(model, batch)
    return StepOutput(step.loss_sum / step.count, step.count)


def of_pairs(model: nn.Module, batch: Any) -> StepOutput:
    """Return a loss that depends on which samples are in a batch."""
    outputs = model(batch[0])
    return StepOutput((outputs @ outputs.T).square().sum(), len(outputs))


def random(model: nn.Module, batch: Any) -> StepOutput:
    """Return a sum that draws random numbers."""
    step = squares(model, batch)
    return StepOutput(step.loss_sum * torch.rand(()), step.count)


def a_tensor(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss alone."""
    return squares(model, batch).loss_sum


def each_sample(model: nn.Module, batch: Any) -> StepOutput:
    """Return a loss for each sample."""
    return StepOutput(model(batch[0]).square().mean(dim=1), len(batch[0]))


def detached(model: nn.Module, batch: Any) -> StepOutput:
    """Return a loss without its graph."""
    return StepOutput(squares(model, batch).loss_sum.detach(), len(batch[0]))


def in_training(model: nn.Module, batch: Any) -> StepOutput:
    """Return a loss in training mode only, as torchvision's detectors compute it."""
    step = squares(model, batch)
    return step if model.training else StepOutput(torch.zeros(()), step.count)


def of_elements(model: nn.Module, batch: Any) -> StepOutput:
    """Count elements."""
    return StepOutput(squares(model, batch).loss_sum, batch[1].numel())


def of_one(model: nn.Module, batch: Any) -> StepOutput:
    """Count batches."""
    return StepOutput(squares(model, batch).loss_sum, 1)


def number_as_scalar(model: nn.Module, batch: Any) -> StepOutput:
    """Return a Python number among the scalars."""
    return StepOutput(squares(model, batch).loss_sum, len(batch[0]), scalars={"one": 1.0})


def failing(model: nn.Module, batch: Any) -> StepOutput:
    """Raise what a bug raises."""
    raise KeyError("image")


def warming_up(optimizer: Any, *, num_warmup_steps: int, num_training_steps: int) -> Any:
    """Return a schedule of the form of Hugging Face's, which climbs all the time."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / num_training_steps)
