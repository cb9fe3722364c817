"""What is read from a CSV file, and how its faults are reported."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from texts import HEADER, csv_error, load_csv, write_reviews, write_rows

from ddp_runner.errors import UserError

FAULTS: dict[str, tuple[list[tuple[object, ...]], dict[str, Any], str]] = {
    "no text": ([("label", "text"), (1, "a")], {}, "has the columns label, text and not review"),
    "no label": ([("y", "review"), (1, "a")], {}, "has the columns y, review and not label"),
    "word": ([HEADER, (1, "a"), ("good", "b")], {}, "line 3, column label: good is not a class"),
    "class": ([HEADER, (1, "a\nb"), (0, "b"), (2, "c")], {}, "line 5, column label: 2 is not a"),
    "half": ([HEADER, (0.5, "b")], {}, "line 2, column label: 0.5 is not a class from 0 to 1"),
    "header only": ([HEADER], {}, "has no row with both review and label"),
    "one row": ([HEADER, (1, "a")], {}, "leaves a split empty"),
    "unquoted": ([HEADER, (1, "a", "b")], {}, "line 2 has 3 columns, the first line 2"),
    "encoding": ([HEADER, (1, "a"), (1, "é")], {"encoding": "latin-1"}, "line 3: not utf-8"),
    "header's": ([("label", "réview")], {"encoding": "latin-1"}, "line 1: not utf-8"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_csv_is_rejected_by_line_and_column(name: str, tmp_path: Path) -> None:
    """The line has the file, the position and the fault."""
    rows, options, sentence = FAULTS[name]
    path = write_rows(tmp_path / "x.csv", rows, **options)
    answer = csv_error(path)
    assert sentence in answer
    assert str(path) in answer


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'label,review\n1,"a\n0,b\n', "line 2: unexpected end of data"),
        (b"label,review\n1,a\xed\xa0\x80\n", "line 2: not utf-8"),
        (b"\xff\xfel\x00a\x00", "line 1: not utf-8"),
        (b"label,review\n1,a\n0,b\0c\n", "line 3: not utf-8"),
        ("label,review\n1,a\n".encode("utf-16-le"), "line 1: not utf-8"),
        (b'label,review\n1,"' + b"a" * 200_000, "line 2: unexpected end of data; close its quotes"),
    ],
)
def test_a_csv_of_other_bytes_is_rejected(content: bytes, sentence: str, tmp_path: Path) -> None:
    """An empty file, unclosed quotes, UTF-16, a NUL byte."""
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    assert sentence in csv_error(path)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"path": "nowhere.csv"}, "cannot be read (No such file"),
        ({"encoding": "utf-99"}, "dataset.encoding (utf-99) is not a text encoding"),
        ({"encoding": "base64"}, "dataset.encoding (base64) is not a text encoding"),
        ({"delimiter": "::"}, "dataset.delimiter ('::') must be one character"),
        ({"delimiter": '"'}, "must be one character; use a comma"),
        ({"vocabulary": "words"}, "must be one of wordpiece, characters"),
        ({"vocab_size": 4}, "dataset.vocab_size (4) must be at least 5"),
        ({"tokenizer": "nowhere"}, "dataset.tokenizer (nowhere): there is neither"),
    ],
)
def test_keys_that_do_not_fit_are_rejected(
    keys: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """The line has the key, its value and a valid one."""
    assert sentence in csv_error(write_reviews(tmp_path / "x.csv"), **keys)


def test_rows_that_lack_something_are_left_out_and_counted(tmp_path: Path) -> None:
    """Empty lines, texts and labels; 1.0 is a class; a note has the number of rows."""
    rows = [HEADER, (1, "a b"), (), ("", "c"), (0, " "), (0,), ("1.0", "d"), (0, "e,\nf")]
    dataset = load_csv(write_rows(tmp_path / "x.csv", rows), eval_fraction=0.5)
    assert len(dataset.train) + len(dataset.eval) == 3
    assert dataset.notes == ("x.csv: 4 rows without review or label are left out",)
    targets = torch.cat([dataset.train.targets, dataset.eval.targets])
    assert sorted(targets.tolist()) == [0, 1, 1]


def test_a_text_may_be_long(tmp_path: Path) -> None:
    """It exceeds the csv module's limit, which is restored afterwards."""
    limit = csv.field_size_limit()
    rows = [HEADER, (1, "a" * 200_000), (0, "b c")]
    dataset = load_csv(write_rows(tmp_path / "x.csv", rows), eval_fraction=0.5)
    assert len(dataset.train) + len(dataset.eval) == 2
    assert csv.field_size_limit() == limit


def test_a_file_that_is_rejected_leaves_the_limit_as_well(tmp_path: Path) -> None:
    """The limit is restored while the error is still referenced."""
    limit = csv.field_size_limit()
    held = []
    for content in ("review,label\na,9\nb,1\n", "review,label\na,1,2\nb,1\nc,0\n"):
        (tmp_path / "x.csv").write_text(content, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            load_csv(tmp_path / "x.csv")
        held.append(caught)
        assert csv.field_size_limit() == limit
    held.clear()
    assert csv.field_size_limit() == limit


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    """A byte-order mark, another delimiter and another encoding change nothing."""
    plain = load_csv(write_reviews(tmp_path / "x.csv"))
    text = (tmp_path / "x.csv").read_text(encoding="utf-8")
    (tmp_path / "x.csv").write_text(text, encoding="utf-8-sig")
    marked = load_csv(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text(text.replace(",", ";"), encoding="gb18030")
    foreign = load_csv(tmp_path / "x.csv", delimiter=";", encoding="gb18030")
    for other in (marked, foreign):
        assert torch.equal(other.train.inputs, plain.train.inputs)
        assert torch.equal(other.eval.targets, plain.eval.targets)


@pytest.mark.parametrize(
    ("encoding", "content", "sentence"),
    [
        ("punycode", b"V\x9b", "not punycode; save the file as utf-8"),
        ("idna", b"\xff", "not idna; save the file as utf-8"),
    ],
)
def test_an_encoding_of_another_purpose_is_rejected(
    encoding: str, content: bytes, sentence: str, tmp_path: Path
) -> None:
    """Its result is not text, or it gives no position of an error."""
    (tmp_path / "x.csv").write_bytes(content)
    assert sentence in csv_error(tmp_path / "x.csv", encoding=encoding)
