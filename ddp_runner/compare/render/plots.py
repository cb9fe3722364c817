"""A comparison as plots: scaling, loss by step and by time, what a step's time goes into.

How they look is in ``drawing``.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.curves import scaling_series
from ddp_runner.compare.parity import LOSS
from ddp_runner.compare.render.columns import digits
from ddp_runner.compare.render.drawing import (
    STYLE,
    Line,
    draw_lines,
    new_figure,
    plain_log_ticks,
)
from ddp_runner.compare.render.step_parts import step_parts
from ddp_runner.compare.rows import Row
from ddp_runner.compare.run import Run
from ddp_runner.compare.settings import label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 500  # of a line


def figures(comparison: Comparison) -> dict[str, "Figure | str"]:
    """Return each plot by name, or why there is none."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        return {
            "scaling": _scaling(comparison),
            "loss_by_step": _loss(comparison, by_time=False),
            "loss_by_time": _loss(comparison, by_time=True),
            "step_parts": step_parts(comparison),
        }


def write_plots(comparison: Comparison, folder: Path) -> list[str]:
    """Write each plot as PNG and SVG into a folder; return a line about each."""
    from matplotlib import rc_context

    lines = []
    for name, figure in figures(comparison).items():
        if isinstance(figure, str):
            lines.append(f"no plot {name}: {figure}")
            continue
        with rc_context(STYLE):
            figure.savefig(folder / f"{name}.png", dpi=150)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        lines.append(f"wrote {folder / name}.png and .svg")
    return lines


def _scaling(comparison: Comparison) -> "Figure | str":
    kinds = {kind: _scaling_lines(comparison, kind) for kind in ("strong", "weak")}
    kinds = {kind: lines for kind, lines in kinds.items() if lines}
    if not kinds:
        return "no setting has samples/s at two world sizes; sweep with -m world_size=1,2,4"
    are_ranks = all(row.num_devices == row.world_size for row in comparison.rows)
    what = "ranks" if are_ranks else "devices"
    figure, panels = new_figure(f"Speedup by number of {what}", num_panels=len(kinds))
    for axes, (kind, lines) in zip(panels, kinds.items(), strict=True):
        sizes = sorted({x for line in lines for x in line.xs})
        smallest = {line.xs[0] for line in lines}
        ideal = [
            Line("ideal", [base, sizes[-1]], [1, sizes[-1] / base]) for base in sorted(smallest)
        ]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        draw_lines(
            axes,
            lines,
            first="fastest",
            xlabel="world size (ranks)" if are_ranks else what,
            ideal=ideal,
            is_ragged=len({line.xs[-1] for line in lines}) > 1,
        )
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        batch = {"strong": "one global batch", "weak": "one batch per rank"}[kind]
        notes = ["dotted: as predicted"] if any(line.predicted for line in lines) else []
        notes += ["bars: ± standard deviation"] if any(line.errors for line in lines) else []
        notes += ["hollow: see take care"] if any(line.doubtful for line in lines) else []
        axes.set_title("; ".join([f"{kind} scaling: {batch}", *notes]), loc="left", fontsize=11)
        bases = {line.base for line in lines}
        axes.set_ylabel(f"speedup over {bases.pop() if len(bases) == 1 else 'the baseline'}")
    return figure


def _scaling_lines(comparison: Comparison, kind: str) -> list[Line]:
    """Return a line for each setting aside from its devices, the fastest at its end first."""
    lines = []
    for one in scaling_series(comparison, kind):
        xs, ys = list(one.speedups), list(one.speedups.values())
        text = f"{one.name}: {ys[-1]:.2f}x ({ys[-1] / (xs[-1] / xs[0]):.0%})"
        if xs[-1] in one.remarks:
            text += f", {one.remarks[xs[-1]]}"
        predicted = [one.predicted.get(x, math.nan) for x in xs] if one.predicted else []
        errors = [one.spreads.get(x, math.nan) for x in xs] if one.spreads else []
        line = Line(text, xs, ys, base=one.base, predicted=predicted, errors=errors)
        lines.append(replace(line, doubtful=list(one.remarks)))
    return sorted(lines, key=lambda line: -line.ys[-1])


def _loss(comparison: Comparison, *, by_time: bool) -> "Figure | str":
    found = [_loss_line(row, comparison.keys, by_time=by_time) for row in comparison.rows]
    lines = [line for line in found if line is not None]
    if not lines:
        return f"no run has lines of {LOSS}"
    if by_time:
        lines.sort(key=lambda line: line.xs[-1])
    else:
        lines = _alike(sorted(lines, key=lambda line: line.ys[-1]), comparison.tolerance)
    figure, (axes,) = new_figure(f"Training loss by {'time' if by_time else 'optimizer step'}")
    values = [value for line in lines for value in line.ys]
    if min(values) > 0 and max(values) / min(values) > 20:
        plain_log_ticks(axes)
    first, xlabel = ("lowest", "optimizer step")
    if by_time:
        first, xlabel = ("fastest", "seconds of training, start-up left out")
    draw_lines(axes, lines, first=first, xlabel=xlabel, is_ragged=by_time)
    axes.set_ylabel(LOSS)
    axes.locator_params(axis="x", integer=not by_time)
    if any(line.low for line in lines):
        note = "the mean over a setting's runs; band: from the least to the most of them"
        axes.set_title(note, loc="left", fontsize=11)
    return figure


def _alike(lines: Sequence[Line], tolerance: float) -> list[Line]:
    """Return the lines with those that lie on each other, as parity demands, as one."""
    groups: list[list[Line]] = []
    for line in lines:
        for group in groups:
            same_steps = line.xs == group[0].xs
            pairs = zip(line.ys, group[0].ys, strict=False)
            if same_steps and all(math.isclose(*pair, rel_tol=tolerance) for pair in pairs):
                group.append(line)
                break
        else:
            groups.append([line])
    return [
        replace(group[0], name="\n".join([line.name for line in group[:3]] + _rest(group)))
        for group in groups
    ]


def _rest(group: Sequence[Line]) -> list[str]:
    return [f"and {len(group) - 3} more alike"] if len(group) > 3 else []


def _loss_line(row: Row, keys: Sequence[str], *, by_time: bool) -> Line | None:
    """Return the mean over a row's runs at the steps that all have logged."""
    points = [_losses(run) for run in row.runs]
    steps = sorted(set(points[0]).intersection(*points[1:]))
    steps = steps[:: math.ceil(len(steps) / MOST_POINTS) or 1]
    if not steps:
        return None
    times = [statistics.fmean(one[step][0] for one in points) for step in steps]
    values = [[one[step][1] for one in points] for step in steps]
    has_band, name = len(row.runs) > 1, label(row.setting, keys)
    return Line(
        name=f"{name}\n{digits(times[-1])} s" if by_time else name,
        xs=times if by_time else steps,
        ys=[statistics.fmean(one) for one in values],
        low=[min(one) for one in values] if has_band else (),
        high=[max(one) for one in values] if has_band else (),
    )


def _losses(run: Run) -> dict[float, tuple[float, float]]:
    """Return the time and the loss of each step with a finite loss."""
    return {
        line["step"] or 0: (line["time_s"] or 0, loss)
        for line in run.lines
        if (loss := line.get(LOSS)) is not None
    }
