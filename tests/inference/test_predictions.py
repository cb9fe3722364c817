"""The table of predictions: names and values of its columns, and its files."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_runner.errors import UserError
from ddp_runner.inference.predictions import columns_of, joined, write_table
from ddp_runner.train.step import StepOutput


def columns(outputs: Any, targets: Any = None, *, num_classes: int | None = None) -> dict[str, Any]:
    """Return the columns of two samples, as lists."""
    step = StepOutput(torch.zeros(()), 2, outputs=outputs, targets=targets)
    found = columns_of(step, split="eval", numbers=range(4, 6), num_classes=num_classes)
    return {name: values.tolist() for name, values in found.items()}


def test_classes_have_scores_and_the_class_with_the_highest() -> None:
    """The prediction is a column of its own, beside the target."""
    scores = torch.tensor([[0.5, 2.0, 1.0], [3.0, 0.0, 1.0]])
    assert columns(scores, torch.tensor([1, 2]), num_classes=3) == {
        "split": ["eval", "eval"],
        "index": [4, 5],
        "target": [1, 2],
        "prediction": [1, 0],
        "output_0": [0.5, 3.0],
        "output_1": [2.0, 0.0],
        "output_2": [1.0, 1.0],
    }


def test_a_number_a_sample_is_one_column() -> None:
    """A regression of one value needs no number in its column's name."""
    found = columns(torch.tensor([0.5, 1.5]), torch.tensor([1.0, 2.0]))
    assert (found["output"], found["target"]) == ([0.5, 1.5], [1.0, 2.0])
    assert "prediction" not in found


def test_named_outputs_keep_their_names() -> None:
    """Of a mapping, each output has its own columns."""
    found = columns({"mean": torch.zeros(2), "spread": torch.ones(2, 2)})
    assert list(found) == ["split", "index", "mean", "spread_0", "spread_1"]


def test_half_precision_becomes_float32() -> None:
    """NumPy has no bfloat16."""
    assert columns(torch.tensor([1.5, 2.5], dtype=torch.bfloat16))["output"] == [1.5, 2.5]


def test_only_outputs_with_scores_have_a_prediction() -> None:
    """A mask has no highest class; whole numbers have."""
    scores = torch.tensor([[0.5, 2.0], [3.0, 0.0]])
    outputs = {"logits": scores, "mask": scores > 1, "counts": scores.int()}
    found = columns(outputs, num_classes=2)
    assert [name for name in found if name.endswith("prediction")] == [
        "logits_prediction",
        "counts_prediction",
    ]
    assert (found["logits_prediction"], found["mask_1"]) == ([1, 0], [True, False])


def test_the_shortest_floating_types_become_float32() -> None:
    """NumPy has none of them."""
    values = torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn)
    assert columns(values)["output"] == [1.5, 2.0]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (torch.ones(2, 3).to_sparse(), r"a sparse_coo tensor of \(2, 3\) of float32"),
        (
            torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
            r"a strided tensor of \(2,\) of bits8",
        ),
        (torch.zeros(2, device="meta"), r"a strided tensor of \(2,\) of float32"),
    ],
)
def test_outputs_that_numpy_cannot_hold_are_named(values: torch.Tensor, kind: str) -> None:
    """With their dtype, whether they are outputs or targets."""
    for found, name in (({"odd": values}, "odd"), (torch.zeros(2), "target")):
        targets = values if name == "target" else None
        with pytest.raises(UserError, match=f"cannot write {name}, {kind}"):
            columns(found, targets)


def test_nested_outputs_have_no_rows() -> None:
    """They have no shape, either."""
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(UserError, match="returns a NestedTensor as output"):
        columns(nested)


def test_parquet_names_a_type_that_it_does_not_have(tmp_path: Path) -> None:
    """A CSV holds complex numbers as text."""
    rows = {"wave": np.ones(2, dtype=np.complex64)}
    write_table(tmp_path / "predictions.csv", [rows])
    with pytest.raises(UserError, match="wave is of complex64, which Parquet does not have"):
        write_table(tmp_path / "predictions.parquet", [rows])


