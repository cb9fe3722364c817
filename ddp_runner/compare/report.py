"""The page ``report.html``: a comparison, or one run, as a single file that needs nothing else.

Run folders come from anybody, so every value in them is hostile text: the template engine escapes
it, ``_visible`` makes what is invisible visible, and the page's own policy forbids everything that
is not in the file. No function here builds HTML from values by hand.
"""

import base64
import hashlib
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
from ddp_runner.compare.formats import remarks
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
from ddp_runner.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DETAILED = 100  # runs with details of their own; more would take megabytes and minutes
MAX_SHOWN = 50_000  # characters of any text; a curve and a command are shorter
MIN_FILTERED = 6  # rows; fewer are seen at a glance

Cards = Mapping[Path, Card]  # by the folder of the run


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
    environment.filters["digits"] = digits
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
    detailed = [one for one in cards.values() if one.anchor]
    every = [details(one, is_single=is_single) for one in detailed]
    links = tuple(cards[row.runs[0].folder].anchor for row in comparison.all_rows)
    main = replace(results_table(comparison), links=links)
    has_table = bool(main.labels) and not is_single
    name = "A row for each run" if "seed" in comparison.keys else "A row for each setting"
    names = [path.resolve().name for path in paths]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    left_out = ("columns", "skipped", *(["notes"] if is_single else []))
    plots = [one for one in drawn.values() if has_table and not isinstance(one, str)]
    return {
        "title": detailed[0].name if is_single else ", ".join(names[:3]) + more,
        "headline": main.name,
        "paths": tuple(map(str, paths)),
        "date": date_text(time.time()),
        "version": __version__,
        "single": every[0] if is_single else None,
        "main": replace(main, name=name) if has_table else None,
        "legends": [(one.title, one.hint) for one in main.columns if one.hint],
        "is_filtered": len(main.labels) >= MIN_FILTERED,
        "sections": [one for one in remarks(comparison, main) if not one[0].startswith(left_out)],
        "skipped": None if is_single else _skipped_table(comparison, cards),
        "plots": [(figure.get_suptitle(), Markup(data_url(figure))) for figure in plots],
        "scaling": _scaling_table(main) if has_table else None,
        "parity": _parity_table(comparison, cards),
        "config": _config_table(comparison, cards) if has_table else None,
        "machines": _machines_table([*cards.values()]) if not is_single else None,
        "details": () if is_single else every,
        "num_without_details": len(cards) - len(detailed),
    }


def _cards(comparison: Comparison) -> Cards:
    """Return the runs in the order of their rows, then those in no row."""
    cards = [
        Card(run, f"{place}.{index}" if len(row.runs) > 1 else str(place), row.label)
        for place, row in enumerate(comparison.all_rows, start=1)
        for index, run in enumerate(row.runs, start=1)
    ]
    known = {one.run.folder for one in cards}
    others = [note for note in comparison.skipped if note.run.folder not in known]
    cards += [
        Card(replace(note.run, reason=note.sentence), f"s{place}")
        for place, note in enumerate(others, start=1)
    ]
    if len(cards) <= MAX_DETAILED:
        cards = [replace(one, anchor=f"run-{one.number.replace('.', '-')}") for one in cards]
    return {one.run.folder: one for one in cards}


def _skipped_table(comparison: Comparison, cards: Cards) -> Table:
    skipped = [(cards[note.run.folder], note.sentence) for note in comparison.skipped]
    why = {"run": [one.title for one, _ in skipped], "why": [why for _, why in skipped]}
    links = [one.anchor for one, _ in skipped]
    return values_table("Runs that are not compared", why, links=links)


def _scaling_table(main: Table) -> Table | None:
    """Return the settings and speedups of the main table; None if it has no speedups."""
    speeds = [one for one in main.columns if one.key.startswith(("strong_", "weak_"))]
    settings = [one for one in main.columns if one.is_key or one.key in ("setting", "num_devices")]
    settings = [one for one in settings if one.is_brief or one.key == "num_devices"]
    columns = tuple(replace(one, is_brief=True) for one in (*settings, *speeds))
    return replace(main, name="Speedup and efficiency", columns=columns) if speeds else None


