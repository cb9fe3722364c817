"""A comparison as text, Markdown, CSV and JSON."""

import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, TextIO

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.columns import results_table
from ddp_runner.compare.parity import EQUAL_BYTES
from ddp_runner.compare.recorded_run import RecordedRun, Stat
from ddp_runner.compare.settings import ALWAYS_SHOWN, label
from ddp_runner.compare.speedup import Prediction
from ddp_runner.compare.table import Column, Table, cut, digits
from ddp_runner.errors import counted, listed, printable
from ddp_runner.files import in_csv, in_markdown, json_safe
from ddp_runner.host.streams import line_width, wrap_lines
from ddp_runner.tracking.run_dir import RunDir

WIDTH = 120  # characters, without a terminal
MAX_LINES = 20  # in a list of text or Markdown
MAX_CELL = 200  # characters of a cell in text or Markdown
NUMBER_WIDTH = 8  # characters for a row's number, gaps and an ellipsis
PARITY_HINTS = (
    "dropout, and BatchNorm that is not synchronised, differ by rank and break parity",
    "a training that is about to diverge breaks it by rounding alone: try a smaller optimizer.lr",
    "a first line long after step 1 hides how the difference began: try train.log_every_steps=1",
)

Remark = tuple[str, Sequence[str]]  # a title and the lines below it


def as_text(comparison: Comparison) -> str:
    """Return a table with aligned columns, and lists of remarks below it.

    Columns beyond the width of the terminal follow in more blocks, which repeat the settings.
    """
    shown = results_table(comparison)
    width = width_of(sys.stdout)
    lines = [wrap_lines(printable(shown.name), width), *map(printable, _blocks(shown, width=width))]
    return "\n".join([*lines, *listing(remarks(comparison, shown), width=width)])


def listing(remarks: Iterable[Remark], *, width: int) -> Iterator[str]:
    """Yield the lines of lists of remarks, with an empty line before each list."""
    for title, sentences in remarks:
        yield from ("", f"{title}:")
        yield from (wrap_lines(printable(f"  {sentence}"), width) for sentence in sentences)


def width_of(stream: TextIO) -> int:
    """Return the longest line of a terminal; without a terminal, COLUMNS or WIDTH."""
    return line_width(stream) or get_terminal_size(fallback=(WIDTH, 0)).columns


def _blocks(shown: Table, *, width: int) -> Iterator[str]:
    """Yield the lines of the table, split between columns into blocks of at most `width`.

    Each block begins with the settings if they tell the rows apart and leave half of the width and
    room for every column; else with the numbers of the rows.
    """
    columns = [column for column in shown.columns if column.is_brief]
    padded = []
    for column in columns:
        texts = _texts(shown, column, most=min(MAX_CELL, width - NUMBER_WIDTH))
        size = max(map(len, texts))
        is_text = any(isinstance(value, str) for value in column.values)
        padded.append([text.ljust(size) if is_text else text.rjust(size) for text in texts])
    is_key = [*(column.is_key for column in columns), False]
    num_keys = is_key.index(False)
    blocks = [list[list[str]]()]
    taken = sum(len(texts[0]) + 2 for texts in padded[:num_keys])
    room = width - max([len(texts[0]) for texts in padded[num_keys:]], default=0)
    are_told_apart = len({*zip(*padded[:num_keys], strict=True)}) > len(shown.labels)
    if taken > min(width / 2, room) or not are_told_apart:
        labels = [shown.head, *shown.labels]
        padded, num_keys = [[label.rjust(len(labels[-1])) for label in labels], *padded], 1
    keys = padded[:num_keys]
    for texts in padded[num_keys:]:
        taken = sum(len(cells[0]) + 2 for cells in (*keys, *blocks[-1]))
        if blocks[-1] and taken + len(texts[0]) > width:
            blocks.append([])
        blocks[-1].append(texts)
    for block in blocks if shown.labels else ():
        yield ""
        yield from ("  ".join(row).rstrip() for row in zip(*keys, *block, strict=True))


def _texts(shown: Table, column: Column, *, most: int = MAX_CELL) -> list[str]:
    """Return the title and the cells of a column, with `most` characters at most.

    Longer cells lose the folders, keys or words that all cells begin with, then their middle. They
    stay whole if different cells would become equal.
    """
    texts = [shown.text(column, row) for row in range(len(shown.labels))]
    if max(map(len, texts), default=0) > most:
        start = re.sub(r"[^/, ]*$", "", os.path.commonprefix(texts))  # noqa: RUF071, any text
        parts = [f"{'…' if start else ''}{text.removeprefix(start)}" for text in texts]
        end = most // 2
        short = [
            part if len(part) <= most else f"{part[: most - end]}…{part[1 - end :]}"
            for part in parts
        ]
        texts = short if len({*short}) == len({*texts}) else texts
    return [cut(column.title, most), *texts]


def as_markdown(comparison: Comparison) -> str:
    """Return a Markdown table, and lists of remarks below it."""
    shown = results_table(comparison)
    columns = [_texts(shown, column) for column in shown.columns if column.is_brief]
    rows = [[in_markdown(text) for text in row] for row in zip(*columns, strict=True)]
    rows[1:1] = [["---"] * len(columns)]
    lines = [in_markdown(shown.name), ""]
    lines += [f"| {' | '.join(row)} |" for row in rows if shown.labels]
    for title, sentences in remarks(comparison, shown):
        lines += ["", f"**{title}**", "", *(f"- {in_markdown(sentence)}" for sentence in sentences)]
    return "\n".join(map(printable, lines))


