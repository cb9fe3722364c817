"""What the templates show: tables of cells, and values of unknown origin as short texts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ddp_runner.compare.render.columns import cut, digits
from ddp_runner.compare.run import is_finite
from ddp_runner.errors import in_yaml

NOTHING = "-"  # the text of a cell without a value
MAX_TEXT = 2000  # characters of a value
MAX_CHOICES = 12  # of a column; more would make its menu longer than the table


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    spread: str = ""  # the standard deviation, and of how many runs
    order: float | str | None = None  # by which its column is sorted; None: after all others
    is_best: bool = False
    link: str = ""  # the id of a place in the page


@dataclass(frozen=True)
class Head:
    """The head of a column."""

    title: str
    is_number: bool = False
    is_brief: bool = True  # shown at once; the others on demand
    hint: str = ""
    choices: tuple[str, ...] = ()  # of which a reader may select one


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its header."""

    name: str  # its caption
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    num_choices: int = 0  # rows that a reader may filter; 0: too few


def value_cell(value: Any, *, number: Callable[[float], str] | None = None) -> Cell:
    """Return the cell of any value; `number` formats it if it is one."""
    if value is None:
        return Cell(NOTHING)
    if is_finite(value) and not isinstance(value, bool):
        return Cell(number(value) if number else text_of(value), order=float(value))
    text = text_of(value)
    return Cell(text, order=text.lower())


def value_table(name: str, columns: Mapping[str, Sequence[Any]]) -> Table:
    """Return a table of columns with their titles; the cells may be ``Cell`` already."""
    cells = [
        [value if isinstance(value, Cell) else value_cell(value) for value in values]
        for values in columns.values()
    ]
    heads = [
        Head(title, is_number=any(isinstance(cell.order, float) for cell in column))
        for title, column in zip(columns, cells, strict=True)
    ]
    return Table(name, tuple(heads), tuple(zip(*cells, strict=True)))


def without_same(table: Table, *, keep: int = 1) -> tuple[Table, list[tuple[str, str]]]:
    """Return a table without the columns in which all rows agree, and what they agree on.

    The first `keep` columns stay. A table of one row has nothing to tell apart and stays whole.
    """
    if len(table.rows) < 2:
        return table, []
    columns = [*zip(table.heads, zip(*table.rows, strict=True), strict=True)]
    texts = [{cell.text for cell in cells} for _, cells in columns]
    stays = [index < keep or len(one) > 1 for index, one in enumerate(texts)]
    same = [
        (head.title, cells[0].text)
        for (head, cells), stay in zip(columns, stays, strict=True)
        if not stay and cells[0].text != NOTHING
    ]
    rows = [tuple(cell for cell, s in zip(row, stays, strict=True) if s) for row in table.rows]
    heads = tuple(head for (head, _), stay in zip(columns, stays, strict=True) if stay)
    return replace(table, heads=heads, rows=tuple(rows)), same


def transposed(table: Table) -> Table:
    """Return a table whose columns are the rows of another one, all as text."""
    heads = [table.heads[0], *(Head(row[0].text) for row in table.rows)]
    columns = zip(*table.rows, strict=True)
    next(columns)
    rows = [
        (Cell(head.title, order=head.title), *cells)
        for head, cells in zip(table.heads[1:], columns, strict=True)
    ]
    return Table(table.name, (replace(heads[0], title="key"), *heads[1:]), tuple(rows))


def text_of(value: Any) -> str:
    """Return any value of a file as a short text."""
    if isinstance(value, bool) or value is None:
        text = {True: "yes", False: "no", None: NOTHING}[value]
    elif isinstance(value, int):
        text = f"{value:,}" if abs(value) < 10**15 else str(value)[:MAX_TEXT]
    elif isinstance(value, float):
        text = digits(value) if is_finite(value) else str(value)
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key} {text_of(item)}" for key, item in value.items())
    elif isinstance(value, list | tuple):
        text = ", ".join(map(text_of, value))
    else:
        text = str(value)
    return cut(text, MAX_TEXT)


def setting_text(value: Any) -> str:
    """Return a value of a config as its YAML would show it, so that it can be typed again."""
    text = repr(value) if isinstance(value, list | dict) else in_yaml(value)
    return cut(text, MAX_TEXT)


def date_text(seconds: Any) -> str:
    """Return a time since the epoch as a date in UTC, which means the same to every reader."""
    if not is_finite(seconds) or not 0 <= seconds < 253_402_300_800:  # the year 10000
        return text_of(seconds)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration_text(seconds: float) -> str:
    """Return a duration as a reader would say it: 12.3 s, 4 min 10 s, 2 h 5 min."""
    if seconds < 120:
        return f"{digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings with their dotted names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(f"{name}.{key}" if name else str(key), item)
    else:
        yield name, value


def records_table(name: str, records: Iterable[Any]) -> Table | None:
    """Return the table of mappings that have about the same fields; None if there is nothing."""
    lines = [dict(flat("", record)) for record in records if isinstance(record, Mapping)]
    titles = dict.fromkeys(title for line in lines for title in line)
    if not titles:
        return None
    columns = {title: [line.get(title) for line in lines] for title in titles}
    return value_table(name, columns)