def _parity_table(comparison: Comparison, cards: Cards) -> Table:
    """Return how the losses of each run differ from its reference's."""
    runs = [cards[one.run.folder] for one in comparison.parity]
    return values_table(
        "Losses beside those of the simplest mode on the fewest ranks",
        {
            "run": [one.title for one in runs],
            "setting": [one.label for one in runs],
            "seed": [one.run.seed for one in runs],
            "reference": [cards[one.reference.folder].title for one in comparison.parity],
            "steps": [one.num_steps for one in comparison.parity],
            "largest difference": [one.largest for one in comparison.parity],
            "verdict": [one.verdict for one in comparison.parity],
        },
        show={"largest difference": "{:.2%}".format},
        links=[one.anchor for one in runs],
    )


def _config_table(comparison: Comparison, cards: Cards) -> tuple[Table, list[tuple[str, str]]]:
    """Return a row for each key whose values differ, and the keys and values that all share.

    Unlike the columns of the comparison, these are all keys: those of the launch, the seed and the
    folder of the data as well. The seeds of the only setting are told apart.
    """
    rows = comparison.all_rows
    groups = {f"{place} {row.label}": row.runs for place, row in enumerate(rows, start=1)}
    if len(groups) == 1:
        groups = {cards[run.folder].title: (run,) for run in rows[0].runs}
    keys = dict.fromkeys(key for runs in groups.values() for run in runs for key in run.config)
    values = {key: [_setting(runs, key) for runs in groups.values()] for key in keys}
    differing = {key: texts for key, texts in values.items() if len(set(texts)) > 1}
    columns = zip(*differing.values(), strict=True) if differing else ()
    by_group = dict(zip(groups, columns, strict=bool(differing)))
    same = [(key, texts[0]) for key, texts in values.items() if key not in differing]
    return values_table("All keys that differ", {"key": [*differing], **by_group}), same


def _setting(runs: Sequence[RecordedRun], key: str) -> str:
    """Return a key's values over some runs, each once."""
    texts = dict.fromkeys(setting_text(run.config[key]) for run in runs if key in run.config)
    return ", ".join(texts) or NOTHING


def _machines_table(cards: Sequence[Card]) -> tuple[Table, list[tuple[str, str]]]:
    """Return when, where and on what each run ran, and what is the same for all runs."""
    records = [one.run.record for one in cards]
    nested = [dict(leaves({key: one.get(key) for key in ("load", "versions")})) for one in records]
    names = dict.fromkeys(key for one in nested for key in one)
    table = values_table(
        "When and where each run ran",
        {
            "run": [one.title for one in cards],
            "status": [one.get("status") for one in records],
            "started": [date_text(one.get("started_at")) for one in records],
            "wall s": [one.get("wall_s") for one in records],
            "sessions": [len(one.run.sessions) for one in cards],
            "restarts": [one.get("restarts") for one in records],
            "hosts": [one.get("hosts") or one.get("host") for one in records],
            "devices": [_counted(one.get("devices")) for one in records],
            "threads": [one.get("num_threads") for one in records],
            "git revision": [one.get("git_revision") for one in records],
            **{key.removeprefix("versions."): [one.get(key) for one in nested] for key in names},
        },
        show={key: percent for key in names if "share" in key},
        links=[one.anchor for one in cards],
    )
    texts = [{table.text(one, row) for row in range(len(cards))} for one in table.columns]
    both = [*zip(table.columns, texts, strict=True)]
    columns = tuple(one for one, found in both if len(found) > 1)
    same = [(one.title, found.pop()) for one, found in both if len(found) == 1]
    return replace(table, columns=columns), [pair for pair in same if pair[1] != NOTHING]


def _counted(names: Any) -> str | None:
    """Return names with how often each occurs: NVIDIA H200 (4)."""
    counts = Counter(map(str, names)) if isinstance(names, list) else {}
    words = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
    return ", ".join(words) or None


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
