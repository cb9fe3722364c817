"""The plots of a comparison: scaling, loss by step and by time, parts of a step.

``drawing`` decides how they look.
"""

import base64
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.parity import LOSS
from ddp_runner.compare.render.columns import digits
from ddp_runner.compare.render.drawing import COLOURS, STYLE, Line, draw_lines, new_figure
from ddp_runner.compare.render.step_parts import step_parts
from ddp_runner.compare.rows import ComparisonRow, Scaling
from ddp_runner.compare.settings import BATCH_PER_RANK, BATCH_SIZES, GLOBAL_BATCH, labels
from ddp_runner.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 500  # of a line


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


def write_plots(drawn: Mapping[str, "Figure | str"], folder: Path) -> list[str]:
    """Write each plot as PNG and SVG into a folder; return a line for each, or why it lacks."""
    from matplotlib import rc_context

    lines = []
    for name, figure in drawn.items():
        if isinstance(figure, str):
            lines.append(f"no plot {name}: {figure}")
            continue
        with rc_context(STYLE):
            figure.savefig(folder / f"{name}.png", dpi=150)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        lines.append(f"wrote {folder / name}.png and .svg")
    return lines


def data_url(figure: "Figure") -> str:
    """Return a plot as SVG without a background, in a data: URL, for a page that loads nothing."""
    from matplotlib import rc_context

    # A page that is passed on has no address in it.
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    file = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _scaling(comparison: Comparison) -> "Figure | str":
    both = {kind: _scaling_lines(comparison, kind) for kind in ("strong", "weak")}
    kinds = {kind: lines for kind, lines in both.items() if lines}
    if not kinds:
        return "no setting has samples/s for two world sizes; run a sweep with -m world_size=1,2,4"
    are_ranks = all(row.num_devices == row.world_size for row in comparison.rows)
    unit = "ranks" if are_ranks else "devices"
    figure, panels = new_figure(f"Speedup by number of {unit}", num_panels=len(kinds))
    for axes, (kind, lines) in zip(panels, kinds.items(), strict=True):
        sizes = sorted({x for line in lines for x in line.xs})
        ideal = [
            Line("ideal", [base, sizes[-1]], [1, sizes[-1] / base])
            for base in sorted({line.xs[0] for line in lines})
        ]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        xlabel = "world size (ranks)" if are_ranks else unit
        draw_lines(axes, lines, first="fastest", xlabel=xlabel, ideal=ideal)
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        constant = "global batch" if kind == "strong" else "batch per rank"
        notes = ["dotted: predicted"] if any(line.predicted for line in lines) else []
        notes += ["bars: ± standard deviation"] if any(line.errors for line in lines) else []
        notes += ["hollow: see warnings"] if any(line.doubtful for line in lines) else []
        title = f"{kind} scaling: constant {constant}\n{'; '.join(notes)}".strip()
        axes.set_title(title, loc="left", fontsize=11)
        bases = {line.base for line in lines}
        base = printable(bases.pop()) if len(bases) == 1 else "the baseline"
        axes.set_ylabel(f"speedup over {base}")
    return figure


