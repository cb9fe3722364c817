"""A comparison as text, Markdown, CSV and JSON."""

import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from shutil import get_terminal_size
from typing import Any

from ddp_runner.compare.analysis import Comparison, RunNote
from ddp_runner.compare.render.columns import Column, columns, cut, digits, legends
from ddp_runner.compare.rows import ComparisonRow
from ddp_runner.compare.run import Run, Stat
from ddp_runner.compare.settings import ALWAYS_SHOWN, label, title_of
from ddp_runner.errors import counted, listed, printable
from ddp_runner.files import in_csv, in_markdown, json_safe
from ddp_runner.host.streams import line_width, wrapped
from ddp_runner.tracking.run_dir import RunDir

WIDTH = 120  # characters, without a terminal
MAX_LINES = 20  # in lists for people
MAX_CELL = 200  # characters of a cell, for people
MAX_SENTENCE = 2000  # characters of a line below the table
PARITY_HINTS = (
    "dropout, and BatchNorm that is not synchronised, differ by rank and break parity",
    "a training that is about to diverge breaks it by rounding alone: try a smaller optimizer.lr",
    "a first line long after step 1 hides how the difference began: try train.log_every_steps=1",
)


def as_text(comparison: Comparison) -> str:
    """Return a table with aligned columns, and lists of remarks below it.

    Columns beyond the width of the terminal follow in further blocks, which repeat the settings.
    """
    shown = [column for column in columns(comparison) if column.is_brief]
    lines = [headline(comparison)]
    terminal = line_width(sys.stdout)
    width = terminal or get_terminal_size(fallback=(WIDTH, 0)).columns  # a user may set COLUMNS
    lines += _blocks(comparison, shown, width=width)
    for title, sentences in sections(comparison, shown):
        lines += ["", f"{title}:", *(f"  {sentence}" for sentence in sentences)]
    return wrapped("\n".join(map(printable, lines)), terminal)


def _blocks(comparison: Comparison, shown: Sequence[Column], *, width: int) -> Iterator[str]:
    """Yield the lines of the table, split between columns into blocks of at most `width`."""
    padded = []
    for column in shown:
        texts = [column.title, *(cell_text(column, row) for row in comparison.rows)]
        texts = [cut(text, MAX_CELL) for text in texts]
        size = max(map(len, texts))
        is_text = any(isinstance(column.cell(row), str) for row in comparison.rows)
        padded.append([text.ljust(size) if is_text else text.rjust(size) for text in texts])
    num_keys, blocks = len(comparison.keys), [list[list[str]]()]
    if sum(len(texts[0]) + 2 for texts in padded[:num_keys]) > width / 2:  # too wide to repeat
        numbers = ["#", *map(str, range(1, len(comparison.rows) + 1))]
        padded, num_keys = [[one.rjust(len(numbers[-1])) for one in numbers], *padded], 1
    keys = padded[:num_keys]
    for texts in padded[num_keys:]:
        taken = sum(len(others[0]) + 2 for others in (*keys, *blocks[-1]))
        if blocks[-1] and taken + len(texts[0]) > width:
            blocks.append([])
        blocks[-1].append(texts)
    for block in blocks if comparison.rows else ():
        yield ""
        yield from ("  ".join(row).rstrip() for row in zip(*keys, *block, strict=True))


def as_markdown(comparison: Comparison) -> str:
    """Return the same as a Markdown table and lists."""
    shown = [column for column in columns(comparison) if column.is_brief]
    rows = [[column.title for column in shown], ["---"] * len(shown)]
    rows += [[cell_text(column, row) for column in shown] for row in comparison.rows]
    lines = [in_markdown(headline(comparison)), ""]
    for row in rows if comparison.rows else ():
        texts = [in_markdown(cut(text, MAX_CELL)) for text in row]
        lines.append(f"| {' | '.join(texts)} |")
    for title, sentences in sections(comparison, shown):
        lines += ["", f"**{title}**", "", *(f"- {in_markdown(sentence)}" for sentence in sentences)]
    return "\n".join(map(printable, lines))


def as_csv(comparison: Comparison) -> str:
    """Return every column of every row; standard deviations have columns of their own."""
    table: list[list[Any]] = []  # by column, each with its title first
    for column in columns(comparison):
        cells = [column.cell(row) for row in comparison.rows]
        stats = [cell if isinstance(cell, Stat) else None for cell in cells]
        means = [stat.mean if stat else cell for stat, cell in zip(stats, cells, strict=True)]
        table.append([column.key, *means])
        if any(stats):
            table.append([f"{column.key}_sd", *(stat and stat.sd for stat in stats)])
    text = io.StringIO()
    rows = (map(in_csv, row) for row in zip(*table, strict=True))
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().rstrip("\n")


def as_json(comparison: Comparison) -> str:
    """Return the whole Comparison; a run is its folder, and null stands for NaN and infinities."""
    return json.dumps(comparison, default=_json_value, indent=2, allow_nan=False)


FORMATS = {"table": as_text, "markdown": as_markdown, "csv": as_csv, "json": as_json}
SUFFIXES = {"table": "txt", "markdown": "md", "csv": "csv", "json": "json"}


