"""Reads the texts and classes of a CSV file, and names the line and column of what is wrong."""

import csv
import io
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.errors import UserError

HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")  # which some encodings allow, as utf-7


@dataclass(frozen=True)
class Rows:
    """The samples of a CSV file, in its order."""

    texts: list[str]
    labels: list[int]  # classes
    num_dropped: int  # rows that lacked a text or a class


def read_rows(
    path: Path, *, text: str, label: str, num_classes: int, encoding: str, delimiter: str
) -> Rows:
    """Return the rows that have both a text and a class.

    Args:
        path: of the file, whose first line names its columns.
        text: the column with the texts.
        label: the column with the classes.
        num_classes: classes are whole numbers from 0 to below it.
        encoding: as Python names it.
        delimiter: between two columns.

    Raises:
        UserError: the file is missing or empty, or a row is not as it should be.
    """
    texts, labels, num_dropped = [], [], 0
    (_, header), *rows = _records(_decoded(path, encoding, delimiter), delimiter, path)
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
    if not texts:
        raise UserError(f"{path} has no row with both {text} and {label}; add some")
    return Rows(texts, labels, num_dropped)


def _class(value: str, num_classes: int) -> int | None:
    try:
        number = float(value)  # 1.0 is what some programs make of 1
    except ValueError:
        return None
    return int(number) if number in range(num_classes) else None


def _records(content: str, delimiter: str, path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows, the first line's included, each with the line that it begins at."""
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    records, line = [], 1
    # The csv module's own limit of 128 KiB is there to find quotes that nobody closes. A text may
    # be longer, and such quotes are found at the end of the file. The limit is the whole process's,
    # so all rows are read before anything else can run or fail: a generator would give it back
    # whenever it is collected.
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


def _decoded(path: Path, encoding: str, delimiter: str) -> str:
    """Return the file's text, without the mark that some programs put before it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path.absolute()} cannot be read ({error.strerror}); name the CSV in dataset.path, "
            "under data_root"
        ) from error
    try:
        content = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeError as error:
        place = ""
        with suppress(UnicodeError):  # of codecs that say not where, or cannot read a part
            if isinstance(error, UnicodeDecodeError):
                # What comes before is sound: its last row ends within the column that is not.
                place = f", {_place(data[: error.start].decode(encoding), delimiter)}"
        raise UserError(
            f"{path}{place}: not {encoding}; save the file as utf-8, or name its encoding, as in "
            "dataset.encoding=gb18030"
        ) from error
    if half := HALF_A_CHARACTER.search(content):
        place = _place(content[: half.start()], delimiter)
        raise UserError(
            f"{path}, {place}: half of a character, which no text holds; save the file as utf-8"
        )
    if "\0" in content:
        place = _place(content[: content.index("\0")], delimiter)
        raise UserError(
            f"{path}, {place}: a NUL byte, which no text holds; save the file as utf-8, or name "
            "its encoding, as in dataset.encoding=utf-16"
        )
    if not content.strip():
        raise UserError(f"{path} is empty; its first line must name its columns")
    return content


def _place(before: str, delimiter: str) -> str:
    """Return the line and the column at which a text that is sound so far goes on."""
    limit = csv.field_size_limit(len(before) + 1)
    try:
        rows = list(csv.reader(io.StringIO(f"{before}?", newline=""), delimiter=delimiter))
    finally:
        csv.field_size_limit(limit)
    index = len(rows[-1]) - 1
    column = rows[0][index] if len(rows) > 1 and index < len(rows[0]) else index + 1
    return f"line {before.count(chr(10)) + 1}, column {column}"
