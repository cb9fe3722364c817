"""Write small corpora as CSV files, and load them."""

import csv
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.data.dataset import Dataset
from ddp_runner.errors import UserError

HEADER = ("label", "review")
LETTERS = "的一是不了在人有我他这中大来上个国到说们"
GOOD, BAD = "好", "坏"
TINY_BERT = (
    "model=bert",
    "model.num_layers=1",
    "model.width=32",
    "model.feedforward=64",
    "dataset.vocab_size=100",
    "dataset.max_length=32",
)  # keys of a command line, for a model that trains in seconds


def write_rows(path: Path, rows: Sequence[Sequence[object]], **options: Any) -> Path:
    """Write a CSV file and return its path; `options` go to ``open``."""
    with path.open("w", **{"newline": "", "encoding": "utf-8", **options}) as file:
        csv.writer(file).writerows(rows)
    return path


def write_reviews(path: Path, *, num_rows: int = 120, wrong: float = 0.0) -> Path:
    """Write Chinese reviews of 4 to 30 characters, of which one decides the class.

    Args:
        path: of the new file.
        num_rows: number of reviews.
        wrong: the fraction of labels that contradict the text.
    """
    rng = random.Random(0)
    rows: list[tuple[object, object]] = [HEADER]
    for number in range(num_rows):
        letters = rng.choices(LETTERS, k=rng.randint(3, 29))
        letters.insert(rng.randrange(len(letters)), GOOD if number % 2 else BAD)
        rows.append(((number + (rng.random() < wrong)) % 2, "".join(letters)))
    return write_rows(path, rows)


def csv_text(path: Path, /, **keys: Any) -> Any:
    """Return the source of conf/dataset/csv_text.yaml for a file, with some other keys."""
    settings = yaml.safe_load((CONFIG_DIR / "dataset" / "csv_text.yaml").read_text())
    return make("dataset", settings | {"path": path.name, "tokenizer": None, **keys})


def load_csv(path: Path, /, **keys: Any) -> Dataset:
    """Return the dataset of a CSV file, without a cache."""
    source = csv_text(path, **keys)
    dataset: Dataset = source.dataset(source.build(path.parent))
    return dataset


def csv_error(path: Path, /, **keys: Any) -> str:
    """Return the error line of an invalid CSV file."""
    with pytest.raises(UserError) as error:
        load_csv(path, **keys)
    assert "\n" not in str(error.value)
    return str(error.value)
