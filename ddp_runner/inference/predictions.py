"""Make the table of predictions from a step's outputs, and write it as CSV or Parquet."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_runner.data.trees import shape_of
from ddp_runner.errors import UserError, listed, os_errors, typed
from ddp_runner.files import in_csv, replacing
from ddp_runner.train.step import StepOutput

# Columns per output. A larger output becomes a list in each row, which only Parquet can hold.
MAX_COLUMNS = 1000
Columns = Mapping[str, NDArray[Any]]  # by name: (num_rows,), or (num_rows, size) for lists


def columns_of(
    step: StepOutput, *, split: str, numbers: Sequence[int], num_classes: int | None
) -> Columns:
    """Return the columns of a batch by name.

    `numbers` are those of the samples in the split, from 0. With `num_classes` each output with
    real scores gets a column with the best class.

    Raises:
        UserError: the outputs are not tensors with a row for each sample, NumPy cannot hold them,
            or two columns have the same name.
    """
    count = len(numbers)
    rows = {"split": np.full(count, split), "index": np.asarray(numbers)}

    def add(name: str, array: NDArray[Any]) -> None:
        """Add a column, or a column for each number in a row, or a column of lists if too many."""
        columns, flat = {name: array}, array.reshape(count, -1)
        if flat.shape[1] > MAX_COLUMNS:
            columns = {name: flat}
        elif array.ndim > 1:
            columns = {f"{name}_{number}": values for number, values in enumerate(flat.T)}
        if repeated := columns.keys() & {*rows, "sample"}:
            raise UserError(
                f"the training step's outputs give a second column {min(repeated)}",
                "rename them: split, index, sample, target and prediction are the table's own",
            )
        rows.update(columns)

    if _has_rows(step.targets, count):
        add("target", _array("target", step.targets))
    named = step.outputs if isinstance(step.outputs, Mapping) else {"output": step.outputs}
    for name, output in named.items():
        if not _has_rows(output, count):
            raise UserError(
                f"task=predict needs outputs with a row for each of the {count} samples, and "
                f"the training step returns {shape_of(output)} as {name}",
                "return StepOutput(outputs=...) with a tensor, or a mapping of tensors",
            )
        label = _printable(str(name))
        array = _array(label, output)
        is_ranked = array.ndim == 2 and array.dtype.kind in "iuf"
        if num_classes and is_ranked and array.shape[1] >= num_classes:
            add("prediction" if name == "output" else f"{label}_prediction", array.argmax(axis=1))
        add(label, array)
    return rows


def joined(
    parts: Sequence[Columns], names: Sequence[str | int] | None = None, *, like: Columns
) -> Columns:
    """Return the rows of several batches as one table, with the columns of the first batch.

    `names` are the names of all samples in the split, for a column ``sample`` after ``index``.

    Raises:
        UserError: a batch's columns differ from `like` in names, sizes or dtypes.
    """
    expected, *formats = (
        {name: (values.shape[1:], values.dtype.kind) for name, values in part.items()}
        for part in (like, *parts)
    )
    for columns in formats:
        if columns != expected:
            raise UserError(
                f"a batch's outputs have {len(columns)} columns, and the first batch's "
                f"{len(expected)}: {listed(sorted({*columns} ^ {*expected})) or 'of other sizes'}",
                "return outputs of one size from the training step, padded if necessary",
            )
    rows = {name: np.concatenate([part[name] for part in parts]) for name in like}
    if names is None:
        return rows
    split, index = rows.pop("split"), rows.pop("index")
    own_names = (names[number] for number in index)
    sample = [_printable(name) if isinstance(name, str) else name for name in own_names]
    return {"split": split, "index": index, "sample": np.asarray(sample), **rows}


def write_table(path: Path, tables: Iterable[Columns]) -> None:
    """Write tables with the same columns into a .csv or a .parquet file, whole or not at all.

    Raises:
        UserError: the file cannot be written, or cannot hold an output.
    """
    write = _write_csv if path.suffix == ".csv" else _write_parquet
    with os_errors(f"{path} cannot be written"), replacing(path) as temp:
        write(temp, tables)


def _write_csv(path: Path, tables: Iterable[Columns]) -> None:
    """Write a header and lines; a float has the fewest digits that restore its bits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        for number, rows in enumerate(tables):
            for name, values in rows.items():
                if values.ndim > 1:
                    raise UserError(
                        f"{name} has {values.shape[1]} numbers per sample, and a CSV has at most "
                        f"{MAX_COLUMNS} columns per output",
                        "write inference.format=parquet",
                    )
            if number == 0:
                lines.writerow(rows)
            texts = {name: values.astype(str).tolist() for name, values in rows.items()}
            if "sample" in texts:  # names of somebody else's files are untrusted
                texts["sample"] = [*map(in_csv, texts["sample"])]
            lines.writerows(zip(*texts.values(), strict=True))


def _write_parquet(path: Path, tables: Iterable[Columns]) -> None:
    """Write a row group for each table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(name: str, values: NDArray[Any]) -> Any:
        if values.dtype.kind == "c":
            raise UserError(
                f"{name} is of {values.dtype}, which Parquet does not have",
                "return real numbers from the training step, as torch.view_as_real does",
            )
        flat = pa.array(values.ravel())
        is_list = values.ndim > 1
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if is_list else flat

    with ExitStack() as stack:
        file: Any = None
        for rows in tables:
            table = pa.table({name: column(name, values) for name, values in rows.items()})
            if file is None:
                file = stack.enter_context(pq.ParquetWriter(path, table.schema))
            file.write_table(table)


def _printable(name: str) -> str:
    """Return a name with escapes for bytes that are not text, as in file names."""
    return name.encode(errors="backslashreplace").decode()


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.shape[:1] == (count,)


def _array(name: str, values: Tensor) -> NDArray[Any]:
    """Return a tensor's values; shorter floating types become float32.

    Raises:
        UserError: NumPy lacks the type or the layout.
    """
    try:
        if values.is_floating_point() and values.dtype != torch.float64:
            values = values.float()
        array: NDArray[Any] = values.numpy(force=True)
    except (RuntimeError, TypeError) as error:
        kind = f"{values.layout}".removeprefix("torch.")
        raise UserError(
            f"task=predict cannot write {name}, a {kind} tensor of {shape_of(values)}",
            f"return a dense tensor of real numbers from the training step ({typed(error)})",
        ) from error
    return array
