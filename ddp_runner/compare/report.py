"""The page ``report.html``: a comparison, or a single run, in a self-contained file.

Run folders may come from anybody, so their values are untrusted: the template engine escapes them,
``_visible`` replaces invisible characters, and the page's policy forbids loading anything. No
function here builds HTML from values.
"""

import base64
import hashlib
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ddp_runner import __version__
from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.cards import SIZE, Card, details
from ddp_runner.compare.columns import results_table
from ddp_runner.compare.drawing import data_url
from ddp_runner.compare.formats import Remark, remarks
from ddp_runner.compare.recorded_run import RecordedRun
from ddp_runner.compare.table import (
    NOTHING,
    Table,
    cut,
    date_text,
    digits,
    percent,
    setting_text,
    values_table,
)
from ddp_runner.config.identity import leaves
from ddp_runner.errors import listed, printable
from ddp_runner.metric_names import best_end, headlines
from ddp_runner.tracking.git import code_version

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DETAILED = 100  # runs with details; more would take megabytes and minutes
MAX_ROWS = 1000  # of the tables; a browser needs seconds for more, and comparison.csv has all
MAX_SHOWN = 50_000  # characters of a text; curves and commands are shorter

Cards = Mapping[Path, Card]  # by the folder of the run


def html(
    comparison: Comparison, plots: Mapping[str, "Figure | str"], *, paths: Sequence[Path]
) -> str:
    """Return the page; a single run has no tables of settings.

    `plots` has plots by name, or the reasons why they are missing; `paths` are those of the user.
    """
    here = Path(__file__).parent / "templates"
    style, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(here),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["digits"] = digits
    return environment.get_template("page.html.j2").render(
        report=_report(comparison, plots, paths),
        style=Markup(style),  # style and script are this package's own files
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        size=SIZE,
    )


def _report(
    comparison: Comparison, plots: Mapping[str, "Figure | str"], paths: Sequence[Path]
) -> dict[str, Any]:
    """Return the values for the template, which leaves out None and empty values."""
    whole, table = comparison, results_table(comparison)
    comparison, cut_note = _with_best_rows(comparison)
    cards = _cards(comparison)
    is_single = len(cards) == 1
    detailed = [card for card in cards.values() if card.anchor]
    all_details = [details(card, is_single=is_single) for card in detailed]
    links = tuple(cards[row.runs[0].folder].anchor for row in comparison.all_rows)
    main = replace(results_table(comparison), links=links)
    has_table = bool(main.labels) and not is_single
    name = "A row for each run" if "seed" in comparison.keys else "A row for each setting"
    left_out = ("columns", "skipped", *(["notes"] if is_single else []))
    sections = [*cut_note, *remarks(whole, table)]
    figures = [plot for plot in plots.values() if has_table and not isinstance(plot, str)]
    return {
        "title": detailed[0].name if is_single else listed([path.resolve().name for path in paths]),
        "headline": table.name,
        "paths": tuple(map(str, paths)),
        "date": date_text(time.time()),
        "version": __version__,
        "single": all_details[0] if is_single else None,
        "main": replace(main, name=name) if has_table else None,
        "legends": [(column.title, column.hint) for column in main.columns if column.hint],
        "sections": [item for item in sections if not item[0].startswith(left_out)],
        "skipped": None if is_single else _skipped_table(comparison, cards),
        "plots": [(figure.get_suptitle(), Markup(data_url(figure))) for figure in figures],
        "scaling": _scaling_table(main) if has_table else None,
        "parity": _parity_table(comparison, cards),
        "config": _config_table(comparison, cards) if has_table else None,
        "machines": _machines_table([*cards.values()]) if not is_single else None,
        "details": () if is_single else all_details,
        "num_without_details": len(cards) - len(detailed),
    }


def _cards(comparison: Comparison) -> Cards:
    """Return the runs in the order of their rows, then the runs without a row."""
    cards = [
        Card(run, f"{row_number}.{index}" if len(row.runs) > 1 else str(row_number), row.label)
        for row_number, row in enumerate(comparison.all_rows, start=1)
        for index, run in enumerate(row.runs, start=1)
    ]
    in_rows = {card.run.folder for card in cards}
    notes = [note for note in comparison.skipped if note.run.folder not in in_rows]
    cards += [
        Card(replace(note.run, reason=note.sentence), f"s{number}")
        for number, note in enumerate(notes, start=1)
    ]
    if len(cards) <= MAX_DETAILED:
        cards = [replace(card, anchor=f"run-{card.number.replace('.', '-')}") for card in cards]
    return {card.run.folder: card for card in cards}


def _with_best_rows(comparison: Comparison) -> tuple[Comparison, list[Remark]]:
    """Return the comparison with at most MAX_ROWS, the best by a metric, and a remark on it."""
    rows, best = comparison.all_rows, comparison.best
    if len(rows) <= MAX_ROWS:
        return comparison, []
    names = headlines(sorted({name for row in rows for name in row.stats}))
    metric = best.metric if best else next(iter(names), "")
    is_lower = (best.mode if best else best_end(metric, rows[0].runs[0].directions)) == "min"
    worst = math.inf if is_lower else -math.inf
    means = {id(row): row.stats[metric].mean if metric in row.stats else worst for row in rows}
    kept = {*sorted(means, key=means.__getitem__, reverse=not is_lower)[:MAX_ROWS]}
    shown = [row for row in comparison.rows if id(row) in kept]
    folders = {run.folder for row in shown for run in row.runs}
    pairs = [one for one in comparison.parity if {one.run.folder, one.reference.folder} <= folders]
    ran_out = tuple(row for row in comparison.ran_out if id(row) in kept)
    note = (
        f"{MAX_ROWS:,} of {len(rows):,}, the best by {metric}; comparison.csv has all, and "
        "--best METRIC chooses them by another metric"
    )
    comparison = replace(comparison, rows=tuple(shown), ran_out=ran_out, parity=tuple(pairs))
    return comparison, [("rows on this page", [note])]


