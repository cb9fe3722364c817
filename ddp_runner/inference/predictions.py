"""The table of predictions: its columns from a step's outputs, and its file, CSV or Parquet."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_runner.data.trees import shape_of
from ddp_runner.errors import UserError, listed, os_errors, typed
from ddp_runner.files import in_csv
from ddp_runner.train.step import Step

MOST_COLUMNS = 1000  # of one output; beyond it a row has a list, which only Parquet can hold
NameT = TypeVar("NameT", bound=str | int)
Columns = Mapping[str, NDArray[Any]]  # by name: (num_rows,), or (num_rows, size) for lists


def columns_of(
    step: Step, *, split: str, numbers: Sequence[int], num_classes: int | None
) -> dict[str, NDArray[Any]]:
    """Return the rows of a batch by the names of their columns.

    Args:
        step: what the training step returned for the batch.
        split: train or eval.
        numbers: of the samples in the split, from 0.
        num_classes: of the dataset; the prediction is then the class with the highest score, of
            each output that has scores: real numbers.

    Raises:
        UserError: the outputs are not tensors with a row for each sample, or NumPy has no such
            arrays.
    """
    count = len(numbers)
    parts = [{"split": np.full(count, split), "index": np.asarray(numbers)}]
    if _has_rows(step.targets, count):
        parts.append(_flat("target", _array("target", step.targets)))
    named = step.outputs if isinstance(step.outputs, Mapping) else {"output": step.outputs}
    for name, output in named.items():
        if not _has_rows(output, count):
            raise UserError(
                f"task=predict needs outputs with a row for each of the {count} samples, and the "
                f"training step returns {shape_of(output)} as {name}; return Step(outputs=...) "
                "with a tensor, or a mapping of tensors"
            )
        label = _printable(str(name))
        array = _array(label, output)
        is_ranked = array.ndim == 2 and array.dtype.kind in "iuf"
        if num_classes and is_ranked and array.shape[1] >= num_classes:
            prediction = "prediction" if name == "output" else f"{label}_prediction"
            parts.append({prediction: array.argmax(axis=1)})
        parts.append(_flat(label, array))
    names = [name for part in parts for name in part] + ["sample"]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"the training step's outputs give a second column {twice[0]}; rename them: split, "
            "index, sample, target and prediction are the table's own"
        )
    return {name: values for part in parts for name, values in part.items()}


def joined(
    parts: Sequence[Columns], names: Sequence[str | int] | None = None, *, like: Columns
) -> dict[str, NDArray[Any]]:
    """Return the rows of several batches as one table, with the columns of the first batch.

    With the `names` of all samples of the split it has a column ``sample``, after ``index``.

    Raises:
        UserError: the columns of a batch have other names, sizes or dtypes than those of `like`.
    """
    first, *others = (
        {name: (values.shape[1:], values.dtype.kind) for name, values in one.items()}
        for one in (like, *parts)
    )
    for wrong in (one for one in others if one != first):
        raise UserError(
            f"the outputs of a batch have {len(wrong)} columns, and those before it {len(first)}: "
            f"{listed(sorted(set(wrong) ^ set(first))) or 'of other sizes'}; return outputs of one "
            "size from the training step, padded if need be"
        )
    rows = {name: np.concatenate([part[name] for part in parts]) for name in like}
    if names is None:
        return rows
    split, index = rows.pop("split"), rows.pop("index")
    sample = np.asarray([_printable(names[number]) for number in index])
    return {"split": split, "index": index, "sample": sample, **rows}


def _printable(name: NameT) -> str | NameT:
    """Return a name with escapes for what is no text, such as bytes of a file name."""
    return name.encode(errors="backslashreplace").decode() if isinstance(name, str) else name


class CsvWriter:
    """Writes rows as lines of a CSV file with a header; floats have all their digits."""

    def __init__(self, path: Path, temp: Path) -> None:
        self._path, self._temp = path, temp
        self._file = temp.open("w", newline="", encoding="utf-8")
        self._lines = csv.writer(self._file, lineterminator="\n")
        self._names: tuple[str, ...] = ()

    def write(self, rows: Columns) -> None:
        """Append rows.

        Raises:
            UserError: an output has too many numbers for columns.
        """
        wide = [name for name, values in rows.items() if values.ndim > 1]
        if wide:
            raise UserError(
                f"{wide[0]} has {rows[wide[0]].shape[1]} numbers a sample and a CSV has at most "
                f"{MOST_COLUMNS} columns of one output; write inference.format=parquet"
            )
        if not self._names:
            self._names = tuple(rows)
            self._lines.writerow(self._names)
        # As text, a float has the fewest digits that give its own bits back.
        texts = [rows[name].astype(str).tolist() for name in self._names]
        if "sample" in rows:
            place = self._names.index("sample")
            texts[place] = [*map(in_csv, texts[place])]  # a file of somebody else's has any name
        self._lines.writerows(zip(*texts, strict=True))

    def close(self) -> None:
        """Finish the file and give it its name."""
        self._file.close()
        self._temp.replace(self._path)


class ParquetWriter:
    """Writes rows to a Parquet file, a row group for each piece."""

    def __init__(self, path: Path, temp: Path) -> None:
        self._path, self._temp = path, temp
        self._file: Any = None

    def write(self, rows: Columns) -> None:
        """Append rows.

        Raises:
            UserError: Parquet has no type for a column.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {}
        for name, values in rows.items():
            try:
                columns[name] = (
                    pa.FixedSizeListArray.from_arrays(values.ravel(), values.shape[1])
                    if values.ndim > 1
                    else pa.array(values)
                )
            except pa.ArrowException as error:
                raise UserError(
                    f"{name} is of {values.dtype}, which Parquet does not have; return real "
                    "numbers from the training step, as torch.view_as_real does"
                ) from error
        table = pa.table(columns)
        if self._file is None:
            self._file = pq.ParquetWriter(self._temp, table.schema)
        self._file.write_table(table)

    def close(self) -> None:
        """Finish the file and give it its name."""
        self._file.close()
        self._temp.replace(self._path)


