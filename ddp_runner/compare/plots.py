"""The plots of a comparison: scaling, loss by step and by time, parts of a step."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ddp_runner.compare.analysis import Comparison, ComparisonRow
from ddp_runner.compare.drawing import (
    COLOURS,
    GREY,
    MARKERS,
    PART_COLOURS,
    STYLE,
    Points,
    draw_bars,
    draw_lines,
    in_short_lines,
    new_figure,
)
from ddp_runner.compare.parity import LOSS
from ddp_runner.compare.settings import BATCH_SIZES, SIZE_KEYS, labels
from ddp_runner.compare.speedup import REST, SCALINGS, parts_ms
from ddp_runner.compare.table import digits
from ddp_runner.metric_names import StepPart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 500  # per line
MAX_BARS = 20

Rows = Mapping[int, ComparisonRow]  # rows of a setting by number of devices


def figures(comparison: Comparison) -> dict[str, "Figure | str"]:
    """Return each plot by name, or the reason why there is no plot."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        if any("plan/peak_gib" in row.stats for row in comparison.rows):
            return {"plan": _plan(comparison)}
        return {
            "scaling": _scaling(comparison),
            "loss_by_step": _loss(comparison, by_time=False),
            "loss_by_time": _loss(comparison, by_time=True),
            "step_parts": _step_parts(comparison),
        }


def _plan(comparison: Comparison) -> "Figure":
    """Return the peak memory and the time of a step over world size, a line per setting."""
    titles = {
        "plan/peak_gib": "peak memory of a rank, GiB",
        "plan/step_ms": "ms of a step if nothing overlaps",
        "plan/step_ms_overlapped": "ms of a step if all overlaps",
    }
    rows = comparison.rows
    shown = [name for name in titles if any(name in row.stats for row in rows)]
    names = labels([*map(_fixed, rows)])
    figure, panels = new_figure("Planned memory and time by world size", num_panels=len(shown))
    for axes, metric in zip(panels, shown, strict=True):
        lines: dict[str, dict[float, float]] = {name: {} for name in names}
        for name, row in zip(names, rows, strict=True):
            if metric in row.stats:
                lines[name][row.runs[0].world_size] = row.stats[metric].mean
        sizes = sorted({size for points in lines.values() for size in points})
        axes.set_xscale("log", base=2)
        draw_lines(axes, [*lines.items()], first="first", xlabel="ranks")
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(titles[metric], loc="left", fontsize=11)
    return figure


