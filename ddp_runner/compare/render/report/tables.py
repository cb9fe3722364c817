"""The tables of what several runs measured: the results, scaling, parity, and who is left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.render.columns import Column, columns, legends, percent, times
from ddp_runner.compare.render.report.views import (
    MAX_CHOICES,
    NOTHING,
    Cell,
    Head,
    Table,
    value_cell,
    value_table,
)
from ddp_runner.compare.render.tables import cell_text
from ddp_runner.compare.rows import ComparisonRow
from ddp_runner.compare.run import Run, Stat, is_finite
from ddp_runner.metric_names import best_end

MIN_FILTERED = 6  # rows; fewer are seen at a glance
COSTS_S = ("startup_s", "wall_s", "time_to_target_s")


@dataclass(frozen=True)
class NumberedRun:
    """A run and how the report refers to it."""

    run: Run
    number: str  # 3 for the only run of the third row, 3.2 for its second, s1 for a skipped run
    row: ComparisonRow | None  # None: skipped
    anchor: str = ""  # the id of its details in the page; empty: it has none

    @property
    def name(self) -> str:
        """Its folder without the folders above."""
        return self.run.folder.resolve().name or str(self.run.folder)


Numbers = Mapping[Path, NumberedRun]  # by the folder of the run


def numbered_runs(
    comparison: Comparison, skipped: Sequence[Run], *, most_with_anchors: int
) -> list[NumberedRun]:
    """Return the runs in the order of their rows, then those in no row."""
    runs = [
        NumberedRun(run, f"{place}.{index}" if len(row.runs) > 1 else str(place), row)
        for place, row in enumerate(comparison.rows, start=1)
        for index, run in enumerate(row.runs, start=1)
    ]
    runs += [NumberedRun(run, f"s{place}", None) for place, run in enumerate(skipped, start=1)]
    if len(runs) > most_with_anchors:
        return runs
    return [replace(one, anchor=f"run-{one.number.replace('.', '-')}") for one in runs]


def main_table(comparison: Comparison, numbers: Numbers) -> Table:
    """Return the table of the comparison with all its columns."""
    rows, texts = comparison.rows, legends(comparison)
    directions = {
        name: end for row in rows for run in row.runs for name, end in run.directions.items()
    }
    heads = [Head("#", is_number=True, hint="number of the row")]
    cells = [_row_numbers(rows, numbers)]
    for column in columns(comparison):
        is_key = column.key in comparison.keys
        made = [_cell(column, row) for row in rows]
        cells.append(made if is_key else _best_marked(made, column.key, rows, directions))
        distinct = dict.fromkeys(cell.text for cell in sorted(made, key=_by_order))
        has_choices = is_key and 1 < len(distinct) <= MAX_CHOICES
        heads.append(
            Head(
                column.title,
                is_number=any(isinstance(cell.order, float) for cell in made),
                is_brief=column.is_brief,
                hint=texts.get(column.key, ""),
                choices=tuple(distinct) if has_choices else (),
            )
        )
    name = "A row for each run" if "seed" in comparison.keys else "A row for each setting"
    filtered = len(rows) if len(rows) >= MIN_FILTERED else 0
    return Table(name, tuple(heads), tuple(zip(*cells, strict=True)), filtered)


def scaling_table(comparison: Comparison, numbers: Numbers) -> Table | None:
    """Return speedups and efficiencies with what they are relative to; None if there are none."""
    lines = [
        (place, row, kind, scaling, row.predicted.get(kind))
        for place, row in enumerate(comparison.rows)
        for kind, scaling in row.scalings.items()
    ]
    if not lines:
        return None
    places = _row_numbers(comparison.rows, numbers)
    return value_table(
        "Speedup and efficiency",
        {
            "#": [places[n] for n, *_ in lines],
            "setting": [row.label for _, row, *_ in lines],
            "scaling": [kind for _, _, kind, *_ in lines],
            "batch": [s.batch for *_, s, _ in lines],
            "devices": [row.num_devices for _, row, *_ in lines],
            "against": [s.base for *_, s, _ in lines],
            "speedup": [_with_sd(s.speedup, s.speedup_sd) for *_, s, _ in lines],
            "efficiency": [value_cell(s.efficiency, number=percent) for *_, s, _ in lines],
            "predicted": [value_cell(p and p.speedup, number=times) for *_, p in lines],
        },
    )


def skipped_table(runs: Sequence[NumberedRun]) -> Table | None:
    """Return why runs are in no row; None if all are in one."""
    skipped = [one for one in runs if one.row is None]
    if not skipped:
        return None
    return value_table(
        "Runs that are not compared",
        {"run": [run_cell(one) for one in skipped], "why": [one.run.reason for one in skipped]},
    )


def parity_table(comparison: Comparison, numbers: Numbers) -> Table | None:
    """Return how the losses of each run differ from its reference's; None without references."""
    if not comparison.parity:
        return None
    rows = [numbers[one.run.folder].row for one in comparison.parity]
    return value_table(
        "Losses beside those of the simplest mode on the fewest ranks",
        {
            "run": [run_cell(numbers[one.run.folder]) for one in comparison.parity],
            "setting": [row.label if row else NOTHING for row in rows],
            "seed": [one.run.seed for one in comparison.parity],
            "reference": [run_cell(numbers[one.reference.folder]) for one in comparison.parity],
            "steps": [one.num_steps for one in comparison.parity],
            "largest difference": [
                value_cell(one.largest, number="{:.2%}".format) for one in comparison.parity
            ],
            "verdict": [one.verdict for one in comparison.parity],
        },
    )


