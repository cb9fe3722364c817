"""Llama 3 as torchtitan trains it: grouped queries, an own output layer, selective recomputation.

Sources: arXiv:2407.21783, and the selective activation checkpointing of torchtitan's llama3,
which keeps attention and every second matrix product.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ddp_runner.models.gpt import rotary_table, rotate

NUM_KEY_HEADS = 8
ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
# Llama 3 8B in the terms of the config; the layers outside blocks are gathered in bf16 as well.
LLAMA_8B = (
    *("model=gpt", "model._target_=llama.Llama", "model.name=llama3_8b", "allowed_targets=[llama]"),
    *("model.min_vocab_size=128256", "model.num_layers=32", "model.width=4096"),
    *("model.num_heads=32", "model.feedforward=14336", "model.blocks=[blocks.*,tokens,norm,out]"),
    *("parallelism=fsdp", "train.precision=bf16", "dataset.sequence_length=8192"),
)


def linear(width: int, features: int) -> nn.Linear:
    """Return a layer without biases."""
    return nn.Linear(width, features, bias=False)


class Block(nn.Module):
    """Attention of grouped queries and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, *, width: int, num_heads: int, feedforward: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = linear(width, width), linear(width, width)
        self.key, self.value = (linear(width, NUM_KEY_HEADS * self.head_dim) for _ in range(2))
        self.gate, self.up = linear(width, feedforward), linear(width, feedforward)
        self.down = linear(feedforward, width)

    def forward(self, hidden: Tensor, rotary: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        result: Tensor = checkpoint(
            self.compute, hidden, rotary, use_reentrant=False, context_fn=selective
        )
        return result

    def compute(self, hidden: Tensor, rotary: Tensor) -> Tensor:
        """Compute the block."""
        batch, length, _ = hidden.shape
        inputs = self.norm(hidden)

        def heads(projection: nn.Linear) -> Tensor:  # (batch, heads, length, head_dim)
            return projection(inputs).view(batch, length, -1, self.head_dim).transpose(1, 2)

        query, key = rotate(heads(self.query), rotary), rotate(heads(self.key), rotary)
        groups = query.shape[1] // NUM_KEY_HEADS
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, heads(self.value)))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        inputs = self.mlp_norm(hidden)
        result: Tensor = hidden + self.down(F.silu(self.gate(inputs)) * self.up(inputs))
        return result


def selective() -> Any:
    """Return the contexts that keep attention and every second matrix product."""
    num_products = {False: 0, True: 0}  # by whether it recomputes

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_product = operator is torch.ops.aten.mm.default
        num_products[context.is_recompute] += is_product
        is_odd = num_products[context.is_recompute] % 2 == 1
        keeps = operator in ATTENTION or (is_product and is_odd)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """Predicts each next token."""

    def __init__(
        self,
        *,
        vocab_size: int,
        min_vocab_size: int,
        num_layers: int,
        width: int,
        num_heads: int,
        feedforward: int,
        dropout: float,
    ) -> None:
        super().__init__()
        vocab_size, self.head_dim = max(vocab_size, min_vocab_size), width // num_heads
        self.tokens = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            Block(width=width, num_heads=num_heads, feedforward=feedforward)
            for _ in range(num_layers)
        )
        self.norm, self.out = nn.RMSNorm(width), linear(width, vocab_size)

    def init_weights(self, module: nn.Module) -> None:
        """Draw the parameters of one submodule."""
        if isinstance(module, nn.Linear | nn.Embedding | nn.RMSNorm):
            module.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) to logits (batch, length, vocab)."""
        hidden = self.tokens(tokens)
        rotary = rotary_table(tokens.shape[1], self.head_dim, tokens.device)
        for block in self.blocks:
            hidden = block(hidden, rotary)
        logits: Tensor = self.out(self.norm(hidden))
        return logits
