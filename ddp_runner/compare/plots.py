"""The plots of a comparison: scaling, loss by step and by time, parts of a step.

``drawing`` decides how they look.
"""

import base64
import io
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_runner.compare.analysis import Comparison, ComparisonRow
from ddp_runner.compare.drawing import (
    COLOURS,
    GREY,
    PART_COLOURS,
    STYLE,
    Line,
    draw_bars,
    draw_lines,
    new_figure,
    wrapped,
)
from ddp_runner.compare.parity import LOSS
from ddp_runner.compare.settings import BATCH_SIZES, labels
from ddp_runner.compare.speedup import REST, Scaling, parts_ms
from ddp_runner.compare.table import digits
from ddp_runner.errors import printable
from ddp_runner.metric_names import StepPart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 500  # of a line
MAX_BARS = 20


def figures(comparison: Comparison) -> dict[str, "Figure | str"]:
    """Return each plot by name, or why there is none."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        return {
            "scaling": _scaling(comparison),
            "loss_by_step": _loss(comparison, by_time=False),
            "loss_by_time": _loss(comparison, by_time=True),
            "step_parts": _step_parts(comparison),
        }


def write_plots(drawn: Mapping[str, "Figure | str"], folder: Path) -> list[str]:
    """Write each plot as PNG and SVG into a folder; return a line for each, or why it lacks."""
    lines = []
    for name, figure in drawn.items():
        if isinstance(figure, str):
            lines.append(f"no plot {name}: {figure}")
            continue
        (folder / f"{name}.png").write_bytes(_saved(figure, dpi=150))
        svg = _saved(figure, format="svg", metadata={"Date": None})
        (folder / f"{name}.svg").write_bytes(svg)
        lines.append(f"wrote {folder / name}.png and .svg")
    return lines


def data_url(figure: "Figure") -> str:
    """Return a plot as SVG without a background, in a data: URL, for a page that loads nothing."""
    # A page that is passed on has no address in it.
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    svg = _saved(figure, format="svg", transparent=True, metadata=metadata)
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _saved(figure: "Figure", **options: Any) -> bytes:
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(file, **options)
    return file.getvalue()


def _scaling(comparison: Comparison) -> "Figure | str":
    both = {kind: _scaling_lines(comparison, kind) for kind in ("strong", "weak")}
    kinds = {kind: lines for kind, lines in both.items() if lines}
    if not kinds:
        return "no setting has samples/s for two world sizes; run a sweep with -m world_size=1,2,4"
    runs = [row.runs[0] for row in comparison.rows]
    unit = "ranks" if all(one.num_devices == one.world_size for one in runs) else "devices"
    figure, panels = new_figure(f"Speedup by number of {unit}", num_panels=len(kinds))
    for axes, (kind, lines) in zip(panels, kinds.items(), strict=True):
        sizes = sorted({x for line in lines for x in line.xs})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for index, base in enumerate(sorted({line.xs[0] for line in lines})):
            axes.plot(
                [base, sizes[-1]],
                [1, sizes[-1] / base],
                color=GREY,
                linestyle="--",
                linewidth=1.5,
                label=None if index else "ideal",
            )
        xlabel = "world size (ranks)" if unit == "ranks" else unit
        draw_lines(axes, lines, first="fastest", xlabel=xlabel)
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
        axes.set_ylabel(
            f"speedup over {printable(bases.pop()) if len(bases) == 1 else 'the baseline'}"
        )
    return figure


def _scaling_lines(comparison: Comparison, kind: str) -> list[Line]:
    """Return a line for each setting with several numbers of devices; the first are coloured."""
    sizes = ("world_size", "num_devices", *BATCH_SIZES)
    scaled = [(row, row.scalings[kind]) for row in comparison.rows if kind in row.scalings]
    keys = [key for key in comparison.keys if key not in sizes]
    batch = BATCH_SIZES[kind == "weak"]
    keys += [batch] if len({scaling.batch for _, scaling in scaled}) > 1 else []
    wholes = [{**row.setting, batch: scaling.batch} for row, scaling in scaled]
    names = labels([{key: whole.get(key) for key in keys} for whole in wholes])
    settings: dict[str, dict[float, tuple[ComparisonRow, Scaling]]] = {}
    for name, (row, scaling) in zip(names, scaled, strict=True):
        settings.setdefault(name, {})[row.runs[0].num_devices] = row, scaling
    lines = []
    for name, rows in settings.items():
        _, base = next(iter(rows.values()))
        ys = {float(base.base_num_devices): 1.0}
        ys |= {size: scaling.speedup for size, (_, scaling) in rows.items()}
        if len(ys) == 1:
            continue
        xs = sorted(ys)
        first, last = xs[0], xs[-1]
        predicted = {
            x: row.predicted[kind].speedup for x, (row, _) in rows.items() if kind in row.predicted
        }
        predicted |= {first: predicted.get(first, 1.0)} if predicted else {}
        sds = {x: one.speedup_sd for x, (_, one) in rows.items() if one.speedup_sd is not None}
        remarks = {x: f", {row.speed_remark}" for x, (row, _) in rows.items() if row.speed_remark}
        lines.append(
            Line(
                f"{name}: {ys[last]:.2f}x ({ys[last] * first / last:.0%}){remarks.get(last, '')}",
                xs,
                [ys[x] for x in xs],
                base=base.base,
                predicted=[predicted.get(x, math.nan) for x in xs] if predicted else (),
                errors=[sds.get(x, math.nan) for x in xs] if sds else (),
                doubtful=list(remarks),
            )
        )
    return sorted(lines, key=lambda line: -line.ys[-1]) if len(lines) > len(COLOURS) else lines


def _loss(comparison: Comparison, *, by_time: bool) -> "Figure | str":
    from matplotlib.ticker import LogLocator, NullLocator

    lines = [line for row in comparison.rows if (line := _loss_line(row, by_time=by_time))]
    if not lines:
        return f"no run has logged {LOSS}"
    if len(lines) > len(COLOURS):  # else the table's order gives a setting one colour everywhere
        lines.sort(key=lambda line: (line.xs if by_time else line.ys)[-1])
    figure, (axes,) = new_figure(f"Training loss by {'time' if by_time else 'optimizer step'}")
    values = [value for line in lines for value in line.ys]
    if min(values) > 0 and max(values) / min(values) > 20:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    xlabel = "seconds of training, without start-up" if by_time else "optimizer step"
    draw_lines(axes, lines, first="fastest" if by_time else "lowest", xlabel=xlabel)
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
        f"{row.label}\n{digits(times[-1])} s" if by_time else row.label,
        times if by_time else steps,
        [statistics.fmean(values) for values in losses],
        low=[min(values) for values in losses] if has_band else (),
        high=[max(values) for values in losses] if has_band else (),
    )


def _step_parts(comparison: Comparison) -> "Figure | str":
    """Return bars of the parts of each row's step, its prediction below; or why there are none."""
    bars = []
    for row in comparison.rows:
        if parts := parts_ms(row.stats):
            whole = row.stats.get("perf/step_time_ms")
            rest = max(0.0, (whole.mean if whole else 0.0) - sum(parts.values()))
            bars.append(({**parts, REST: rest}, row))
    if not bars:
        return "no run has measured the parts of its step time (perf/*_ms)"
    bars = sorted(bars, key=lambda bar: sum(bar[0].values()))[:MAX_BARS]
    order = dict.fromkeys(
        [*StepPart, *(name for parts, _ in bars for name in parts if name != REST)]
    )
    names = [name for name in (*order, REST) if any(parts.get(name) for parts, _ in bars)]
    colours = dict(zip(names, PART_COLOURS * len(names), strict=False))
    colours |= {REST: GREY} if REST in names else {}
    has_predicted = any(row.predicted for _, row in bars)
    labelled = [wrapped(row.label) for _, row in bars]
    text = 0.15 + 0.2 * max(1 + label.count("\n") for label in labelled)
    height = 1.8 + max(0.65 if has_predicted else 0.4, text) * len(bars)
    figure, (axes,) = new_figure("Parts of an optimizer step", height=height)
    axes.set_xlim(0, 1.2 * max(sum(parts.values()) for parts, _ in bars))
    at, size = (-0.15, 0.5) if has_predicted else (0.0, 0.8)
    draw_bars(axes, {place + at: parts for place, (parts, _) in enumerate(bars)}, colours, size)
    if has_predicted:
        predictions = {
            place + 0.22: next(iter(row.predicted.values())).parts_ms
            for place, (_, row) in enumerate(bars)
            if row.predicted
        }
        draw_bars(axes, predictions, colours, 0.18, word=" predicted")
    axes.set_yticks(range(len(bars)), labelled)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("milliseconds per step (median without the first line)")
    figure.legend(loc="outside lower center", ncols=min(len(names), 5), frameon=False)
    return figure
