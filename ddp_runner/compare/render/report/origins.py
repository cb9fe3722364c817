"""The tables of how several runs came about: their configs, their machines and versions."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.render.columns import digits, percent
from ddp_runner.compare.render.report.tables import NumberedRun, Numbers, run_cell
from ddp_runner.compare.render.report.views import (
    NOTHING,
    Cell,
    Table,
    date_text,
    flat,
    setting_text,
    transposed,
    value_cell,
    value_table,
    without_same,
)
from ddp_runner.compare.run import Run, is_finite

MAX_SIDE_BY_SIDE = 8  # settings as columns; more are rows

Pairs = list[tuple[str, str]]


def config_table(comparison: Comparison, numbers: Numbers) -> tuple[Table, Pairs]:
    """Return the keys whose values differ between any two settings, and the pairs that all share.

    Unlike the columns of the comparison, these are all keys: those of the launch, the seed and the
    folder of the data as well. The seeds of the only setting are told apart.
    """
    groups = {f"{at} {row.label}": row.runs for at, row in enumerate(comparison.rows, start=1)}
    if len(groups) == 1:
        runs = comparison.rows[0].runs
        groups = {
            f"{numbers[run.folder].number} {numbers[run.folder].name}": (run,) for run in runs
        }
    keys = dict.fromkeys(key for runs in groups.values() for run in runs for key in run.config)
    columns = {key: [_values(runs, key) for runs in groups.values()] for key in keys}
    table, same = without_same(value_table("All keys that differ", {"run": [*groups], **columns}))
    return transposed(table) if len(groups) <= MAX_SIDE_BY_SIDE else table, same


def machines_table(runs: Sequence[NumberedRun]) -> tuple[Table, Pairs]:
    """Return when, where and on what each run ran, and what is the same for all runs."""
    records = [one.run.record for one in runs]
    versions = [dict(flat("", record.get("versions") or {})) for record in records]
    loads = [dict(flat("", record.get("load") or {})) for record in records]
    titles = dict.fromkeys(name for one in versions for name in one)
    load_titles = dict.fromkeys(name for one in loads for name in one)
    columns: dict[str, Sequence[Any]] = {
        "run": [run_cell(one) for one in runs],
        "status": [record.get("status") for record in records],
        "started": [date_text(record.get("started_at")) for record in records],
        "wall s": [record.get("wall_s") for record in records],
        "sessions": [len(one.run.sessions) for one in runs],
        "restarts": [record.get("restarts") for record in records],
        "hosts": [record.get("hosts") or record.get("host") for record in records],
        "devices": [_counted(record.get("devices")) for record in records],
        "threads": [record.get("num_threads") for record in records],
        **{
            f"load at {name.replace('.', ': ').replace('_', ' ')}": [
                _load(one.get(name), name) for one in loads
            ]
            for name in load_titles
        },
        "git revision": [record.get("git_revision") for record in records],
        **{name: [one.get(name) for one in versions] for name in titles},
    }
    return without_same(value_table("When and where each run ran", columns))


def _values(runs: Sequence[Run], key: str) -> Cell:
    """Return a key's values over some runs, each once."""
    values = [run.config[key] for run in runs if key in run.config]
    texts = dict.fromkeys(setting_text(value) for value in values)
    order = values[0] if len(texts) == 1 and is_finite(values[0]) else None
    text = ", ".join(texts) or NOTHING
    return Cell(text, order=text.lower() if order is None else float(order))


def _counted(names: Any) -> str | None:
    """Return names with how often each occurs: NVIDIA H200 (4)."""
    if not isinstance(names, list):
        return None
    counts = Counter(map(str, names))
    return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in counts.items())


def _load(value: Any, name: str) -> Cell:
    return value_cell(value, number=percent if "share" in name else digits)
