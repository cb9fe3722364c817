"""A decoder-only transformer for language modelling: GPT with the parts of Llama.

Sources: GPT-2 (Radford et al., 2019), Llama (arXiv:2302.13971), rotary positions
(arXiv:2104.09864), SwiGLU (arXiv:2002.05202), RMSNorm (arXiv:1910.07467).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROTARY_BASE = 10_000.0


class ResidualLinear(nn.Linear):
    """A projection onto the residual stream; its initial weights are smaller."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions.

    The number of heads follows from the projections' shapes: a tensor-parallel rank has fewer.
    """

    def __init__(self, *, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = width // num_heads, dropout
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = ResidualLinear(width, width, bias=False)

    def forward(self, hidden: Tensor, rotary: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape; for `rotary` see ``rotary_table``."""
        batch, length, _ = hidden.shape

        def heads(projection: nn.Linear) -> Tensor:  # (batch, heads, length, head_dim)
            features: Tensor = projection(hidden)
            return features.view(batch, length, -1, self.head_dim).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            rotate(heads(self.query), rotary),
            rotate(heads(self.key), rotary),
            heads(self.value),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    """SwiGLU: a gated layer, three projections without biases."""

    def __init__(self, *, width: int, feedforward: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, feedforward, bias=False)
        self.up = nn.Linear(width, feedforward, bias=False)
        self.down = ResidualLinear(feedforward, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        out: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual connection."""

    def __init__(self, *, width: int, num_heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width=width, num_heads=num_heads, dropout=dropout)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = Mlp(width=width, feedforward=feedforward)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, rotary: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape; for `rotary` see ``rotary_table``."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), rotary))
        out: Tensor = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return out


class GPT(nn.Module):
    """Predicts each next token; its output layer is the embedding, transposed.

    It has no buffers and takes sequences of any length, so it can be built on the meta device,
    sharded, and then initialised module by module with ``init_weights``.

    Raises:
        ValueError: the sizes do not fit each other.
    """

    def __init__(
        self,
        *,
        vocab_size: int,  # every token is below it
        min_vocab_size: int = 0,  # smallest number of rows of the embedding
        num_layers: int = 4,
        width: int = 128,  # features of a token
        num_heads: int = 4,  # attention heads; twice their number must divide the width
        feedforward: int | None = None,  # hidden features of an MLP; None: 8/3 of the width
        dropout: float = 0.0,  # probability of dropping a feature or an attention weight
    ) -> None:
        super().__init__()
        if width % (2 * num_heads):
            raise ValueError(
                f"model.width ({width}) is not divisible by twice model.num_heads ({num_heads}), "
                f"as rotary positions need; use {2 * num_heads * max(1, width // num_heads // 2)}"
            )
        self.num_layers, self.head_dim = num_layers, width // num_heads
        if feedforward is None:  # three matrices then have the parameters of two of 4 x width
            multiple = 64  # GPUs multiply faster if it divides a matrix's size
            feedforward = math.ceil(8 * width / 3 / multiple) * multiple
        self.tokens = nn.Embedding(max(vocab_size, min_vocab_size), width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width=width, num_heads=num_heads, feedforward=feedforward, dropout=dropout)
            for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(width)
        if not self.tokens.weight.is_meta:
            for module in self.modules():
                self.init_weights(module)

    def init_weights(self, module: nn.Module) -> None:
        """Draw the parameters of one submodule without its children.

        The result depends only on the random state and the submodule.
        """
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02  # as in GPT-2
            if isinstance(module, ResidualLinear):  # two per block: keeps the size of their sum
                std /= math.sqrt(2 * self.num_layers)
            nn.init.normal_(module.weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 (batch, length), to next-token logits (batch, length, vocab)."""
        hidden = self.embed(tokens)
        context = self.context(tokens)
        for block in self.blocks:
            hidden = block(hidden, *context)
        return self.head(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return what the first block takes, (batch, length, width)."""
        hidden: Tensor = self.dropout(self.tokens(tokens))
        return hidden

    def context(self, tokens: Tensor) -> tuple[Tensor]:
        """Return what each block takes besides the hidden state."""
        return (rotary_table(tokens.shape[1], self.head_dim, tokens.device),)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits of what the last block returns."""
        return F.linear(self.norm(hidden), self.tokens.weight)


def rotary_table(length: int, head_dim: int, device: torch.device) -> Tensor:
    """Return cosines and sines of each position's angles, float32 (2, length, head_dim / 2).

    Each forward computes it, in microseconds: a buffer would be empty after a build on the meta
    device.
    """
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE ** (-pairs / head_dim))
    return torch.stack([angles.cos(), angles.sin()])


def rotate(features: Tensor, rotary: Tensor) -> Tensor:
    """Turn each pair of features (batch, heads, length, head_dim) by its position's angle.

    Pairs are a feature of the first half and its counterpart in the second, as in Llama. The
    product of a query and a key then depends on the distance between their positions alone.
    """
    cos, sin = rotary
    first, second = features.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.type_as(features)
