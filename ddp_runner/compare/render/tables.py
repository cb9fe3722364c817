"""A comparison as text, Markdown, CSV and JSON."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from ddp_runner.compare.analysis import Comparison, Remark
from ddp_runner.compare.parity import Parity
from ddp_runner.compare.render.columns import NOTHING, Column, columns, digits
from ddp_runner.compare.run import Run
from ddp_runner.compare.settings import ALWAYS, label, ranks, word
from ddp_runner.compare.stats import Stat
from ddp_runner.errors import printable
from ddp_runner.files import json_safe

WIDTH = 120  # characters, where there is no terminal
MOST_REMARKS, MOST_FOLDERS = 20, 3  # of a list that people read
UNEQUAL = "dropout, and BatchNorm that is not synchronised, differ by rank and explain a break"
UNSTABLE = "so does a training about to diverge, where rounding leaps: try a smaller optimizer.lr"
LATE = "a first line long after step 1 cannot tell how it began: try train.log_every_steps=1"


def as_text(comparison: Comparison) -> str:
    """Return aligned columns, and below them what is to be known about them.

    Columns that go beyond the terminal follow below, beside the settings once more.
    """
    shown = [column for column in columns(comparison) if column.is_brief]
    lines = _blocks(comparison, shown, width=get_terminal_size(fallback=(WIDTH, 0)).columns)
    for title, sentences in _sections(comparison, shown):
        lines += ["", f"{title}:", *(f"  {sentence}" for sentence in sentences)]
    return "\n".join(map(printable, [_headline(comparison), *lines]))


def _blocks(comparison: Comparison, shown: Sequence[Column], *, width: int) -> list[str]:
    """Return the lines of the table, cut between columns into as many blocks as it takes."""
    cells = [[column.title for column in shown], *_texts(comparison, shown)]
    is_word = [any(isinstance(cell, str) for cell in column.cells) for column in shown]
    padded = [
        [text.ljust(size) if left else text.rjust(size) for text in texts]
        for texts, left in zip(zip(*cells, strict=True), is_word, strict=True)
        for size in [max(map(len, texts))]
    ]
    num_keys = len(comparison.keys)
    keys, blocks = padded[:num_keys], [list[list[str]]()]
    for column in padded[num_keys:]:
        taken = sum(2 + len(one[0]) for one in (*keys, *blocks[-1]))
        if blocks[-1] and taken + len(column[0]) > width:
            blocks.append([])
        blocks[-1].append(column)
    lines = []
    for block in blocks if comparison.rows else ():
        rows = zip(*keys, *block, strict=True)
        lines += ["", *("  ".join(row).rstrip() for row in rows)]
    return lines


def as_markdown(comparison: Comparison) -> str:
    """Return the same as a Markdown table and lists."""
    shown = [column for column in columns(comparison) if column.is_brief]
    rows = [[column.title for column in shown], ["---"] * len(shown), *_texts(comparison, shown)]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    for title, sentences in _sections(comparison, shown):
        lines += ["", f"**{title}**", "", *(f"- {sentence}" for sentence in sentences)]
    shown_lines = lines if comparison.rows else lines[3:]
    return "\n".join(map(printable, [_headline(comparison), "", *shown_lines]))


def as_csv(comparison: Comparison) -> str:
    """Return every column of every row; a figure's standard deviation in a column beside it."""
    header: list[str] = []
    values: list[list[Any]] = [[] for _ in comparison.rows]
    for column in columns(comparison):
        has_stats = any(isinstance(cell, Stat) for cell in column.cells)
        header += [column.key, f"{column.key}_sd"] if has_stats else [column.key]
        for line, cell in zip(values, column.cells, strict=True):
            figures = [cell.mean, cell.sd] if isinstance(cell, Stat) else [None, None]
            line.extend(figures if has_stats else [cell])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *values])
    return text.getvalue().rstrip("\n")


def as_json(comparison: Comparison) -> str:
    """Return the whole Comparison; a run is its folder, what is not finite is null."""
    return json.dumps(json_safe(_plain(comparison)), indent=2, allow_nan=False)


FORMATS = {"table": as_text, "markdown": as_markdown, "csv": as_csv, "json": as_json}
SUFFIXES = {"table": "txt", "markdown": "md", "csv": "csv", "json": "json"}


def remarks(comparison: Comparison) -> Iterator[tuple[str, list[str]]]:
    """Yield the titles and lines of what is wrong with runs, where anything is."""
    if cautions := [*comparison.mixed, *comparison.doubts]:
        yield "take care", cautions[:MOST_REMARKS] + _more(cautions)
    if comparison.notes:
        yield f"to be known of {_runs(len(comparison.notes))}", _grouped(comparison.notes)
    if comparison.left_out:
        yield f"not compared, {_runs(len(comparison.left_out))}", _grouped(comparison.left_out)


