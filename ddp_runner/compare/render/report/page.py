"""The page ``report.html``: one file with no address in it, safe whatever the runs' files hold."""

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ddp_runner import __version__
from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.render.columns import columns, cut, legends
from ddp_runner.compare.render.plots import data_url
from ddp_runner.compare.render.report.curves import SIZE
from ddp_runner.compare.render.report.details import details
from ddp_runner.compare.render.report.origins import config_table, machines_table
from ddp_runner.compare.render.report.tables import (
    main_table,
    numbered_runs,
    parity_table,
    scaling_table,
    skipped_table,
)
from ddp_runner.compare.render.report.views import date_text
from ddp_runner.compare.render.tables import PARITY_HINTS, headline, sections
from ddp_runner.compare.runs import read_run, with_what_is_there
from ddp_runner.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DETAILED = 100  # runs with details of their own; more would take megabytes and minutes
MAX_SHOWN = 50_000  # characters of any text; a curve and a command are shorter
NUM_POINTS = 6000  # of one metric's curves, over all runs
FEWEST_POINTS, MOST_POINTS = 60, 300  # of a curve


def html(
    comparison: Comparison, drawn: Mapping[str, "Figure | str"], *, paths: Sequence[Path]
) -> str:
    """Return the page.

    Args:
        comparison: What the report is about. A single run has a page of its own kind.
        drawn: The plots, or why there is none, by name.
        paths: What the user compared.
    """
    here = Path(__file__).parent
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
    skipped = [  # not in the comparison, which needs no more of them than the sentence
        replace(with_what_is_there(read_run(note.folder)), reason=note.sentence)
        for note in comparison.skipped
    ]
    runs = numbered_runs(comparison, skipped, most_with_anchors=MAX_DETAILED)
    num_points = max(FEWEST_POINTS, min(MOST_POINTS, NUM_POINTS // max(1, len(runs))))
    is_single = len(runs) == 1
    detailed = [one for one in runs if one.anchor]
    every = [details(one, num_points=num_points, has_config=is_single) for one in detailed]
    has_table, texts = bool(comparison.rows) and not is_single, legends(comparison)
    shown = columns(comparison)
    numbers = {one.run.folder: one for one in runs}
    plots = [figure for figure in drawn.values() if not isinstance(figure, str)]
    name = runs[0].name if is_single else ", ".join(path.resolve().name for path in paths[:3])
    left_out = ("columns", "skipped", "loss parity", *(["notes"] if is_single else []))
    return {
        "title": name + (f" and {len(paths) - 3} more" if len(paths) > 3 and not is_single else ""),
        "headline": headline(comparison),
        "paths": tuple(map(str, paths)),
        "date": date_text(time.time()),
        "version": __version__,
        "single": every[0] if is_single else None,
        "main": main_table(comparison, numbers) if has_table else None,
        "legends": tuple({one.title: texts[one.key] for one in shown if one.key in texts}.items()),
        "sections": tuple(
            one for one in sections(comparison, shown) if not one[0].startswith(left_out)
        ),
        "skipped": skipped_table(runs) if not is_single else None,
        "plots": tuple(
            (figure.get_suptitle(), Markup(data_url(figure)))
            for figure in (plots if has_table else ())
        ),
        "scaling": scaling_table(comparison, numbers),
        "parity": parity_table(comparison, numbers),
        "hints": PARITY_HINTS
        if any(one.first_break is not None for one in comparison.parity)
        else (),
        "config": config_table(comparison, numbers) if has_table else None,
        "machines": machines_table(runs) if not is_single else None,
        "details": () if is_single else tuple(every),
        "num_without_details": len(runs) - len(detailed),
    }


def _visible(value: Any) -> Any:
    """Return a value of the template; in a text, what is invisible or turns its direction shows.

    A text of megabytes is cut, and line ends stay. What is markup already comes from this package.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(map(printable, cut(value, MAX_SHOWN).split("\n")))


def _hash(text: str) -> str:
    """Return the hash by which the page's policy allows its own style and script alone.

    As in https://www.w3.org/TR/CSP3/#grammardef-hash-source
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
