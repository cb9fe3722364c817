"""A BERT-type classifier of token sequences: new, or from a folder of trained weights."""

from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bert(nn.Module):
    """transformers' BERT classifier over token ids; padding does not change a logit.

    With ``ngrams`` above 1 each position also gets an embedding for the two, three, … tokens that
    end there, as in fastText (arXiv:1607.01759). If tokens are characters, these groups are words.

    A pretrained folder has the config and weights that save_pretrained writes. It sets the sizes.
    The classifier's head is new unless the folder has a head of the right size.

    Raises:
        ValueError: the sizes do not fit each other or the pretrained model, or the folder cannot be
            loaded.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        vocab_size: int,  # rows of the embedding; every id is below it
        max_length: int,  # most tokens of a sequence
        padding_id: int = 0,  # pads short sequences
        num_layers: int = 2,  # attention layers
        width: int = 128,  # features of a token
        num_heads: int = 2,  # attention heads; must divide the width
        feedforward: int = 512,  # hidden features of a layer's feed-forward part
        dropout: float = 0.1,  # probability of dropping a feature or an attention weight
        ngrams: int = 1,  # longest group of tokens with an embedding; 1: single tokens only
        ngram_buckets: int = 8192,  # rows of each table of groups, which are hashed
        pretrained: str | None = None,  # folder of trained weights
    ) -> None:
        transformers: Any = import_module("transformers")  # takes seconds

        super().__init__()
        self.padding_id = padding_id
        if pretrained is not None:
            if ngrams > 1:
                raise ValueError(
                    f"model.pretrained ({pretrained}) has no embeddings for groups of tokens; use "
                    "model.ngrams=1"
                )
            self.network: Any = _pretrained(pretrained, num_classes)
            _validate_sizes(self.network.config, vocab_size, max_length, pretrained)
        else:
            if width % num_heads:
                raise ValueError(
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
                pad_token_id=padding_id,
                num_labels=num_classes,
            )
            self.network = transformers.BertForSequenceClassification(config)
        self.ngram_buckets = ngram_buckets
        self.ngrams = nn.ModuleList(nn.Embedding(ngram_buckets, width) for _ in range(1, ngrams))
        for parameter in self.ngrams.parameters():
            nn.init.normal_(parameter, std=0.02)  # as BERT's embeddings

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (batch, tokens), padded at their end, to logits (batch, num_classes)."""
        mask = ids.ne(self.padding_id).long()
        if not self.ngrams:
            return cast(Tensor, self.network(input_ids=ids, attention_mask=mask).logits)
        embeddings = self.network.get_input_embeddings()(ids)
        key = ids.long()
        for size, table in enumerate(self.ngrams, start=1):
            earlier = F.pad(ids, (size, 0))[:, : ids.shape[1]]  # the token `size` places before
            key = (key * 1_000_003 + earlier) % self.ngram_buckets  # a rolling hash
            embeddings = embeddings + table(key)
        return cast(Tensor, self.network(inputs_embeds=embeddings, attention_mask=mask).logits)


def _pretrained(folder: str, num_classes: int) -> nn.Module:
    """Return the folder's model with a head for `num_classes` classes."""
    transformers: Any = import_module("transformers")
    # Otherwise every rank prints the weights that a classifier does not use.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        network = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=num_classes,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=False,  # None would ask whether to run the folder's Python files
            dtype=torch.float32,
        )
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(f"model.pretrained ({folder}) cannot be loaded: {error}") from error
    return cast(nn.Module, network)


def _validate_sizes(config: Any, vocab_size: int, max_length: int, folder: str) -> None:
    if vocab_size > config.vocab_size:
        raise ValueError(
            f"dataset.tokenizer has ids up to {vocab_size - 1} and model.pretrained ({folder}) an "
            f"embedding of {config.vocab_size} rows; use the tokenizer that came with the model"
        )
    if max_length > (most := getattr(config, "max_position_embeddings", max_length)):
        raise ValueError(
            f"dataset.max_length ({max_length}) exceeds the {most} positions of model.pretrained "
            f"({folder}); use dataset.max_length={most}"
        )