def _row_numbers(rows: Sequence[ComparisonRow], numbers: Numbers) -> list[Cell]:
    return [
        Cell(str(number), order=float(number), link=numbers[row.runs[0].folder].anchor)
        for number, row in enumerate(rows, start=1)
    ]


def run_cell(one: NumberedRun) -> Cell:
    """Return a cell with a run's number and name, which leads to its details."""
    return Cell(f"{one.number} {one.name}", order=one.name.lower(), link=one.anchor)


def _with_sd(mean: float, sd: float | None) -> Cell:
    return Cell(times(mean), "" if sd is None else f" ± {sd:.2f}", order=mean)


def _best_marked(
    cells: Sequence[Cell], key: str, rows: Sequence[ComparisonRow], directions: Mapping[str, str]
) -> list[Cell]:
    """Return the cells of a column, with its best value marked; a doubtful speed is not the best.

    Where all values are equal, none is.
    """
    is_speed = "/" not in key or key.startswith("perf/")
    numbers = {
        cell.order
        for cell, row in zip(cells, rows, strict=True)
        if isinstance(cell.order, float) and not (is_speed and row.speed_remark)
    }
    end = _best_end(key, directions)
    if end is None or len(numbers) < 2:
        return [*cells]
    best = max(numbers) if end == "max" else min(numbers)
    return [replace(cell, is_best=cell.order == best) for cell in cells]


def _best_end(key: str, directions: Mapping[str, str]) -> str | None:
    """Return whether the highest (max) or lowest (min) value of a column is best; None: neither."""
    if key in COSTS_S:
        return "min"
    if key.endswith("_speedup"):
        return "max"
    return best_end(key, directions) or best_end(f"perf/{key}", directions)


def _cell(column: Column, row: ComparisonRow) -> Cell:
    value = column.cell(row)
    if value is None:
        return Cell(NOTHING)
    text, order = cell_text(column, row), value.mean if isinstance(value, Stat) else value
    if isinstance(order, bool) or not is_finite(order):
        return Cell(text, order=str(order).lower())
    mean, sign, spread = text.partition(" ")
    return Cell(mean, sign + spread, float(order))


def _by_order(cell: Cell) -> tuple[bool, float, str]:
    """Return a key that sorts numbers by value, then texts."""
    order = cell.order
    return (False, order, "") if isinstance(order, float) else (True, 0.0, cell.text)