def remark_sections(comparison: Comparison) -> Iterator[tuple[str, list[str]]]:
    """Yield the titles and lines of the warnings, the notes and the skipped runs, if any."""
    if comparison.warnings:
        yield "warnings", _shortened(comparison.warnings)
    if comparison.notes:
        yield "notes", _by_sentence(comparison.notes)
    if skipped := comparison.skipped:
        yield f"skipped, {counted(len(skipped), 'run')}", _by_sentence(skipped)


def headline(comparison: Comparison) -> str:
    """Return how many runs are compared, and what all of them share."""
    num_runs = sum(len(row.runs) for row in comparison.rows)
    same = ", ".join(f"{title_of(key)} {value}" for key, value in comparison.same.items())
    text = f"{counted(num_runs, 'run')} compared" + (f"; all with {same}" if same else "")
    return cut(text, MAX_SENTENCE)


def cell_text(column: Column, row: ComparisonRow) -> str:
    """Return a cell: a mean, its standard deviation, and of how many of the runs."""
    cell = column.cell(row)
    if cell is None:
        return "-"
    if not isinstance(cell, Stat):
        return column.number(cell) if isinstance(cell, float) else str(cell)
    text = column.number(cell.mean)
    if cell.sd is not None and column.number is digits and "e" not in text:
        text += f" ± {cell.sd:,.{len(text.partition('.')[2])}f}"  # as many decimals as the mean
    elif cell.sd is not None:
        text += f" ± {column.number(cell.sd)}"
    return text + (f" ({cell.count} of {len(row.runs)})" if cell.count < len(row.runs) else "")


def sections(
    comparison: Comparison, shown: Sequence[Column]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the titles and lines of the lists below the table."""
    for title, lines in _sections(comparison, shown):
        yield title, [cut(line, MAX_SENTENCE) for line in lines]


def _sections(
    comparison: Comparison, shown: Sequence[Column]
) -> Iterator[tuple[str, Sequence[str]]]:
    has_several = any(len(row.runs) > 1 for row in comparison.rows)
    if best := comparison.best:
        name = label(best.row.setting, [key for key in comparison.keys if key != "seed"])
        count, sd = counted(best.value.count, "run"), best.value.sd
        spread = "" if sd is None else f" ± {digits(sd)}"
        exports = [RunDir(run.folder).export for run in best.row.runs]
        models = listed([str(path) for path in exports if path.is_file()])
        lines = [f"{digits(best.value.mean)}{spread} over {count} ({name})"]
        lines.append(f"its models: {models or 'none was exported'}")
        yield f"best {best.metric} ({best.mode})", lines
    if lines := [*_step_gaps(comparison)]:
        yield "step time, measured and predicted, and the parts that differ (ms)", lines
    if lines := [
        f"{fit.backend}, {counted(fit.world_size, 'rank')}: {fit.latency_us:,.0f} us + bytes / "
        f"{fit.gb_per_s:.2f} GB/s, from {fit.num_sizes} sizes, median error {fit.error:.0%}"
        for fit in comparison.all_reduces
    ]:
        yield "time of an all-reduce, fitted to task=collectives", lines
    if lines := [
        f"{label(parity.run.setting, ALWAYS_SHOWN)}, seed {parity.run.seed}: {parity.verdict}, "
        f"compared with {label(parity.reference.setting, ALWAYS_SHOWN)}; difference up to "
        f"{parity.largest:.1%} ({parity.run.folder})"
        for parity in comparison.parity
        if parity.first_break is not None
    ]:
        title = f"loss parity broken, {counted(len(lines), 'run')}"
        yield title, [*_shortened(lines), *PARITY_HINTS]
    yield from remark_sections(comparison)
    over = " and ".join(comparison.over)
    lines = [f"±: standard deviation over the runs of a row, its {over}"] if has_several else []
    texts = legends(comparison)
    explained = [f"{column.title}: {texts[column.key]}" for column in shown if column.key in texts]
    if comparison.rows:
        yield "columns", [*lines, *dict.fromkeys(explained)]


def _step_gaps(comparison: Comparison) -> Iterator[str]:
    """Yield by how much each predicted step differs from the measured one, and in which parts."""
    for row in comparison.rows:
        for kind, prediction in row.predicted.items():
            measured, predicted = prediction.measured_ms, prediction.parts_ms
            total = sum(measured.values())
            gaps = {part: ms - predicted[part] for part, ms in measured.items()}
            parts = ", ".join(
                f"{part} {gap:+.3g}"
                for part, gap in sorted(gaps.items(), key=lambda item: -abs(item[1]))
                if abs(gap) >= 0.005 * total
            )
            yield (
                f"{row.label} ({kind}): {digits(total)} ms, predicted "
                f"{digits(sum(predicted.values()))}; {parts}"
            )


def _by_sentence(notes: Sequence[RunNote]) -> list[str]:
    """Return a line for each different sentence, with the folders of its runs."""
    folders: dict[str, list[str]] = {}
    for note in notes:
        folders.setdefault(note.sentence, []).append(str(note.folder))
    return _shortened([f"{listed(names)}: {sentence}" for sentence, names in folders.items()])


def _shortened(lines: Sequence[str]) -> list[str]:
    num_more = len(lines) - MAX_LINES
    more = [f"and {num_more} more; --format json shows all"] if num_more > 0 else []
    return [*(cut(line, MAX_SENTENCE) for line in lines[:MAX_LINES]), *more]


def _json_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, Run):
        return json_safe({field.name: getattr(value, field.name) for field in fields(value)})
    return str(value.folder if isinstance(value, Run) else value)  # a path, or a date from YAML
