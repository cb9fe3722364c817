"""The page ``report.html``: a comparison, or one run, as a single file that needs nothing else.

Run folders come from anybody, so every value in them is hostile text: the template engine escapes
it, ``_visible`` makes what is invisible visible, and the page's own policy forbids everything that
is not in the file. No function here builds HTML from values by hand.
"""

import base64
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ddp_runner import __version__
from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.cards import Card, date_text, details
from ddp_runner.compare.columns import results_table
from ddp_runner.compare.curves import SIZE
from ddp_runner.compare.formats import PARITY_HINTS, remarks
from ddp_runner.compare.plots import data_url
from ddp_runner.compare.run_tables import (
    config_table,
    machines_table,
    parity_table,
    scaling_table,
)
from ddp_runner.compare.runs import read_run, with_what_is_there
from ddp_runner.compare.table import Table, cut, values_table
from ddp_runner.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DETAILED = 100  # runs with details of their own; more would take megabytes and minutes
MAX_SHOWN = 50_000  # characters of any text; a curve and a command are shorter
NUM_POINTS = 6000  # of one metric's curves, over all runs
FEWEST_POINTS, MOST_POINTS = 60, 300  # of a curve
MIN_FILTERED = 6  # rows; fewer are seen at a glance
MAX_CHOICES = 12  # of a column; more would make its menu longer than the table


def html(
    comparison: Comparison, drawn: Mapping[str, "Figure | str"], *, paths: Sequence[Path]
) -> str:
    """Return the page.

    Args:
        comparison: What the report is about. A single run has a page of its own kind.
        drawn: The plots, or why there is none, by name.
        paths: What the user compared.
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
    return environment.get_template("page.html.j2").render(
        report=_report(comparison, drawn, paths),
        style=Markup(style),  # both are this package's own files
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        size=SIZE,
    )


def _report(
    comparison: Comparison, drawn: Mapping[str, "Figure | str"], paths: Sequence[Path]
) -> dict[str, Any]:
    """Return all that the template shows; None, and what is empty, it leaves out."""
    cards = _cards(comparison)
    is_single = len(cards) == 1
    num_points = max(FEWEST_POINTS, min(MOST_POINTS, NUM_POINTS // max(1, len(cards))))
    detailed = [one for one in cards.values() if one.anchor]
    every = [details(one, num_points=num_points, has_config=is_single) for one in detailed]
    main = results_table(comparison)
    has_table = bool(main.labels) and not is_single
    name = "A row for each run" if "seed" in comparison.keys else "A row for each setting"
    rows = (*comparison.rows, *comparison.ran_out)
    firsts = tuple(cards[row.runs[0].folder].anchor for row in rows)
    names = [path.resolve().name for path in paths]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    left_out = ("columns", "skipped", "loss parity", *(["notes"] if is_single else []))
    sections = [one for one in remarks(comparison, main) if not one[0].startswith(left_out)]
    skipped = [(cards[note.folder], note.sentence) for note in comparison.skipped]
    why = {"run": [one.title for one, _ in skipped], "why": [why for _, why in skipped]}
    links = [one.anchor for one, _ in skipped]
    plots = [one for one in drawn.values() if has_table and not isinstance(one, str)]
    is_broken = any(one.first_break is not None for one in comparison.parity)
    return {
        "title": detailed[0].name if is_single else ", ".join(names[:3]) + more,
        "headline": main.name,
        "paths": tuple(map(str, paths)),
        "date": date_text(time.time()),
        "version": __version__,
        "single": every[0] if is_single else None,
        "main": replace(main, name=name, links=firsts) if has_table else None,
        "legends": [(one.title, one.hint) for one in main.columns if one.hint],
        "menus": _menus(main),
        "is_filtered": len(main.labels) >= MIN_FILTERED,
        "sections": sections,
        "skipped": values_table("Runs that are not compared", why, links=links),
        "plots": [(figure.get_suptitle(), Markup(data_url(figure))) for figure in plots],
        "scaling": scaling_table(comparison, cards),
        "parity": parity_table(comparison, cards),
        "hints": PARITY_HINTS if is_broken else (),
        "config": config_table(comparison, cards) if has_table else None,
        "machines": machines_table([*cards.values()]) if not is_single else None,
        "details": () if is_single else every,
        "num_without_details": len(cards) - len(detailed),
    }


def _cards(comparison: Comparison) -> dict[Path, Card]:
    """Return the runs in the order of their rows, then those in no row."""
    cards = [
        Card(run, f"{place}.{index}" if len(row.runs) > 1 else str(place), row.label)
        for place, row in enumerate((*comparison.rows, *comparison.ran_out), start=1)
        for index, run in enumerate(row.runs, start=1)
    ]
    known = {one.run.folder for one in cards}
    others = [note for note in comparison.skipped if note.folder not in known]
    cards += [  # the comparison needs no more of them than the sentence
        Card(replace(with_what_is_there(read_run(note.folder)), reason=note.sentence), f"s{place}")
        for place, note in enumerate(others, start=1)
    ]
    if len(cards) <= MAX_DETAILED:
        cards = [replace(one, anchor=f"run-{one.number.replace('.', '-')}") for one in cards]
    return {one.run.folder: one for one in cards}


def _menus(main: Table) -> dict[str, list[str]]:
    """Return the menus that filter the rows: the values of a setting, by the key of its column."""
    menus = {}
    for column in main.columns if len(main.labels) >= MIN_FILTERED else ():
        orders = [(column.order(row), main.text(column, row)) for row in range(len(main.labels))]
        orders.sort(key=lambda pair: (pair[0] if isinstance(pair[0], float) else math.inf, pair[1]))
        texts = [*dict.fromkeys(text for _, text in orders)]
        if column.is_key and 1 < len(texts) <= MAX_CHOICES:
            menus[column.key] = texts
    return menus


def _visible(value: Any) -> Any:
    """Return a value of the template as text, with escapes for invisible characters.

    A text of megabytes is cut, and line ends stay. Markup is this package's own, so it stays, too.
    """
    if isinstance(value, Markup):
        return value
    return "\n".join(map(printable, cut(str(value), MAX_SHOWN).split("\n")))


def _hash(text: str) -> str:
    """Return the hash by which the page's policy allows its own style and script alone.

    As in https://www.w3.org/TR/CSP3/#grammardef-hash-source
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
