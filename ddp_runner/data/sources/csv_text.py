"""Texts and their classes from a CSV file, split and encoded as token ids once."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ddp_runner.data.dataset import Dataset, splits
from ddp_runner.data.sources import shared
from ddp_runner.data.tokenizer import (
    SPECIAL_TOKENS,
    VOCABULARIES,
    build_tokenizer,
    load_tokenizer,
    padding_id,
)
from ddp_runner.errors import UserError, os_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHUNK = 8192  # texts encoded at once
INTEGER = re.compile(r"[0-9]+(\.0*)?")  # some programs write 1 as 1.0
EVAL_RUNS = 4  # sorted runs in the eval split, so that ranks get similar lengths


class Row(NamedTuple):
    """A row of the file that has a text and a class."""

    text: str
    label: int  # class, from 0
    line: int  # first line in the file, from 1


@dataclass(frozen=True)
class CsvText:
    """One sample per row, with columns for its text and its class, 0 to num_classes - 1."""

    name: str
    path: str  # path of the CSV, under data_root
    text: str  # name of the text's column
    label: str  # name of the class's column
    num_classes: int
    max_length: int  # most tokens of a sample, including the two special tokens at its ends
    tokenizer: str | None  # folder of a tokenizer; None: build a vocabulary from the train split
    vocabulary: str  # wordpiece or characters
    vocab_size: int  # most tokens of a vocabulary built here
    eval_fraction: float = 0.1
    split_seed: int = 0  # for the data; the run has its own seed
    encoding: str = "utf-8"
    delimiter: str = ","
    group_by_length: bool = True  # put texts of similar length in one batch: less padding

    def __post_init__(self) -> None:
        least_tokens = len(SPECIAL_TOKENS) + 1
        shared.validate_fields(self, VOCABULARIES, max_length=3, vocab_size=least_tokens)
        if len(self.delimiter) != 1 or self.delimiter in '\r\n"':
            raise UserError(
                f"dataset.delimiter ({self.delimiter!r}) must be one character",
                "use a comma, a semicolon or a tab",
            )

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Return the fields that the tensors depend on, and the stamps of the files."""
        fields = {key: value for key, value in asdict(self).items() if key != "group_by_length"}
        csv_stamps = shared.stamps([data_root / self.path])
        return {**fields, "csv": csv_stamps, **shared.tokenizer_facts(self.tokenizer)}

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Read, split and encode; the ids are int32 ``(n, max_length)``.

        The eval split is sorted by length: its batches are slices and should need little padding.

        Raises:
            UserError: the CSV or the tokenizer is missing or unusable.
        """
        return self._build(data_root)[0]

    def sample_names(self, data_root: Path) -> dict[str, list[int]]:
        """Return each sample's line in the CSV, from 1, in the order of each split."""
        return self._build(data_root)[1]

    def _build(self, data_root: Path) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        rows, num_dropped = self.rows(path := data_root / self.path)
        numbers = shared.shuffled_split(
            len(rows), self.eval_fraction, seed=self.split_seed, noun="rows", origin=path
        )
        parts = {split: [rows[row] for row in part] for split, part in numbers.items()}
        lines = {split: [row.line for row in part] for split, part in parts.items()}
        if self.tokenizer is not None:
            tokenizer = load_tokenizer(Path(self.tokenizer))
        else:
            tokenizer = build_tokenizer(
                [row.text for row in parts["train"]],
                vocabulary=self.vocabulary,
                vocab_size=self.vocab_size,
            )
        padding = padding_id(tokenizer, folder=self.tokenizer)
        tensors = {
            "padding": torch.tensor(padding),
            "num_dropped": torch.tensor(num_dropped),
            **shared.kept_tensors(tokenizer.to_str().encode()),
        }
        for split, part in parts.items():
            texts = [row.text for row in part]
            ids = encode(tokenizer, texts, max_length=self.max_length, padding=padding)
            targets = torch.tensor([row.label for row in part])
            if split == "eval":
                by_length = ids.ne(padding).sum(dim=1).argsort(stable=True)
                runs = torch.cat([by_length[start::EVAL_RUNS] for start in range(EVAL_RUNS)])
                ids, targets = ids[runs], targets[runs]
                lines[split] = [lines[split][row] for row in runs.tolist()]
            tensors |= {f"{split}_inputs": ids, f"{split}_targets": targets}
        return tensors, lines

    def rows(self, path: Path) -> tuple[list[Row], int]:
        """Return the file's rows with a text and a class, and the number of other rows.

        Raises:
            UserError: the file is missing or empty, or a row is malformed.
        """
        rows, num_dropped = list[Row](), 0
        content = _decoded(path, self.encoding)
        (_, header), *records = _records(content, self.delimiter, path)
        for column in (self.text, self.label):
            if column not in header:
                raise UserError(
                    f"{path} has the columns {', '.join(header)} and not {column}",
                    "name two in dataset.text and dataset.label",
                )
        indices = [header.index(column) for column in (self.text, self.label)]
        for line, fields in records:
            if len(fields) > len(header):
                raise UserError(
                    f"{path}, line {line} has {len(fields)} columns, the first line {len(header)}",
                    f"quote a text that contains {self.delimiter}",
                )
            text, value = ("".join(fields[index : index + 1]).strip() for index in indices)
            if not text or not value:
                num_dropped += 1
            elif INTEGER.fullmatch(value) and int(float(value)) < self.num_classes:
                rows.append(Row(text, int(float(value)), line))
            else:
                raise UserError(
                    f"{path}, line {line}, column {self.label}: {value[:40]} is not a class from 0 "
                    f"to {self.num_classes - 1}",
                    "correct it, or increase dataset.num_classes",
                )
        if not rows:
            raise UserError(f"{path} has no row with both {self.text} and {self.label}", "add some")
        return rows, num_dropped

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """Return the sequences of token ids, with their tokenizer."""
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
    tokenizer.enable_padding(length=max_length, pad_id=padding)
    parts = [texts[start : start + CHUNK] for start in range(0, len(texts), CHUNK)]
    ids = [
        torch.tensor([row.ids for row in tokenizer.encode_batch_fast(part)], dtype=torch.int32)
        for part in parts
    ]
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return torch.cat(ids)