def _scaling(comparison: Comparison) -> "Figure | str":
    both = {kind: _scaled(comparison, kind) for kind in SCALINGS}
    kinds = {kind: settings for kind, settings in both.items() if settings}
    if not kinds:
        return "no setting has samples/s for two world sizes; run a sweep with -m world_size=1,2,4"
    figure, panels = new_figure("Speedup by number of devices", num_panels=len(kinds))
    for axes, (kind, settings) in zip(panels, kinds.items(), strict=True):
        lines = [(name, points) for name, points, _ in settings]
        sizes = sorted({x for _, points in lines for x in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for index, start in enumerate(sorted({min(points) for _, points in lines})):
            ends = [start, sizes[-1]], [1, sizes[-1] / start]
            label = None if index else "ideal"
            axes.plot(*ends, color=GREY, linestyle="--", linewidth=1.5, label=label)
        draw_lines(axes, lines, first="fastest", xlabel="devices (on a CPU: ranks)")
        notes: dict[str, None] = {}
        for colour, marker, (_, points, rows) in zip(COLOURS, MARKERS, settings, strict=False):
            marks = _mark_points(axes, points, rows, kind, color=colour, marker=marker)
            notes |= dict.fromkeys(marks)
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        title = f"{kind} scaling: constant {BATCH_SIZES[SCALINGS[kind]]}\n{'; '.join(notes)}"
        axes.set_title(title.strip(), loc="left", fontsize=11)
        axes.set_ylabel("speedup over the baseline")
    return figure


def _fixed(row: ComparisonRow) -> dict[str, Any]:
    """Return the values that all points of a line share: those of the setting without sizes."""
    return {key: value for key, value in row.setting.items() if key not in SIZE_KEYS}


def _scaled(comparison: Comparison, kind: str) -> list[tuple[str, Points, Rows]]:
    """Return the name, points and rows of each line: a setting with several numbers of devices.

    If the lines are many, the fastest come first.
    """
    scaled = [row for row in comparison.rows if kind in row.scalings]
    names = labels([_fixed(row) | {SCALINGS[kind]: row.scalings[kind].batch} for row in scaled])
    settings: dict[str, dict[int, ComparisonRow]] = {}
    for name, row in zip(names, scaled, strict=True):
        settings.setdefault(name, {})[row.runs[0].num_devices] = row
    lines: list[tuple[str, Points, Rows]] = []
    for name, unsorted in settings.items():
        rows = dict(sorted(unsorted.items()))
        first, last = rows[min(rows)].scalings[kind].base_num_devices, max(rows)
        points = {first: 1.0} | {size: row.scalings[kind].speedup for size, row in rows.items()}
        remark = f", {rows[last].speed_remark}" if rows[last].speed_remark else ""
        title = f"{name}: {points[last]:.2f}x ({points[last] * first / last:.0%}){remark}"
        if len(points) > 1:
            lines.append((title, dict(sorted(points.items())), rows))
    if len(lines) > len(COLOURS):
        lines.sort(key=lambda line: -[*line[1].values()][-1])
    return lines


def _mark_points(
    axes: "Axes", points: Points, rows: Rows, kind: str, *, color: str, marker: str
) -> list[str]:
    """Draw predictions, deviations and doubtful speeds of a setting; return a legend of marks."""
    notes = []
    scalings = [(x, row.scalings[kind]) for x, row in rows.items()]
    if predicted := {x: scaling.predicted.speedup for x, scaling in scalings if scaling.predicted}:
        xs, ys = [min(points), *predicted], [1.0, *predicted.values()]
        axes.plot(xs, ys, color=color, linestyle=":", linewidth=2)
        notes.append("dotted: predicted")
    if sds := {x: scaling.speedup_sd for x, scaling in scalings if scaling.speedup_sd is not None}:
        means = [points[x] for x in sds]
        axes.errorbar([*sds], means, [*sds.values()], color=color, fmt="none", capsize=4)
        notes.append("bars: ± standard deviation")
    for x, row in rows.items():
        if row.speed_remark:
            axes.plot([x], [points[x]], marker, color=color, mfc="white", ms=9)
            notes.append("hollow: see warnings")
    return notes


def _loss(comparison: Comparison, *, by_time: bool) -> "Figure | str":
    from matplotlib.ticker import LogLocator, NullLocator

    named = [_losses(row, by_time=by_time) for row in comparison.rows]
    named = [(name, losses) for name, losses in named if losses]
    if not named:
        return f"no run has logged {LOSS}"
    if len(named) > len(COLOURS):  # else keep the table's order: a setting has the same colour
        named.sort(key=lambda item: [*(item[1] if by_time else map(fmean, item[1].values()))][-1])
    figure, (axes,) = new_figure(f"Training loss by {'time' if by_time else 'optimizer step'}")
    lines = [(name, {x: fmean(losses[x]) for x in losses}) for name, losses in named]
    values = [value for _, points in lines for value in points.values()]
    if min(values) > 0 and max(values) / min(values) > 20:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    xlabel = "seconds of training, without start-up" if by_time else "optimizer step"
    draw_lines(axes, lines, first="fastest" if by_time else "lowest", xlabel=xlabel)
    axes.set_ylabel(LOSS)
    axes.locator_params(axis="x", integer=not by_time)
    for colour, (_, losses) in zip(COLOURS, named, strict=False):
        low, high = (list(map(end, losses.values())) for end in (min, max))
        axes.fill_between([*losses], low, high, color=colour, alpha=0.15, linewidth=0)
    if any(len(row.runs) > 1 for row in comparison.rows):
        note = "mean over the runs of a setting; band: from their minimum to their maximum"
        axes.set_title(note, loc="left", fontsize=11)
    return figure


def _losses(row: ComparisonRow, *, by_time: bool) -> tuple[str, dict[float, list[float]]]:
    """Return a row's name, and its runs' losses at their common steps, by step or by mean time."""
    logged = [
        {
            line["step"] or 0: (line["time_s"] or 0, line[LOSS] or 0)
            for line in run.lines
            if line.get(LOSS) is not None
        }
        for run in row.runs
    ]
    steps = sorted(set(logged[0]).intersection(*logged[1:]))
    by_x = {}
    for step in steps[:: math.ceil(len(steps) / MAX_POINTS) or 1]:
        times, losses = zip(*(run[step] for run in logged), strict=True)
        by_x[fmean(times) if by_time else step] = [*losses]
    return f"{row.label}\n{digits([*by_x][-1])} s" if by_time and by_x else row.label, by_x


def _step_parts(comparison: Comparison) -> "Figure | str":
    """Return bars of the parts of each row's step, with the prediction below."""
    bars = []
    for row in comparison.rows:
        if parts := parts_ms(row.stats):
            whole = row.stats.get("perf/step_time_ms")
            rest = max(0.0, (whole.mean if whole else 0.0) - sum(parts.values()))
            predictions = [scaling.predicted for scaling in row.scalings.values()]
            predicted = next((step.parts_ms for step in predictions if step), None)
            bars.append((in_short_lines(row.label), {**parts, REST: rest}, predicted))
    if not bars:
        return "no run has measured the parts of its step time"
    bars = sorted(bars, key=lambda bar: sum(bar[1].values()))[:MAX_BARS]
    names = [name for name in (*StepPart, REST) if any(parts.get(name) for _, parts, _ in bars)]
    colours = dict(zip(names, PART_COLOURS, strict=False))
    colours |= {REST: GREY} if REST in names else {}
    has_predicted = any(predicted for _, _, predicted in bars)
    text = 0.15 + 0.2 * max(1 + name.count("\n") for name, _, _ in bars)
    height = 1.8 + max(0.65 if has_predicted else 0.4, text) * len(bars)
    figure, (axes,) = new_figure("Parts of an optimizer step", height=height)
    axes.set_xlim(0, 1.2 * max(sum(parts.values()) for _, parts, _ in bars))
    offset, size = (-0.15, 0.5) if has_predicted else (0.0, 0.8)
    draw_bars(axes, {y + offset: parts for y, (_, parts, _) in enumerate(bars)}, colours, size)
    if has_predicted:
        below = {y + 0.22: predicted for y, (_, _, predicted) in enumerate(bars) if predicted}
        draw_bars(axes, below, colours, 0.18, word=" predicted")
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("milliseconds per step (median without the first line)")
    figure.legend(loc="outside lower center", ncols=min(len(names), 5), frameon=False)
    return figure
