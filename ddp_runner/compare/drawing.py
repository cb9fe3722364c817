"""How plots look: their colours, their lines and bars, and a legend beside the axes.

Without pyplot there is no global state and no need for a display. matplotlib is imported only when
a plot is drawn.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_runner.compare.table import cut, digits
from ddp_runner.errors import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Contrast of at least 4.5:1 on white; the markers differ too, for colour-blind readers.
COLOURS = ("#0060a0", "#b84a00", "#00795a", "#aa3377", "#000000", "#7a5c00")
PART_COLOURS = (*COLOURS, "#6a5acd", "#a0522d")
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY, TEXT = "#6e6e6e", "#333333"
MAX_GREY = 100  # lines behind the coloured ones
MAX_MARKED = 30  # points of a line with markers
MAX_LABEL, LABEL_WIDTH = 120, 30  # characters
MIN_NUMBERED = 0.07 / 1.2  # share of the axes; shorter parts of a bar have no number
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "text.parse_math": False,  # a setting may contain a dollar sign
    "svg.hashsalt": "ddp_runner",  # makes the file reproducible
    "path.simplify_threshold": 0.5,  # points; unseen, and lines take a third less
}


@dataclass(frozen=True)
class Line:
    """A line of a plot. Sequences, except `doubtful`, are empty or have a value for each point."""

    name: str  # in the legend
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()  # lower edge of the band around it
    high: Sequence[float] = ()
    base: str = ""  # to which its values are relative
    predicted: Sequence[float] = ()  # nan: no prediction
    errors: Sequence[float] = ()  # half the length of the error bars; nan: none
    doubtful: Sequence[float] = ()  # the xs of hollow points


def draw_bars(
    axes: "Axes",
    bars: Mapping[float, Mapping[str, float]],
    colours: Mapping[str, str],
    height: float,
    word: str = "",
) -> None:
    """Draw bars at their places. With a `word` they are pale, and their parts have no numbers."""
    starts = [0.0] * len(bars)
    for name, colour in colours.items():
        lengths = [max(0.0, parts.get(name, 0.0)) for parts in bars.values()]
        drawn = axes.barh([*bars], lengths, height, starts, color=colour, edgecolor="white")
        drawn.set_label("" if word else printable(name))
        least = math.inf if word else MIN_NUMBERED * axes.get_xlim()[1]
        numbers = [digits(length) if length > least else "" for length in lengths]
        axes.bar_label(drawn, numbers, label_type="center", color="white")
        for bar in drawn.patches if word else ():
            bar.set_alpha(0.45)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    for (place, parts), start in zip(bars.items(), starts, strict=True):
        text = f"  {digits(sum(parts.values()))} ms{word}"
        axes.text(start, place, text, va="center", color=TEXT, fontsize=8 if word else None)


def new_figure(
    title: str, *, num_panels: int = 1, height: float = 5.0
) -> tuple["Figure", list["Axes"]]:
    """Return a figure with a title, and its panels from left to right; `height` is in inches."""
    from matplotlib.figure import Figure

    width = 9 if num_panels == 1 else 8 * num_panels
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    return figure, list(figure.subplots(1, num_panels, squeeze=False)[0])


def draw_lines(axes: "Axes", lines: Sequence[Line], *, first: str, xlabel: str) -> None:
    """Draw the first lines in colour and the others in grey, and a legend to the right.

    `first` is what distinguishes the first lines, for example `fastest`.
    """
    for line in lines[len(COLOURS) :][:MAX_GREY]:
        axes.plot(line.xs, line.ys, color=GREY, alpha=0.3, linewidth=0.8)
    coloured = lines[: len(COLOURS)]
    for index, line in enumerate(coloured):
        colour, marker = COLOURS[index], MARKERS[index]
        # An earlier line is thicker, so that it stays visible below a later line that coincides.
        thicker = 0.4 * (len(coloured) - 1 - index)
        axes.plot(
            line.xs,
            line.ys,
            color=colour,
            label=wrapped(line.name),
            marker=marker if len(line.xs) <= MAX_MARKED else None,
            linewidth=2.0 + thicker,
            markersize=6 + thicker,
        )
        if line.predicted:
            axes.plot(line.xs, line.predicted, color=colour, linestyle=":", linewidth=2)
        if line.errors:
            axes.errorbar(line.xs, line.ys, line.errors, color=colour, fmt="none", capsize=4)
        for x, y in zip(line.xs, line.ys, strict=True):
            if x in line.doubtful:
                axes.plot([x], [y], marker, color=colour, mfc="white", ms=9)
        if line.low:
            axes.fill_between(line.xs, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    is_full = len(lines) > len(COLOURS)
    note = f"\n(the {len(COLOURS)} {first} of {len(lines)} in colour)" if is_full else ""
    axes.set_xlabel(xlabel + note)


def wrapped(name: str) -> str:
    """Return a name in short lines that leave room for what it names."""
    return "\n".join(textwrap.fill(cut(line, MAX_LABEL), LABEL_WIDTH) for line in name.splitlines())
