"""A BERT-type classifier of token sequences: from scratch, or from a folder of trained weights."""

from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HASH_FACTOR = 1_000_003  # of the rolling hash that gives each group of tokens its row


class Bert(nn.Module):
    """transformers' classifier over token ids; what is padded does not change a logit.

    With ``ngrams`` above 1 each position's embedding also has a part for the two, three, … tokens
    that end there, as in fastText (arXiv:1607.01759): words, where the tokens are characters.

    Args:
        num_classes: Classes to tell apart.
        vocab_size: Rows of the embedding; ids are below it. With a tokenizer, that has its own.
        max_length: Most tokens of a sequence.
        num_layers: Attention layers.
        width: Features of a token.
        num_heads: Attention heads; they divide the width.
        feedforward: Features within a layer's feed-forward part.
        dropout: Probability of dropping a feature or an attention weight.
        ngrams: Most tokens that have an embedding together; 1: only single tokens have.
        ngram_buckets: Rows of each table of such embeddings; groups share them by chance.
        pretrained: Folder with a config and weights, as save_pretrained leaves it; the sizes above
            are then its own, and the classes' head is new unless it has one that fits.
        tokenizer: Folder of the tokenizer that made the ids; None: they are the runner's own.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        vocab_size: int,
        max_length: int,
        num_layers: int = 2,
        width: int = 128,
        num_heads: int = 2,
        feedforward: int = 512,
        dropout: float = 0.1,
        ngrams: int = 1,
        ngram_buckets: int = 8192,
        pretrained: str | None = None,
        tokenizer: str | None = None,
    ) -> None:
        from ddp_runner.data.tokenizer_files import padding_id, token_ids
        from ddp_runner.errors import UserError

        super().__init__()
        transformers = _transformers()
        self.padding = 0
        if tokenizer is not None:
            ids = token_ids(Path(tokenizer))
            vocab_size, self.padding = max(ids.values()) + 1, padding_id(ids, Path(tokenizer))
        if pretrained is not None:
            if tokenizer is None or ngrams > 1:
                raise UserError(
                    f"model.pretrained ({pretrained}) knows its own tokens alone; leave out "
                    "dataset.tokenizer, which follows it, or name its folder, and model.ngrams"
                )
            self.network: Any = _pretrained(pretrained, num_classes)
            _validate_sizes(self.network.config, vocab_size, max_length, pretrained)
        else:
            if width % num_heads:
                raise UserError(
                    f"model.width ({width}) is not divisible by model.num_heads ({num_heads}); "
                    f"use model.width={width // num_heads * num_heads or num_heads}"
                )
            config = transformers.BertConfig(
                vocab_size=vocab_size,
                max_position_embeddings=max_length,
                num_hidden_layers=num_layers,
                hidden_size=width,
                num_attention_heads=num_heads,
                intermediate_size=feedforward,
                hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
                pad_token_id=self.padding,
                num_labels=num_classes,
            )
            self.network = transformers.BertForSequenceClassification(config)
        self.ngram_buckets = ngram_buckets
        self.ngrams = nn.ModuleList(nn.Embedding(ngram_buckets, width) for _ in range(1, ngrams))
        for parameter in self.ngrams.parameters():
            nn.init.normal_(parameter, std=0.02)  # as BERT's own embeddings

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (batch, tokens), padded at their end, to logits (batch, num_classes)."""
        mask = ids.ne(self.padding).long()
        if not self.ngrams:
            return cast(Tensor, self.network(input_ids=ids, attention_mask=mask).logits)
        embeddings = self.network.get_input_embeddings()(ids)
        key = ids.long()
        for size, table in enumerate(self.ngrams, start=1):
            earlier = F.pad(ids, (size, 0))[:, : ids.shape[1]]  # the token `size` places before
            key = (key * HASH_FACTOR + earlier) % self.ngram_buckets
            embeddings = embeddings + table(key)
        return cast(Tensor, self.network(inputs_embeds=embeddings, attention_mask=mask).logits)


def _transformers() -> Any:
    """Return the library, which takes seconds to import, and which not every user has."""
    from ddp_runner.data.tokenizer_files import NEEDS_TEXT_EXTRA
    from ddp_runner.errors import UserError

    try:
        return import_module("transformers")
    except ImportError as error:
        raise UserError(f"model=bert: {NEEDS_TEXT_EXTRA}") from error


def _pretrained(folder: str, num_classes: int) -> nn.Module:
    """Return the folder's model with a head for so many classes.

    Raises:
        ValueError: The folder holds no such model.
    """
    transformers = _transformers()
    # Each rank would tell which of the folder's weights a classifier has no use for.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        network = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=num_classes,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=False,  # else it asks whether to run the folder's Python files
            dtype=torch.float32,
        )
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(f"model.pretrained ({folder}) cannot be loaded: {error}") from error
    return cast(nn.Module, network)


def _validate_sizes(config: Any, vocab_size: int, max_length: int, folder: str) -> None:
    from ddp_runner.errors import UserError

    if vocab_size > config.vocab_size:
        raise UserError(
            f"dataset.tokenizer has ids up to {vocab_size - 1} and model.pretrained ({folder}) an "
            f"embedding of {config.vocab_size} rows; name the tokenizer that came with the model"
        )
    if max_length > (most := getattr(config, "max_position_embeddings", max_length)):
        raise UserError(
            f"dataset.max_length ({max_length}) exceeds the {most} positions of model.pretrained "
            f"({folder}); use dataset.max_length={most}"
        )
