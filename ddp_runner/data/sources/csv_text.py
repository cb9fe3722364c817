"""Texts and their classes from a CSV file, split and encoded as token ids once."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddp_runner.data.dataset import Dataset, require_positive, splits
from ddp_runner.data.downloads import stamps
from ddp_runner.data.sources.csv_rows import read_rows
from ddp_runner.data.tokenizer import (
    PADDING,
    SPECIAL_TOKENS,
    VOCABULARIES,
    build_tokenizer,
    encode,
    load_tokenizer,
)
from ddp_runner.data.tokenizer_files import TOKENIZER_FILE, VOCABULARY_FILE, padding_id, token_ids
from ddp_runner.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EVAL_RUNS = 4  # runs of rising length in the eval split, so that ranks get similar lengths
FILE_KEY = "file:"  # prefix of the keys of tensors that hold a file's bytes


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
        require_positive(self, "num_classes")
        for key, least in (("max_length", 3), ("vocab_size", len(SPECIAL_TOKENS) + 1)):
            if getattr(self, key) < least:
                raise UserError(f"dataset.{key} ({getattr(self, key)}) must be at least {least}")
        if not 0 < self.eval_fraction < 1:
            raise UserError(
                f"dataset.eval_fraction ({self.eval_fraction}) must be between 0 and 1; use 0.1"
            )
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
        folder = Path(self.tokenizer) if self.tokenizer is not None else None
        names = (TOKENIZER_FILE, VOCABULARY_FILE, "tokenizer_config.json")
        keys = {key: value for key, value in asdict(self).items() if key != "group_by_length"}
        return keys | {
            "csv": stamps([data_root / self.path]),
            "tokenizer": stamps([folder / name for name in names]) if folder else None,
        }

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Read, split and encode; the ids are int32 ``(n, max_length)``.

        The eval split is sorted by length, because its batches are slices and should need little
        padding.

        Raises:
            UserError: the CSV or the tokenizer is missing or unusable.
        """
        parts, num_dropped = self.read(data_root)
        tokenizer, padding = self._tokenizer(parts["train"][0])
        tensors = {
            "padding": torch.tensor(padding),
            "num_dropped": torch.tensor(num_dropped),
            f"{FILE_KEY}tokenizer/{TOKENIZER_FILE}": torch.frombuffer(
                bytearray(tokenizer.to_str().encode()), dtype=torch.uint8
            ),
        }
        for split, (texts, labels) in parts.items():
            ids = encode(tokenizer, texts, max_length=self.max_length, padding=padding)
            targets = torch.tensor(labels)
            if split == "eval":
                by_length = ids.ne(padding).sum(dim=1).argsort(stable=True)
                runs = torch.cat([by_length[start::EVAL_RUNS] for start in range(EVAL_RUNS)])
                ids, targets = ids[runs], targets[runs]
            tensors |= {f"{split}_inputs": ids, f"{split}_targets": targets}
        return tensors

    def read(self, data_root: Path) -> tuple[dict[str, tuple[list[str], list[int]]], int]:
        """Return the texts and classes of each split, and the number of rows that lack one of them.

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
        num_rows = len(rows.texts)
        num_eval = round(num_rows * self.eval_fraction)
        if not 0 < num_eval < num_rows:
            raise UserError(
                f"dataset.eval_fraction ({self.eval_fraction}) of the {num_rows} rows in {path} "
                "leaves a split empty; use 0.5, or add rows"
            )
        generator = torch.Generator().manual_seed(self.split_seed)
        order = torch.randperm(num_rows, generator=generator).tolist()
        numbers = {"train": order[num_eval:], "eval": order[:num_eval]}
        parts = {
            split: ([rows.texts[row] for row in part], [rows.labels[row] for row in part])
            for split, part in numbers.items()
        }
        return parts, rows.num_dropped

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the sequences of token ids, with the tokenizer that made them."""
        folder = self.tokenizer
        num_dropped = int(tensors["num_dropped"])
        note = f"{self.path}: {num_dropped:,} rows without {self.text} or {self.label} are left out"
        return Dataset(
            self.name,
            *splits(tensors),
            num_classes=self.num_classes,
            padding_id=int(tensors["padding"]),
            vocab_size=max(token_ids(Path(folder)).values()) + 1 if folder is not None else None,
            group_by_length=self.group_by_length,
            files={
                key.removeprefix(FILE_KEY): value.numpy().tobytes()
                for key, value in tensors.items()
                if key.startswith(FILE_KEY)
            },
            notes=(note,) if num_dropped else (),
        )

    def _tokenizer(self, corpus: Sequence[str]) -> tuple["Tokenizer", int]:
        """Return the tokenizer and its padding id."""
        if self.tokenizer is not None:
            folder = Path(self.tokenizer)
            return load_tokenizer(folder), padding_id(token_ids(folder), folder)
        tokenizer = build_tokenizer(corpus, vocabulary=self.vocabulary, vocab_size=self.vocab_size)
        return tokenizer, SPECIAL_TOKENS.index(PADDING)