def _skipped_table(comparison: Comparison, cards: Cards) -> Table:
    skipped = [(cards[note.run.folder], note.sentence) for note in comparison.skipped]
    columns = {"run": [card.title for card, _ in skipped], "why": [why for _, why in skipped]}
    links = [card.anchor for card, _ in skipped]
    return values_table("Runs that are not compared", columns, links=links)


def _scaling_table(main: Table) -> Table | None:
    """Return the settings and speedups of the main table; None if it has no speedups."""
    speeds = [column for column in main.columns if column.key.startswith(("strong_", "weak_"))]
    settings = [
        column
        for column in main.columns
        if column.key == "num_devices"
        or (column.is_brief and (column.is_key or column.key == "setting"))
    ]
    columns = tuple(replace(column, is_brief=True) for column in (*settings, *speeds))
    return replace(main, name="Speedup and efficiency", columns=columns) if speeds else None


def _parity_table(comparison: Comparison, cards: Cards) -> Table:
    results = comparison.parity
    runs = [cards[parity.run.folder] for parity in results]
    return values_table(
        "Losses compared with the simplest mode on the fewest ranks",
        {
            "run": [card.title for card in runs],
            "setting": [card.label for card in runs],
            "seed": [card.run.seed for card in runs],
            "reference": [cards[parity.reference.folder].title for parity in results],
            "steps": [parity.num_steps for parity in results],
            "largest difference": [parity.largest for parity in results],
            "verdict": [parity.verdict for parity in results],
        },
        show={"largest difference": "{:.2%}".format},
        links=[card.anchor for card in runs],
    )


def _config_table(comparison: Comparison, cards: Cards) -> tuple[Table, list[tuple[str, str]]]:
    """Return the values of each key with different values, and the keys with equal values.

    Unlike the columns of the comparison, these are all keys, with a column for each setting, or for
    each run of a single setting. If there are more of these than keys, each has a row.
    """
    rows = comparison.all_rows
    groups = {f"{number} {row.label}": row.runs for number, row in enumerate(rows, start=1)}
    if len(groups) == 1:
        groups = {cards[run.folder].title: (run,) for run in rows[0].runs}
    keys = dict.fromkeys(key for runs in groups.values() for run in runs for key in run.config)
    values = {key: [_setting(runs, key) for runs in groups.values()] for key in keys}
    differing = {key: texts for key, texts in values.items() if len(set(texts)) > 1}
    same = [(key, texts[0]) for key, texts in values.items() if key not in differing]
    columns: dict[str, Sequence[str]] = {"# setting": [*groups], **differing}
    if len(groups) <= len(differing):
        by_group = zip(groups, zip(*differing.values(), strict=True), strict=True)
        columns = {"key": [*differing], **dict(by_group)}
    return values_table("All keys that differ", columns), same


def _setting(runs: Sequence[RecordedRun], key: str) -> str:
    texts = dict.fromkeys(setting_text(run.config[key]) for run in runs if key in run.config)
    return ", ".join(texts) or NOTHING


def _machines_table(cards: Sequence[Card]) -> tuple[Table, list[tuple[str, str]]]:
    """Return when and where each run ran, and the facts that are equal for all runs."""
    records = [card.run.record for card in cards]
    nested = [
        dict(leaves({key: record.get(key) for key in ("load", "versions")})) for record in records
    ]
    names = dict.fromkeys(key for fields in nested for key in fields)
    table = values_table(
        "When and where each run ran",
        {
            "run": [card.title for card in cards],
            "status": [record.get("status") for record in records],
            "started": [date_text(record.get("started_at")) for record in records],
            "wall s": [record.get("wall_s") for record in records],
            "sessions": [len(card.run.sessions) for card in cards],
            "restarts": [record.get("restarts") for record in records],
            "hosts": [record.get("hosts") or record.get("host") for record in records],
            "devices": [_counted(record.get("devices")) for record in records],
            "threads": [record.get("num_threads") for record in records],
            "code": [code_version(record) for record in records],
            **{key.removeprefix("versions."): [run.get(key) for run in nested] for key in names},
        },
        show={key: percent for key in names if "share" in key},
        links=[card.anchor for card in cards],
    )
    different, same = [], []
    for column in table.columns:
        first, *texts = {table.text(column, row) for row in range(len(cards))} or {NOTHING}
        if texts:
            different.append(column)
        elif first != NOTHING:
            same.append((column.title, first))
    return replace(table, columns=tuple(different)), same


def _counted(names: Any) -> str | None:
    """Return names with how often each occurs: NVIDIA H200 (4)."""
    counts = Counter(map(str, names)) if isinstance(names, list) else {}
    words = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
    return ", ".join(words) or None


def _visible(value: Any) -> Any:
    """Return a value as text with escapes for invisible characters; Markup stays as it is."""
    if isinstance(value, Markup):
        return value
    return "\n".join(map(printable, cut(str(value), MAX_SHOWN).split("\n")))


def _hash(text: str) -> str:
    """Return a hash-source of https://www.w3.org/TR/CSP3 that allows a style or a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
