"""The plot of what a step's time goes into: a bar for each setting."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.render.columns import digits
from ddp_runner.compare.render.drawing import GREY, PART_COLOURS, TEXT, new_figure, wrapped
from ddp_runner.compare.speedup import REST
from ddp_runner.errors import printable
from ddp_runner.metric_names import StepPart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_NUMBERED = 0.07 / 1.2  # share of the axes; shorter parts of a bar have no number
MAX_BARS = 20


def step_parts(comparison: Comparison) -> "Figure | str":
    """Return bars of the parts of each row's step, its prediction below; or why there are none."""
    bars = []
    for row in comparison.rows:
        whole = row.step_time_ms.mean if row.step_time_ms else 0.0
        parts = {**row.step_parts_ms, REST: max(0.0, whole - sum(row.step_parts_ms.values()))}
        bars += [(parts, row)] if row.step_parts_ms else []
    if not bars:
        return "no run has measured the parts of its step time (perf/*_ms)"
    bars = sorted(bars, key=lambda bar: sum(bar[0].values()))[:MAX_BARS]
    order = dict.fromkeys([*StepPart, *(name for _, row in bars for name in row.step_parts_ms)])
    names = [name for name in (*order, REST) if any(parts.get(name) for parts, _ in bars)]
    colours = dict(zip(names, PART_COLOURS * len(names), strict=False))
    colours |= {REST: GREY} if REST in names else {}
    has_predicted = any(row.predicted for _, row in bars)
    labels = [wrapped(row.label) for _, row in bars]
    text = 0.15 + 0.2 * max(1 + label.count("\n") for label in labels)
    height = 1.8 + max(0.65 if has_predicted else 0.4, text) * len(bars)
    figure, (axes,) = new_figure("Parts of an optimizer step", height=height)
    axes.set_xlim(0, 1.2 * max(sum(parts.values()) for parts, _ in bars))
    at, size = (-0.15, 0.5) if has_predicted else (0.0, 0.8)
    for place, (parts, row) in enumerate(bars):
        _draw_bar(axes, place + at, parts, colours, size)
        for prediction in list(row.predicted.values())[:1]:
            _draw_bar(axes, place + 0.22, prediction.parts_ms, colours, 0.18, word=" predicted")
    axes.set_yticks(range(len(bars)), labels)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("milliseconds per step (median without the first line)")
    figure.legend(loc="outside lower center", ncols=min(len(names), 5), frameon=False)
    return figure


def _draw_bar(
    axes: "Axes",
    place: float,
    parts: Mapping[str, float],
    colours: Mapping[str, str],
    height: float,
    word: str = "",
) -> None:
    """Draw one bar, with numbers on its parts; a bar with a `word` is pale and has only a total."""
    start = 0.0
    for name, colour in colours.items():
        length = max(0.0, parts.get(name, 0.0))
        alpha = 0.45 if word else 1.0
        bar = axes.barh(place, length, height, start, color=colour, alpha=alpha, edgecolor="white")
        if place <= 0:
            bar.set_label(printable(name))  # one label per part, from the first measured bar
        if length > MIN_NUMBERED * axes.get_xlim()[1] and not word:
            middle = start + length / 2
            axes.text(middle, place, digits(length), color="white", ha="center", va="center")
        start += length
    text = f"  {digits(sum(parts.values()))} ms{word}"
    axes.text(start, place, text, va="center", color=TEXT, fontsize=8 if word else None)