def _scaling_lines(comparison: Comparison, kind: str) -> list[Line]:
    """Return a line for each setting with several numbers of devices; the first are coloured."""
    sizes = ("world_size", "num_devices", *BATCH_SIZES)
    keys = [key for key in comparison.keys if key not in sizes]
    scaled = [(row, row.scalings[kind]) for row in comparison.rows if kind in row.scalings]
    if len({scaling.batch for _, scaling in scaled}) > 1:
        keys.append(GLOBAL_BATCH if kind == "strong" else BATCH_PER_RANK)
    whole = [
        {**row.setting, **dict.fromkeys(BATCH_SIZES, scaling.batch)} for row, scaling in scaled
    ]
    names = labels([{key: one.get(key) for key in keys} for one in whole])
    settings: dict[str, dict[float, tuple[ComparisonRow, Scaling]]] = {}
    for name, (row, scaling) in zip(names, scaled, strict=True):
        settings.setdefault(name, {})[row.num_devices] = row, scaling
    lines = []
    for name, rows in settings.items():
        _, base = next(iter(rows.values()))
        speedups: dict[float, float] = {base.base_num_devices: 1.0}
        speedups |= {size: scaling.speedup for size, (_, scaling) in rows.items()}
        if len(speedups) == 1:
            continue
        xs = sorted(speedups)
        predictions = {size: row.predicted.get(kind) for size, (row, _) in rows.items()}
        predicted = {size: one.speedup for size, one in predictions.items() if one is not None}
        predicted |= {xs[0]: predicted.get(xs[0], 1.0)} if predicted else {}
        remarks = {size: row.speed_remark for size, (row, _) in rows.items() if row.speed_remark}
        last = xs[-1]
        words = f"{name}: {speedups[last]:.2f}x ({speedups[last] / (last / xs[0]):.0%})"
        lines.append(
            Line(
                name=f"{words}, {remarks[last]}" if last in remarks else words,
                xs=xs,
                ys=[speedups[x] for x in xs],
                base=base.base,
                predicted=_at(xs, predicted),
                errors=_at(xs, {size: scaling.speedup_sd for size, (_, scaling) in rows.items()}),
                doubtful=list(remarks),
            )
        )
    return sorted(lines, key=lambda line: -line.ys[-1]) if len(lines) > len(COLOURS) else lines


def _at(xs: Sequence[float], values: Mapping[float, float | None]) -> list[float]:
    """Return the value at each x, nan for None; an empty list if all values are None."""
    known = {x: value for x, value in values.items() if value is not None}
    return [known.get(x, math.nan) for x in xs] if known else []


def _loss(comparison: Comparison, *, by_time: bool) -> "Figure | str":
    from matplotlib.ticker import LogLocator, NullLocator

    lines = [line for row in comparison.rows if (line := _loss_line(row, by_time=by_time))]
    if not lines:
        return f"no run has logged {LOSS}"
    if by_time:
        title, first, xlabel = "time", "fastest", "seconds of training, without start-up"
    else:
        title, first, xlabel = "optimizer step", "lowest", "optimizer step"
    if len(lines) > len(COLOURS):  # else the table's order gives a setting one colour everywhere
        lines.sort(key=lambda line: (line.xs if by_time else line.ys)[-1])
    figure, (axes,) = new_figure(f"Training loss by {title}")
    values = [value for line in lines for value in line.ys]
    if min(values) > 0 and max(values) / min(values) > 20:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    draw_lines(axes, lines, first=first, xlabel=xlabel)
    axes.set_ylabel(LOSS)
    axes.locator_params(axis="x", integer=not by_time)
    if any(line.low for line in lines):
        note = "mean over the runs of a setting; band: from their minimum to their maximum"
        axes.set_title(note, loc="left", fontsize=11)
    return figure


def _loss_line(row: ComparisonRow, *, by_time: bool) -> Line | None:
    """Return the mean over a row's runs at the steps that all of them have logged."""
    points = [
        {
            line["step"] or 0: (line["time_s"] or 0, loss)
            for line in run.lines
            if (loss := line.get(LOSS)) is not None
        }
        for run in row.runs
    ]
    steps = sorted(set(points[0]).intersection(*points[1:]))
    steps = steps[:: math.ceil(len(steps) / MAX_POINTS) or 1]
    if not steps:
        return None
    times = [statistics.fmean(run[step][0] for run in points) for step in steps]
    losses = [[run[step][1] for run in points] for step in steps]
    has_band = len(row.runs) > 1
    return Line(
        name=f"{row.label}\n{digits(times[-1])} s" if by_time else row.label,
        xs=times if by_time else steps,
        ys=[statistics.fmean(values) for values in losses],
        low=[min(values) for values in losses] if has_band else (),
        high=[max(values) for values in losses] if has_band else (),
    )
