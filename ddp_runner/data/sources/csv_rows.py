"""Reads texts and classes from a CSV file; its errors name the line and, of a class, the column."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.errors import UserError, os_errors


@dataclass(frozen=True)
class Rows:
    """The samples of a CSV file, in the file's order."""

    texts: list[str]
    labels: list[int]  # classes from 0
    lines: list[int]  # in the file, from 1: where each sample begins
    num_dropped: int  # rows that lacked a text or a class


def read_rows(
    path: Path, *, text: str, label: str, num_classes: int, encoding: str, delimiter: str
) -> Rows:
    """Return the rows that have both a text and a class; for the keywords see ``CsvText``.

    Raises:
        UserError: the file is missing or empty, or a row is malformed.
    """
    texts, labels, lines, num_dropped = [], [], [], 0
    (_, header), *rows = _records(_decoded(path, encoding), delimiter, path)
    for column in (text, label):
        if column not in header:
            raise UserError(
                f"{path} has the columns {', '.join(header)} and not {column}; name them with "
                "dataset.text and dataset.label"
            )
    text_at, label_at = header.index(text), header.index(label)
    for line, fields in rows:
        if len(fields) > len(header):
            raise UserError(
                f"{path}, line {line} has {len(fields)} columns, the first line {len(header)}; "
                f"quote a text that contains {delimiter}"
            )
        whole = fields + [""] * (len(header) - len(fields))
        content, value = whole[text_at].strip(), whole[label_at].strip()
        if not content or not value:
            num_dropped += 1
            continue
        if (number := _class(value, num_classes)) is None:
            raise UserError(
                f"{path}, line {line}, column {label}: {value[:40]} is not a class from 0 to "
                f"{num_classes - 1}; correct it, or give dataset.num_classes"
            )
        texts.append(content)
        labels.append(number)
        lines.append(line)
    if not texts:
        raise UserError(f"{path} has no row with both {text} and {label}; add some")
    return Rows(texts, labels, lines, num_dropped)


def _class(value: str, num_classes: int) -> int | None:
    try:
        number = float(value)  # some programs write 1 as 1.0
    except ValueError:
        return None
    return int(number) if number in range(num_classes) else None


def _records(content: str, delimiter: str, path: Path) -> list[tuple[int, list[str]]]:
    """Return all rows, including the first line, each with the number of its first line."""
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    records, line = [], 1
    # The csv module limits a field to 128 KiB to find unclosed quotes. A text may be longer, and
    # unclosed quotes show at the end of the file. The limit is global to the process, so read all
    # rows at once: a generator would restore it only when it is collected.
    limit = csv.field_size_limit(max(len(content), 1))
    try:
        for fields in reader:
            records.append((line, fields))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}, line {line}: {error}; close its quotes, and double those within a text"
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
    except UnicodeError as error:
        place = ""
        if isinstance(error, UnicodeDecodeError):  # some codecs give no position
            number = 1 + data.count(b"\n", 0, error.start)
            place = f", line {number}"
        raise UserError(
            f"{path}{place}: not {encoding}; save the file as utf-8, or name its encoding, as in "
            "dataset.encoding=gb18030"
        ) from error
    before, nul, _ = content.partition("\0")
    if nul:
        number = 1 + before.count("\n")
        raise UserError(
            f"{path}, line {number}: a NUL byte, which is not text; save the file as utf-8, or "
            "name its encoding, as in dataset.encoding=utf-16"
        )
    if not content.strip():
        raise UserError(f"{path} is empty; its first line must name its columns")
    return content
