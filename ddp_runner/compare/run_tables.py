"""The report's tables beside that of the comparison: scaling, parity, settings, machines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.cards import Card, date_text, flat
from ddp_runner.compare.run import Run, Stat
from ddp_runner.compare.table import (
    NOTHING,
    Table,
    digits,
    percent,
    setting_text,
    times,
    transposed,
    values_table,
    without_same,
)

MAX_SIDE_BY_SIDE = 8  # settings as columns; more are rows

Cards = Mapping[Path, Card]  # by the folder of the run


def scaling_table(comparison: Comparison, cards: Cards) -> Table:
    """Return speedups and efficiencies with what they are relative to."""
    lines = [
        (place, row, kind, scaling)
        for place, row in enumerate(comparison.rows, start=1)
        for kind, scaling in row.scalings.items()
    ]
    predicted = [row.predicted.get(kind) for _, row, kind, _ in lines]
    return values_table(
        "Speedup and efficiency",
        {
            "#": [place for place, *_ in lines],
            "setting": [row.label for _, row, *_ in lines],
            "scaling": [kind for *_, kind, _ in lines],
            "batch": [one.batch for *_, one in lines],
            "devices": [row.runs[0].num_devices for _, row, *_ in lines],
            "against": [one.base for *_, one in lines],
            "speedup": [Stat(one.speedup, one.speedup_sd, 1) for *_, one in lines],
            "efficiency": [one.efficiency for *_, one in lines],
            "predicted": [one and one.speedup for one in predicted],
        },
        show={"speedup": times, "efficiency": percent, "predicted": times},
        links=[cards[row.runs[0].folder].anchor for _, row, *_ in lines],
    )


def parity_table(comparison: Comparison, cards: Cards) -> Table:
    """Return how the losses of each run differ from its reference's."""
    runs = [cards[one.run.folder] for one in comparison.parity]
    return values_table(
        "Losses beside those of the simplest mode on the fewest ranks",
        {
            "run": [one.title for one in runs],
            "setting": [one.label for one in runs],
            "seed": [one.run.seed for one in comparison.parity],
            "reference": [cards[one.reference.folder].title for one in comparison.parity],
            "steps": [one.num_steps for one in comparison.parity],
            "largest difference": [one.largest for one in comparison.parity],
            "verdict": [one.verdict for one in comparison.parity],
        },
        show={"largest difference": "{:.2%}".format},
        links=[one.anchor for one in runs],
    )


def config_table(comparison: Comparison, cards: Cards) -> tuple[Table, list[tuple[str, str]]]:
    """Return the keys whose values differ between any two settings, and the pairs that all share.

    Unlike the columns of the comparison, these are all keys: those of the launch, the seed and the
    folder of the data as well. The seeds of the only setting are told apart.
    """
    rows = [*comparison.rows, *comparison.ran_out]
    groups = {f"{place} {row.label}": row.runs for place, row in enumerate(rows, start=1)}
    if len(groups) == 1:
        groups = {cards[run.folder].title: (run,) for run in rows[0].runs}
    keys = dict.fromkeys(key for runs in groups.values() for run in runs for key in run.config)
    columns = {key: [_setting(runs, key) for runs in groups.values()] for key in keys}
    whole = values_table("All keys that differ", {"run": [*groups], **columns})
    shown, same = without_same(whole)
    return transposed(shown, head="key") if len(groups) <= MAX_SIDE_BY_SIDE else shown, same


def _setting(runs: Sequence[Run], key: str) -> str:
    """Return a key's values over some runs, each once."""
    texts = dict.fromkeys(setting_text(run.config[key]) for run in runs if key in run.config)
    return ", ".join(texts) or NOTHING


def machines_table(runs: Sequence[Card]) -> tuple[Table, list[tuple[str, str]]]:
    """Return when, where and on what each run ran, and what is the same for all runs."""
    records = [one.run.record for one in runs]
    versions = [flat(record.get("versions") or {}) for record in records]
    loads = [flat(record.get("load") or {}) for record in records]
    of_load = {key: key.replace(".", ": ").replace("_", " ") for one in loads for key in one}
    titles = dict.fromkeys(name for one in versions for name in one)
    columns: dict[str, Sequence[Any]] = {
        "run": [one.title for one in runs],
        "status": [record.get("status") for record in records],
        "started": [date_text(record.get("started_at")) for record in records],
        "wall s": [record.get("wall_s") for record in records],
        "sessions": [len(one.run.sessions) for one in runs],
        "restarts": [record.get("restarts") for record in records],
        "hosts": [record.get("hosts") or record.get("host") for record in records],
        "devices": [_counted(record.get("devices")) for record in records],
        "threads": [record.get("num_threads") for record in records],
        **{f"load at {name}": [one.get(key) for one in loads] for key, name in of_load.items()},
        "git revision": [record.get("git_revision") for record in records],
        **{name: [one.get(name) for one in versions] for name in titles},
    }
    show = {f"load at {one}": percent if "share" in one else digits for one in of_load.values()}
    links = [one.anchor for one in runs]
    return without_same(
        values_table("When and where each run ran", columns, show=show, links=links)
    )


def _counted(names: Any) -> str | None:
    """Return names with how often each occurs: NVIDIA H200 (4)."""
    counts = Counter(map(str, names)) if isinstance(names, list) else {}
    words = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
    return ", ".join(words) or None