def _records(content: str, delimiter: str, path: Path) -> list[tuple[int, list[str]]]:
    """Return all rows, including the header, each with the number of its first line."""
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    records, line = [], 1
    # Long texts exceed the limit, which is the process's.
    limit = csv.field_size_limit(len(content))
    try:
        for fields in reader:
            records.append((line, fields))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {line}: {error}", "close its quotes, and double the quotes inside a text"
        ) from error
    finally:
        csv.field_size_limit(limit)
    return records


def _decoded(path: Path, encoding: str) -> str:
    """Return the file's text without a byte order mark."""
    fix = "name the CSV in dataset.path, under data_root"
    with os_errors(f"{path.absolute()} cannot be read", fix=fix):
        data = path.read_bytes()
    try:
        content = data.decode(encoding).removeprefix("\ufeff")
        if "\0" in content:
            raise UnicodeDecodeError(encoding, data, data.find(b"\0"), len(data), "a NUL byte")
    except (LookupError, UnicodeError) as error:
        if isinstance(error, LookupError):
            raise UserError(
                f"dataset.encoding ({encoding}) is not a text encoding", "use utf-8 or gb18030"
            ) from error
        number = 1 + data.count(b"\n", 0, getattr(error, "start", 0))  # some errors have no start
        raise UserError(
            f"{path}, line {number}: not {encoding}",
            "save the file as utf-8, or name its encoding, as in dataset.encoding=gb18030",
        ) from error
    if not content.strip():
        raise UserError(f"{path} is empty", "name its columns in the first line")
    return content