def test_an_output_whose_name_is_no_text_has_escapes() -> None:
    """A file in UTF-8 could not hold it."""
    assert "\\udcff" in columns({"\udcff": torch.zeros(2)})


@pytest.mark.parametrize("outputs", [None, torch.zeros(()), torch.zeros(3), (torch.zeros(2),)])
def test_outputs_without_a_row_for_each_sample_are_named(outputs: Any) -> None:
    """A step that returns none, or a sum, has nothing to predict."""
    with pytest.raises(UserError, match="a row for each of the 2 samples"):
        columns(outputs)


def test_a_csv_gives_every_bit_back(tmp_path: Path) -> None:
    """The shortest digits of a float32 are enough."""
    values = torch.rand(100, generator=torch.Generator().manual_seed(0)).numpy() ** 9
    parts = (slice(0, 50), slice(50, 100))
    tables = ({"index": np.arange(100)[part], "output": values[part]} for part in parts)
    write_table(tmp_path / "predictions.csv", tables)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert np.array([row["output"] for row in rows], dtype=np.float32).tobytes() == values.tobytes()
    assert [int(row["index"]) for row in rows] == list(range(100))


def test_a_file_name_in_a_csv_is_no_formula(tmp_path: Path) -> None:
    """Pictures may be somebody else's; numbers stay numbers."""
    rows = {"sample": np.array(["=1+1.png", "a/b.png"]), "output": np.array([-1.5, 2])}
    write_table(tmp_path / "predictions.csv", [rows])
    lines = (tmp_path / "predictions.csv").read_text().splitlines()
    assert lines == ["sample,output", "'=1+1.png,-1.5", "a/b.png,2.0"]


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path: Path) -> None:
    """Whoever fails half-way leaves no half."""

    def tables() -> Iterator[dict[str, Any]]:
        yield {"index": np.arange(3)}
        raise RuntimeError("stopped")

    for name in ("predictions.csv", "predictions.parquet"):
        with pytest.raises(RuntimeError, match="stopped"):
            write_table(tmp_path / name, tables())
    assert list(tmp_path.iterdir()) == []


def test_batches_are_joined_in_their_order_and_samples_are_named() -> None:
    """The names of the split are looked up by the samples' numbers."""
    parts = [
        {"split": np.full(2, "eval"), "index": np.array(index), "output": np.array(output)}
        for index, output in (([0, 1], [0.5, 1.5]), ([2, 3], [2.5, 3.5]))
    ]
    found = joined(parts, names=["a", "b", "c", "d"], like=parts[0])
    assert list(found) == ["split", "index", "sample", "output"]
    assert found["sample"].tolist() == ["a", "b", "c", "d"]
    assert found["output"].tolist() == [0.5, 1.5, 2.5, 3.5]


@pytest.mark.parametrize(
    "outputs",
    [
        {"index": torch.zeros(2)},
        {"target": torch.zeros(2)},
        {"sample": torch.zeros(2)},
        {"a": torch.zeros(2, 2), "a_0": torch.zeros(2)},
    ],
)
def test_no_output_takes_the_place_of_another_column(outputs: Any) -> None:
    """The table would show something else under its own name."""
    with pytest.raises(UserError, match="give a second column"):
        columns(outputs, torch.zeros(2))


@pytest.mark.parametrize("other", [{"output": np.zeros((2, 3))}, {"output_0": np.zeros(2)}, {}])
def test_batches_of_other_columns_are_rejected(other: dict[str, Any]) -> None:
    """An output that grows with its batch would lose columns, or shift them."""
    with pytest.raises(UserError, match="return outputs of one size"):
        joined([other], like={"output": np.zeros((2, 2))})


def test_a_name_that_is_no_text_has_escapes() -> None:
    """As a file's whose name is not UTF-8."""
    rows = {"split": np.full(1, "eval"), "index": np.array([0]), "output": np.array([0.5])}
    assert joined([rows], names=["a\udcff.png"], like=rows)["sample"].tolist() == ["a\\udcff.png"]
