"""Text files for language models: tokens in one long sequence, cut into samples of equal length."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddp_runner.data.dataset import Dataset
from ddp_runner.data.sources import shared
from ddp_runner.data.splits import TokenSplit
from ddp_runner.data.text_tokenizer import (
    NUM_BYTES,
    VOCABULARIES,
    build_text_tokenizer,
    load_text_tokenizer,
)
from ddp_runner.errors import UserError, os_errors

SEPARATOR = "\n\n"  # between files, and between topics of the bundled text
MOST_SHORT = 2**16  # most tokens of a vocabulary with ids of two bytes


@dataclass(frozen=True)
class Text:
    """Files of UTF-8 text, joined; the end is the evaluation split."""

    name: str
    path: str | Sequence[str] | None = None  # under data_root; None: Python's language reference
    vocabulary: str = "bytes"  # bytes, characters or bpe
    vocab_size: int = 2048  # most tokens of a bpe vocabulary built here
    tokenizer: str | None = None  # folder of a tokenizer to use instead of building a vocabulary
    sequence_length: int = 128  # tokens of a sample
    eval_fraction: float = 0.1  # fraction of the characters

    def __post_init__(self) -> None:
        shared.validate_fields(self, VOCABULARIES, sequence_length=1, vocab_size=NUM_BYTES)
        paths = [self.path] if isinstance(self.path, str | None) else self.path
        if not paths or not all(path is None or (isinstance(path, str) and path) for path in paths):
            raise UserError(
                f"dataset.path ({self.path}) must be a file, or a list of files",
                "write dataset.path=my.txt",
            )

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the fields and files that the tokens depend on; samples are cut later."""
        fields = asdict(self)
        del fields["sequence_length"]
        if self.path is None:
            fields["text"] = hashlib.sha256(bundled_text().encode()).hexdigest()
        else:
            fields["text"] = [shared.stamps([path]) for path in self._paths(data_root)]
        return fields | shared.tokenizer_facts(self.tokenizer)

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Read, split and encode; the tokens are unsigned int16, or int32 in a large vocabulary.

        The vocabulary is built from the training split.

        Raises:
            UserError: a file is missing or not UTF-8, the tokenizer is unusable, or the text is
                too short.
        """
        own = map(_read_file, self._paths(data_root))
        text = bundled_text() if self.path is None else SEPARATOR.join(own)
        cut = round(len(text) * (1 - self.eval_fraction))
        parts = {"train": text[:cut], "eval": text[cut:]}
        if self.tokenizer is not None:
            tokenizer = load_text_tokenizer(Path(self.tokenizer))
        else:
            tokenizer = build_text_tokenizer(
                parts["train"], vocabulary=self.vocabulary, vocab_size=self.vocab_size
            )
        tensors = {
            "vocab_size": torch.tensor(tokenizer.vocab_size),
            **shared.kept_tensors(tokenizer.to_bytes()),
        }
        is_short = tokenizer.vocab_size <= MOST_SHORT
        for split, part in parts.items():
            encoded = tokenizer.encode(part)
            if len(encoded) < 2:
                raise UserError(
                    f"the {split} split of dataset={self.name} has {len(encoded)} tokens",
                    "give a longer text, or change dataset.eval_fraction",
                )
            encoded = encoded.astype(np.uint16 if is_short else np.int32)
            tokens = torch.from_numpy(encoded.view(np.int16) if is_short else encoded)
            # Views: the cache keeps their bytes once.
            tensors |= {
                f"{split}_tokens": tokens,
                f"{split}_inputs": tokens[:-1],
                f"{split}_targets": tokens[1:],
            }
        return tensors

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the samples, with their tokenizer.

        Raises:
            UserError: a split is shorter than a sample.
        """
        train, evaluation = (self._split(name, tensors) for name in ("train", "eval"))
        vocab_size = int(tensors["vocab_size"])
        note = (
            f"{self.name}: {len(train.tokens):,} tokens to train on and "
            f"{len(evaluation.tokens):,} to evaluate, from a vocabulary of {vocab_size:,}"
        )
        return Dataset(
            self.name,
            train,
            evaluation,
            num_classes=None,
            mean=None,
            vocab_size=vocab_size,
            files=shared.kept_files(tensors),
            notes=(note,),
        )

    def _split(self, name: str, tensors: Mapping[str, Tensor]) -> TokenSplit:
        split = TokenSplit(tensors[f"{name}_tokens"], self.sequence_length)
        if not len(split):
            num_tokens = len(split.tokens)
            raise UserError(
                f"the {name} split of dataset={self.name} has {num_tokens} tokens, too few for "
                f"dataset.sequence_length={self.sequence_length}",
                f"use {num_tokens - 1} or less",
            )
        return split

    def _paths(self, data_root: Path) -> list[Path]:
        paths = [self.path] if isinstance(self.path, str) else self.path or ()
        return [data_root / path for path in paths]


def bundled_text() -> str:
    """Return the topics that Python's ``help()`` shows, in order; they differ between versions."""
    from pydoc_data.topics import topics

    return SEPARATOR.join(text for _, text in sorted(topics.items()))


def _read_file(path: Path) -> str:
    fix = "give a file under data_root, or an absolute path"
    with os_errors(f"dataset.path: {path.absolute()} cannot be read", fix=fix):
        content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x})",
            "save it as UTF-8",
        ) from error
