"""Texts and their classes from a CSV file, split and encoded as token ids once."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddp_runner.data.dataset import Dataset, splits
from ddp_runner.data.sources import shared
from ddp_runner.data.sources.csv_rows import read_rows
from ddp_runner.data.tokenizer import (
    SPECIAL_TOKENS,
    VOCABULARIES,
    build_tokenizer,
    load_tokenizer,
    padding_id,
)
from ddp_runner.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHUNK = 8192  # texts encoded at once
EVAL_RUNS = 4  # runs of rising length in the eval split, so that ranks get similar lengths
Part = tuple[list[str], list[int], list[int]]  # texts, classes and lines of a split


@dataclass(frozen=True)
class CsvText:
    """One sample per row, with columns for its text and its class, 0 to num_classes - 1."""

    name: str
    path: str  # of the CSV, under data_root
    text: str  # the columns' names
    label: str
    num_classes: int
    max_length: int  # tokens of a sample, including the special ones at its ends
    tokenizer: str | None  # folder of a tokenizer; None: a vocabulary is built from the train split
    vocabulary: str  # wordpiece or characters
    vocab_size: int  # most tokens of a vocabulary built here
    eval_fraction: float = 0.1
    split_seed: int = 0  # of the data, not of the run
    encoding: str = "utf-8"
    delimiter: str = ","
    group_by_length: bool = True  # put texts of similar length in one batch: less padding

    def __post_init__(self) -> None:
        least_tokens = len(SPECIAL_TOKENS) + 1
        shared.require_at_least(self, num_classes=1, max_length=3, vocab_size=least_tokens)
        shared.require_eval_fraction(self.eval_fraction)
        if self.vocabulary not in VOCABULARIES:
            raise UserError(
                f"dataset.vocabulary ({self.vocabulary}) must be one of {', '.join(VOCABULARIES)}"
            )
        try:
            "a".encode(self.encoding)
            csv.reader([], delimiter=self.delimiter)
        except LookupError as error:
            raise UserError(
                f"dataset.encoding ({self.encoding}) is not a text encoding; use utf-8 or gb18030"
            ) from error
        except (TypeError, ValueError) as error:
            raise UserError(
                f"dataset.delimiter ({self.delimiter!r}) must be one character, such as ,"
            ) from error

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the fields that count, and size and modification time of each file."""
        fields = {key: value for key, value in asdict(self).items() if key != "group_by_length"}
        fields["csv"] = shared.stamps([data_root / self.path])
        if self.tokenizer is not None:
            fields["tokenizer"] = shared.tokenizer_stamps(self.tokenizer)
        return fields

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Read, split and encode; the ids are int32 ``(n, max_length)``.

        The eval split is sorted by length, because its batches are slices and should need little
        padding.

        Raises:
            UserError: the CSV or the tokenizer is missing or unusable.
        """
        return self._build(data_root)[0]

    def sample_names(self, data_root: Path) -> dict[str, list[int]]:
        """Return the lines of the CSV, from 1, of the samples of each split in their order.

        Raises:
            UserError: the CSV or the tokenizer is missing or unusable.
        """
        return self._build(data_root)[1]

    def _build(self, data_root: Path) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        """Return the tensors, and the line of each sample."""
        parts, num_dropped = self.read(data_root)
        lines = {split: numbers for split, (_, _, numbers) in parts.items()}
        if self.tokenizer is not None:
            tokenizer = load_tokenizer(Path(self.tokenizer))
        else:
            tokenizer = build_tokenizer(
                parts["train"][0], vocabulary=self.vocabulary, vocab_size=self.vocab_size
            )
        padding = padding_id(tokenizer, folder=self.tokenizer)
        tensors = {
            "padding": torch.tensor(padding),
            "num_dropped": torch.tensor(num_dropped),
            **shared.kept_tensors(tokenizer.to_str().encode()),
        }
        for split, (texts, labels, _) in parts.items():
            ids = encode(tokenizer, texts, max_length=self.max_length, padding=padding)
            targets = torch.tensor(labels)
            if split == "eval":
                by_length = ids.ne(padding).sum(dim=1).argsort(stable=True)
                runs = torch.cat([by_length[start::EVAL_RUNS] for start in range(EVAL_RUNS)])
                ids, targets = ids[runs], targets[runs]
                lines[split] = [lines[split][row] for row in runs.tolist()]
            tensors |= {f"{split}_inputs": ids, f"{split}_targets": targets}
        return tensors, lines

    def read(self, data_root: Path) -> tuple[dict[str, Part], int]:
        """Return the texts, classes and lines of each split, and how many rows lack one of them.

        Raises:
            UserError: the CSV is missing or unusable.
        """
        path = data_root / self.path
        rows = read_rows(
            path,
            text=self.text,
            label=self.label,
            num_classes=self.num_classes,
            encoding=self.encoding,
            delimiter=self.delimiter,
        )
        numbers = shared.shuffled_split(
            len(rows.texts), self.eval_fraction, seed=self.split_seed, noun="rows", place=path
        )
        parts = {
            split: (
                [rows.texts[row] for row in part],
                [rows.labels[row] for row in part],
                [rows.lines[row] for row in part],
            )
            for split, part in numbers.items()
        }
        return parts, rows.num_dropped

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the sequences of token ids, with the tokenizer that made them."""
        num_dropped, vocab_size = int(tensors["num_dropped"]), None
        if self.tokenizer is not None:
            vocab_size = max(load_tokenizer(Path(self.tokenizer)).get_vocab().values()) + 1
        note = f"{self.path}: {num_dropped:,} rows without {self.text} or {self.label} are left out"
        return Dataset(
            self.name,
            *splits(tensors),
            num_classes=self.num_classes,
            padding_id=int(tensors["padding"]),
            vocab_size=vocab_size,
            group_by_length=self.group_by_length,
            files=shared.kept_files(tensors),
            notes=(note,) if num_dropped else (),
        )


def encode(
    tokenizer: "Tokenizer", texts: Sequence[str], *, max_length: int, padding: int
) -> Tensor:
    """Return the texts' token ids, int32 (num_texts, max_length), truncated or padded."""
    tokenizer.enable_truncation(max_length)
    ids = torch.full((len(texts), max_length), padding, dtype=torch.int32)
    for start in range(0, len(texts), CHUNK):
        encodings = tokenizer.encode_batch(list(texts[start : start + CHUNK]))
        for row, encoding in zip(ids[start : start + CHUNK], encodings, strict=True):
            row[: len(encoding.ids)] = torch.tensor(encoding.ids, dtype=torch.int32)
    tokenizer.no_truncation()
    return ids
