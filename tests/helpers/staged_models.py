"""Models that a pipeline can cut, and training steps for them."""

import time
from typing import Any, cast

import torch
from torch import Tensor, nn

from ddp_runner.train.losses import token_cross_entropy
from ddp_runner.train.step import StepOutput


class Plain(nn.Module):
    """A user's model: a tied output layer, a buffer in each block, a bias of all blocks."""

    def __init__(self, *, vocab_size: int, num_layers: int = 4, width: int = 16, **_: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.bias = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.output = nn.Linear(width, vocab_size, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, vocab)."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, *self.context(tokens))
        return self.head(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the first hidden state."""
        return torch.tanh(self.tokens(tokens))

    def context(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return a bias, which is trained, and which positions count, by the tokens."""
        return self.bias, (tokens % 2).unsqueeze(-1)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.output(hidden)
        return logits


class Layer(nn.Module):
    """A block with a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, hidden: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        """Mix the positions that count."""
        mixed: Tensor = torch.tanh(self.linear(hidden) + bias) * counts
        return hidden + self.scale * mixed


def noisy(model: Any, batch: Any) -> StepOutput:
    """Hide random tokens, the same in each mode, and count how many."""
    tokens, targets = batch
    seen = torch.rand(()) * 0 + 1  # draws a random number before the model, which its dropout sees
    outputs = model(tokens * seen.long())
    loss = token_cross_entropy(outputs, targets)
    return StepOutput(loss, targets.ne(-100).sum(), outputs=outputs, targets=targets)


def counted(model: Any, batch: Any) -> StepOutput:
    """Return two scalars of the outputs."""
    tokens, targets = batch
    outputs = model(tokens)
    loss, hits = token_cross_entropy(outputs, targets), (outputs.argmax(-1) == targets).sum()
    scalars = {"hits": hits.to(loss.dtype), "squares": outputs.square().sum()}
    return StepOutput(loss, targets.ne(-100).sum(), outputs, targets, scalars)


class Doubling(Plain):
    """Computes otherwise while it trains."""

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        return super().head(hidden) * (2.0 if self.training else 1.0)


def switching(model: Any, batch: Any) -> StepOutput:
    """Train in a step that leaves the model in evaluation."""
    tokens, targets = batch
    if torch.is_grad_enabled():
        model.train()
    outputs = model(tokens)
    model.eval()
    loss = token_cross_entropy(outputs, targets)
    return StepOutput(loss, targets.ne(-100).sum(), outputs=outputs, targets=targets)


def one_by_one(module: nn.Module, *, lr: float, **_: Any) -> torch.optim.Optimizer:
    """Return an optimizer with a group for each parameter that this rank has."""
    return torch.optim.SGD([{"params": [parameter]} for parameter in module.parameters()], lr=lr)


class Unseeded(Plain):
    """Has weights that follow from no seed."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        nn.init.constant_(self.tokens.weight, time.monotonic_ns() % 997 / 997)


class Shared(Plain):
    """Calls each block twice."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.blocks = nn.ModuleList([*self.blocks, *self.blocks])


class Normed(Plain):
    """Has a layer that mixes the samples of a batch."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.norm = nn.BatchNorm1d(8)


class Headless(Plain):
    """Lacks a method that a pipeline calls."""

    head = None  # type: ignore[assignment]


def twice(model: Any, batch: Any) -> StepOutput:
    """Call the model twice, as contrastive losses do."""
    tokens, targets = batch
    loss = token_cross_entropy(model(tokens), targets) + token_cross_entropy(model(tokens), targets)
    return StepOutput(loss, targets.ne(-100).sum())


def decaying(model: Any, batch: Any) -> StepOutput:
    """Add the squares of all weights to the loss."""
    tokens, targets = batch
    loss = token_cross_entropy(model(tokens), targets)
    for parameter in model.parameters():
        loss = loss + parameter.square().sum()
    return StepOutput(loss, targets.ne(-100).sum())


DRAWN: list[float] = []  # by ``drawing``


def drawing(model: Any, batch: Any) -> StepOutput:
    """Draw a random number before the model is called, and after it."""
    tokens, targets = batch
    DRAWN.append(float(torch.rand(())))
    loss = token_cross_entropy(model(tokens), targets) * torch.rand(()).add(1).to(torch.float32)
    return StepOutput(loss, targets.ne(-100).sum())


class Strided(Plain):
    """Has hidden states, and gradients of them, that are not contiguous."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the first hidden state, with features before positions in memory."""
        return super().embed(tokens).mT.contiguous().mT

    def context(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Reject token 99 on ranks without the first stage."""
        is_first = cast(Layer, self.blocks[0]).linear.weight is not None
        if (tokens == 99).any() and not is_first:
            raise ValueError("99 is no token")
        return super().context(tokens)


class Counting(Plain):
    """Counts its forwards in training, on the last stage."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.register_buffer("seen", torch.zeros(()))

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits."""
        if self.training:
            self.seen += len(hidden)
        return super().head(hidden)
