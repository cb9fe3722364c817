"""A table of values, and the text of its cells."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from ddp_runner.compare.recorded_run import Stat, is_finite
from ddp_runner.errors import duration, in_yaml

NOTHING = "-"  # the text of a cell without a value
MAX_TEXT = 2000  # characters; a value in a run folder may have megabytes


def cut(text: str, size: int = MAX_TEXT) -> str:
    """Return the beginning of a text."""
    return text if len(text) <= size else f"{text[:size]}…"


def digits(value: float) -> str:
    """Return a number with four significant digits."""
    size = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.3e}" if size < -5 else f"{value:,.{max(0, min(6, 3 - size))}f}"


percent, times = "{:.0%}".format, "{:.2f}x".format


def time_text(seconds: float) -> str:
    """Return a duration as text: 12.30 s, 4 min 10 s, 2 h 5 min."""
    return duration(seconds) if seconds >= 60 else f"{digits(seconds)} s"


def date_text(seconds: Any) -> str:
    """Return a time since the epoch as a date in UTC."""
    if not is_finite(seconds) or not 0 <= seconds < 253_402_300_800:  # the year 10000
        return text_of(seconds)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def text_of(value: Any) -> str:
    """Return any value of a file as a short text."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: NOTHING}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**15 else str(value)[:MAX_TEXT]
    if isinstance(value, float):
        return digits(value) if is_finite(value) else str(value)
    if isinstance(value, Mapping):
        return cut(", ".join(f"{key} {text_of(item)}" for key, item in value.items()))
    is_list = isinstance(value, list | tuple)
    return cut(", ".join(map(text_of, value)) if is_list else str(value))


def setting_text(value: Any) -> str:
    """Return a value of a config as in YAML, to be typed again."""
    return cut(repr(value) if isinstance(value, list | dict) else in_yaml(value))


def _is_number(value: Any) -> bool:
    return is_finite(value) and not isinstance(value, bool)


@dataclass(frozen=True)
class Column:
    """A column of a table. A value is a Stat, a number or any value of a file; None: nothing."""

    key: str  # name in CSV, with the unit
    title: str
    values: Sequence[Any]
    show: Callable[[Any], str] = text_of  # formats numbers; in a setting's column, all values
    hint: str = ""  # explanation for the reader
    is_brief: bool = True  # in all formats; else only in CSV, and in the report on demand
    is_key: bool = False  # a key of the setting
    best: frozenset[int] = frozenset()  # the rows with the best value

    def order(self, row: int) -> float | str | None:
        """Return the sort key of a row; None comes last."""
        value = self.values[row]
        value = value.mean if isinstance(value, Stat) else value
        if value is None or _is_number(value):
            return value if value is None else float(value)
        return self.text(value).lower()

    def text(self, value: Any) -> str:
        """Return a value as text."""
        if value is None:
            return NOTHING
        return self.show(value) if self.is_key or _is_number(value) else text_of(value)

    @cached_property
    def is_number(self) -> bool:
        """Whether a value is a number."""
        return any(isinstance(self.order(row), float) for row in range(len(self.values)))


@dataclass(frozen=True)
class Table:
    """Columns of values, and a label for each row."""

    name: str  # headline or caption
    columns: tuple[Column, ...]
    labels: tuple[str, ...]  # a label per row
    head: str = "#"  # title of the labels
    links: tuple[str, ...] = ()  # id in the report that each label links to
    num_runs: tuple[int, ...] = ()  # number of runs per row

    def parts(self, column: Column, row: int) -> tuple[str, str]:
        """Return a cell's value, and its standard deviation and number of runs."""
        value = column.values[row]
        if not isinstance(value, Stat):
            return column.text(value), ""
        text, spread = column.show(value.mean), []
        if value.sd is not None and column.show is digits and "e" not in text:
            decimals = len(text.partition(".")[2])  # the same as the mean
            spread.append(f"± {value.sd:,.{decimals}f}")
        elif value.sd is not None:
            spread.append(f"± {column.show(value.sd)}")
        if self.num_runs and value.count < self.num_runs[row]:
            spread.append(f"({value.count} of {self.num_runs[row]})")
        return text, " ".join(spread)

    def text(self, column: Column, row: int) -> str:
        """Return the text of a cell."""
        return " ".join(filter(None, self.parts(column, row)))


def values_table(
    name: str,
    columns: Mapping[str, Sequence[Any]],
    *,
    show: Mapping[str, Callable[[Any], str]] | None = None,
    links: Sequence[str] = (),
) -> Table:
    """Return a table of columns by title; the first column labels the rows.

    `show` has the formatter for a column's numbers, by title.
    """
    (head, labels), *rest = columns.items()
    made = [Column(key, key, values, (show or {}).get(key, text_of)) for key, values in rest]
    return Table(name, tuple(made), tuple(map(text_of, labels)), head=head, links=tuple(links))