def _headline(comparison: Comparison) -> str:
    num_runs = sum(len(row.runs) for row in comparison.rows)
    same = ", ".join(f"{word(key)} {value}" for key, value in comparison.same.items())
    return f"{_runs(num_runs)} compared" + (f"; all of {same}" if same else "")


def _texts(comparison: Comparison, shown: Sequence[Column]) -> list[list[str]]:
    return [
        [_text(column.cells[index], column, len(row.runs)) for column in shown]
        for index, row in enumerate(comparison.rows)
    ]


def _text(cell: Any, column: Column, num_runs: int) -> str:
    if cell is None:
        return NOTHING
    if not isinstance(cell, Stat):
        return column.number(cell) if isinstance(cell, float) else str(cell)
    mean = column.number(cell.mean)
    if cell.sd is None:
        spread = ""
    elif column.number is digits and "e" not in mean:  # as many decimals as the mean
        spread = f" ± {cell.sd:,.{len(mean.partition('.')[2])}f}"
    else:
        spread = f" ± {column.number(cell.sd)}"
    return mean + spread + (f" ({cell.count} of {num_runs})" if cell.count < num_runs else "")


def _sections(
    comparison: Comparison, shown: Sequence[Column]
) -> Iterator[tuple[str, Sequence[str]]]:
    if best := comparison.best:
        names = [key for key in comparison.keys if key != "seed"]
        lines = [f"{digits(best.value)} by {best.run.folder}, seed {best.run.seed}"]
        if any(len(row.runs) > 1 for row in comparison.rows):
            where = label(best.row.setting, names)
            count = _runs(best.row_stat.count)
            lines.append(f"{digits(best.row_stat.mean)} in the mean of {count} by {where}")
        yield f"best {best.metric} ({best.mode})", lines
    yield from _gaps(comparison)
    if breaks := [one for one in comparison.parity if one.first_break is not None]:
        lines = [_broken(one) for one in breaks[:MOST_REMARKS]]
        lines += [*_more(breaks), UNEQUAL, UNSTABLE, LATE]
        yield f"loss parity broken, {_runs(len(breaks))}", lines
    yield from remarks(comparison)
    legends = [column.legend for column in shown if column.legend]
    if any(len(row.runs) > 1 for row in comparison.rows):
        legends.insert(0, "±: the standard deviation over a row's runs, its seeds")
    yield "columns", legends


def _gaps(comparison: Comparison) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield why steps take longer than predicted, and what the predictions stand on."""
    lines = []
    for row in comparison.rows:
        for kind, one in row.predicted.items():
            gaps = {part: ms - one.parts_ms[part] for part, ms in one.measured_ms.items()}
            parts = ", ".join(
                f"{part} {gap:+.3g}"
                for part, gap in sorted(gaps.items(), key=lambda item: -abs(item[1]))
                if abs(gap) >= 0.005 * sum(one.measured_ms.values())
            )
            name = label(row.setting, comparison.keys)
            total, expected = sum(one.measured_ms.values()), sum(one.parts_ms.values())
            lines.append(
                f"{name} ({kind}): {digits(total)} ms, predicted {digits(expected)}; {parts}"
            )
    if lines:
        yield "a step against its prediction, and in which parts they differ (ms)", lines
    links = [
        f"{one.backend}, {ranks(one.world_size)}: {one.latency_us:,.0f} us + bytes / "
        f"{one.gb_per_s:.2f} GB/s, from {one.num_sizes} sizes, which it meets to {one.error:.0%}"
        for one in comparison.links
    ]
    if links:
        yield "an all-reduce, as measured by task=collectives", links


def _broken(one: Parity) -> str:
    keys = {"parallelism.name": one.run.config.get("parallelism.name")}
    ours = label({**keys, "world_size": one.run.world_size}, ALWAYS)
    reference = one.reference.config.get("parallelism.name")
    theirs = label({ALWAYS[0]: reference, "world_size": one.reference.world_size}, ALWAYS)
    return (
        f"{ours}, seed {one.run.seed}: {one.verdict}, against {theirs}; at most "
        f"{one.largest:.1%} apart ({one.run.folder})"
    )


def _grouped(found: Sequence[Remark]) -> list[str]:
    """Return a line for each sentence, with the folders that it is about."""
    folders: dict[str, list[Path]] = {}
    for remark in found:
        folders.setdefault(remark.sentence, []).append(remark.folder)
    lines = []
    for sentence, those in folders.items():
        names = ", ".join(str(folder) for folder in those[:MOST_FOLDERS])
        more = f" and {len(those) - MOST_FOLDERS} more" if len(those) > MOST_FOLDERS else ""
        lines.append(f"{names}{more}: {sentence}")
    return lines[:MOST_REMARKS] + _more(lines)


def _more(lines: Sequence[Any]) -> list[str]:
    rest = len(lines) - MOST_REMARKS
    return [f"and {rest} more; --format json has all"] if rest > 0 else []


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _plain(value: Any) -> Any:
    if isinstance(value, Run | Path):
        return str(value.folder if isinstance(value, Run) else value)
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