Writer = CsvWriter | ParquetWriter  # the file appears whole, or not at all


@contextmanager
def open_writer(path: Path) -> Iterator[Writer]:
    """Return what writes the file, by its ending: .csv or .parquet. Nothing is left if it fails.

    Raises:
        UserError: the file cannot be written.
    """
    temp = path.with_name(f".{path.name}.tmp")
    try:
        with os_errors(f"{path} cannot be written"):
            yield CsvWriter(path, temp) if path.suffix == ".csv" else ParquetWriter(path, temp)
    finally:
        with suppress(OSError):  # what matters is the error before it
            temp.unlink(missing_ok=True)


def _has_rows(value: Any, count: int) -> bool:
    if not isinstance(value, Tensor) or value.is_nested:
        return False
    return value.ndim > 0 and len(value) == count


def _array(name: str, values: Tensor) -> NDArray[Any]:
    """Return a tensor's values; those of the short floating types become float32.

    Raises:
        UserError: NumPy has no such arrays.
    """
    try:
        if values.is_floating_point() and values.dtype != torch.float64:
            values = values.float()
        array: NDArray[Any] = values.numpy(force=True)
    except (RuntimeError, TypeError) as error:
        kind = f"{values.layout}".removeprefix("torch.")
        raise UserError(
            f"task=predict cannot write {name}, a {kind} tensor of {shape_of(values)}; return a "
            f"dense tensor of real numbers from the training step ({typed(error)})"
        ) from error
    return array


def _flat(name: str, array: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return one column, a column for each number of a row, or lists if these are too many."""
    if array.ndim == 1:
        return {name: array}
    array = array.reshape(len(array), -1)
    if array.shape[1] > MOST_COLUMNS:
        return {name: array}
    return {f"{name}_{number}": array[:, number] for number in range(array.shape[1])}