def as_csv(comparison: Comparison) -> str:
    """Return all columns, with standard deviations in separate columns."""
    columns: list[list[Any]] = []  # each with its title first
    for column in results_table(comparison).columns:
        means = [value.mean if isinstance(value, Stat) else value for value in column.values]
        sds = [value.sd if isinstance(value, Stat) else None for value in column.values]
        columns.append([column.key, *means])
        if any(isinstance(value, Stat) for value in column.values):
            columns.append([f"{column.key}_sd", *sds])
    text = io.StringIO()
    rows = (map(in_csv, row) for row in zip(*columns, strict=True))
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().rstrip("\n")


def as_json(comparison: Comparison) -> str:
    """Return the whole Comparison; a run is its folder, and null stands for NaN and infinities."""
    return json.dumps(comparison, default=_json_value, indent=2, allow_nan=False)


def _json_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, RecordedRun):
        return json_safe({field.name: getattr(value, field.name) for field in fields(value)})
    # Else a path, or a date from YAML.
    return str(value.folder if isinstance(value, RecordedRun) else value)


FORMATS = {"table": as_text, "markdown": as_markdown, "csv": as_csv, "json": as_json}
SUFFIXES = {"table": "txt", "markdown": "md", "csv": "csv", "json": "json"}


def remarks(comparison: Comparison, shown: Table | None = None) -> Iterator[Remark]:
    """Yield the lists below a table, with MAX_LINES at most; without a table, those about runs."""
    lists = _faults(comparison)
    if shown is not None:
        lists = chain(_results(comparison), lists, _legend(comparison, shown))
    for title, lines in lists:
        num_more = len(lines) - MAX_LINES
        more = [f"and {num_more} more; --format json shows all"] if num_more > 0 else []
        if lines:
            yield title, [*map(cut, lines[:MAX_LINES]), *more]


def _results(comparison: Comparison) -> Iterator[Remark]:
    """Yield results beside the table: the best models, predicted steps and parity."""
    if best := comparison.best:
        count, sd = counted(best.value.count, "run"), best.value.sd
        spread = "" if sd is None else f" ± {digits(sd)}"
        exports = [RunDir(run.folder).export for run in best.row.runs]
        models = listed([str(path) for path in exports if path.is_file()])
        value = f"{digits(best.value.mean)}{spread} over {count} ({best.row.label})"
        lines = [value, f"its models: {models or 'none was exported'}"]
        yield f"best {best.metric} ({best.mode})", lines
    lines = [
        f"{row.label} ({kind}): {_gaps(scaling.predicted)}"
        for row in comparison.rows
        for kind, scaling in row.scalings.items()
        if scaling.predicted
    ]
    yield "step time, measured and predicted, and the parts that differ (ms)", lines
    lines = [
        f"{fit.backend}, {counted(fit.world_size, 'rank')}: {fit.latency_us:,.0f} us + bytes / "
        f"{fit.gb_per_s:.2f} GB/s, from {fit.num_sizes} sizes, median error {fit.error:.0%}"
        for fit in comparison.all_reduces
    ]
    yield "time of an all-reduce, fitted to task=collectives", lines
    lines = [
        f"{label(parity.run.setting, ALWAYS_SHOWN)}, seed {parity.run.seed}: {parity.verdict}, "
        f"compared with {label(parity.reference.setting, ALWAYS_SHOWN)}; difference up to "
        f"{parity.largest:.1%} ({parity.run.folder})"
        for parity in comparison.parity
        if parity.first_break is not None
    ]
    yield f"loss parity broken, {counted(len(lines), 'run')}", lines
    yield "what breaks loss parity", PARITY_HINTS if lines else ()
    equal = dict[str, dict[Path, str]]()  # by hash, then by folder
    for parity in comparison.parity:
        if parity.verdict == EQUAL_BYTES:
            runs = equal.setdefault(str(parity.run.record["weights_sha256"]), {})
            for run in (parity.reference, parity.run):
                runs[run.folder] = label(run.setting, ALWAYS_SHOWN)
    lines = [
        f"{len(runs)} runs, {sha256[:12]} ({listed([*runs.values()], separator='; ')})"
        for sha256, runs in equal.items()
    ]
    yield "weights that are equal bit for bit, by their SHA-256", lines


def _gaps(step: Prediction) -> str:
    measured, predicted = step.measured_ms, step.parts_ms
    total = sum(measured.values())
    gaps = {part: ms - predicted[part] for part, ms in measured.items()}
    largest = sorted(gaps.items(), key=lambda item: -abs(item[1]))
    parts = ", ".join(f"{part} {ms:+.3g}" for part, ms in largest if abs(ms) >= 0.005 * total)
    return f"{digits(total)} ms, predicted {digits(sum(predicted.values()))}; {parts}"


def _faults(comparison: Comparison) -> Iterator[Remark]:
    """Yield the warnings, the notes and the skipped runs; equal sentences share a line."""
    yield "warnings", comparison.warnings
    titles = "notes", f"skipped, {counted(len(comparison.skipped), 'run')}"
    for title, notes in zip(titles, (comparison.notes, comparison.skipped), strict=True):
        folders: dict[str, list[str]] = {}
        for note in notes:
            folders.setdefault(note.sentence, []).append(str(note.run.folder))
        lines = []
        for sentence, names in folders.items():
            runs = listed(names) if len(names) == 1 else f"{len(names)} runs ({listed(names)})"
            lines.append(f"{runs}: {sentence}")
        yield title, lines


def _legend(comparison: Comparison, shown: Table) -> Iterator[Remark]:
    lines = []
    if any(len(row.runs) > 1 for row in comparison.rows):
        spread = "standard deviation over the runs of a row, which differ at most in"
        lines.append(f"±: {spread} {' and '.join(comparison.over)}")
    columns = [column for column in shown.columns if column.is_brief and column.hint]
    lines += [f"{column.title}: {column.hint}" for column in columns]
    if shown.labels:
        yield "columns", list(dict.fromkeys(lines))
