"""The plot of step times: a bar of parts for each row, with its prediction below."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddp_runner.compare.analysis import Comparison
from ddp_runner.compare.prediction import REST
from ddp_runner.compare.render.columns import digits
from ddp_runner.compare.render.drawing import COLOURS, GREY, TEXT, new_figure
from ddp_runner.compare.rows import ComparisonRow
from ddp_runner.compare.settings import label
from ddp_runner.metric_names import StepPart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BARS = 20
PART_COLOURS = (*COLOURS, "#6a5acd", "#a0522d")
MIN_NUMBERED = 0.07 / 1.2  # share of the width; shorter parts have no number


def step_parts(comparison: Comparison) -> "Figure | str":
    """Return the plot of the rows that have measured the parts of a step, or why there is none."""
    bars = [(_parts(row), row) for row in comparison.rows if row.step_parts_ms]
    if not bars:
        return "no run has measured the parts of its step time (perf/*_ms)"
    bars = sorted(bars, key=lambda bar: sum(bar[0].values()))[:MAX_BARS]
    names = [
        name
        for name in dict.fromkeys([*StepPart, *(name for parts, _ in bars for name in parts)])
        if any(parts.get(name) for parts, _ in bars)
    ]
    names.sort(key=lambda name: name == REST)
    colours = dict(zip(names, PART_COLOURS * len(names), strict=False))
    colours |= {REST: GREY} if REST in names else {}
    has_predicted = any(row.predicted for _, row in bars)
    height = 1.8 + (0.65 if has_predicted else 0.4) * len(bars)
    figure, (axes,) = new_figure("Parts of an optimizer step", height=height)
    axes.set_xlim(0, 1.2 * max(sum(parts.values()) for parts, _ in bars))
    at, size = (-0.15, 0.5) if has_predicted else (0.0, 0.8)
    for place, (parts, row) in enumerate(bars):
        _draw_bar(axes, place + at, parts, colours, size)
        for prediction in list(row.predicted.values())[:1]:
            _draw_bar(axes, place + 0.22, prediction.parts_ms, colours, 0.18, word=" predicted")
    axes.set_yticks(range(len(bars)), [label(row.setting, comparison.keys) for _, row in bars])
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
            bar.set_label(name)  # one label per part, from the first measured bar
        if length > MIN_NUMBERED * axes.get_xlim()[1] and not word:
            middle = start + length / 2
            axes.text(middle, place, digits(length), color="white", ha="center", va="center")
        start += length
    text = f"  {digits(sum(parts.values()))} ms{word}"
    axes.text(start, place, text, va="center", color=TEXT, fontsize=8 if word else None)


def _parts(row: ComparisonRow) -> dict[str, float]:
    """Return the measured parts of a row's step, and the rest of its time."""
    whole = row.step_time_ms.mean if row.step_time_ms else 0.0
    return {**row.step_parts_ms, REST: max(0.0, whole - sum(row.step_parts_ms.values()))}
