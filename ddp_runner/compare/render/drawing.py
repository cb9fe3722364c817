"""How plots look: their colours, and lines that are named at their ends instead of in a legend.

No pyplot, hence no global state and no display; matplotlib is imported when a plot is asked for.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each 4.5:1 or more on white; told apart by markers too, for those who see fewer colours.
COLOURS = ("#0060a0", "#b84a00", "#00795a", "#aa3377", "#000000", "#7a5c00")
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY, TEXT = "#6e6e6e", "#333333"
MOST_GREY = 100  # lines behind the coloured ones
MOST_MARKED = 30  # points of a line up to which each has its marker
LABEL_WIDTH, LABEL_HEIGHT = 30, 0.055  # characters; a line of text as a part of the axes
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "text.parse_math": False,  # a setting's value may hold a dollar sign
    "svg.hashsalt": "ddp_runner",  # the same comparison gives the same file
}


@dataclass(frozen=True)
class Line:
    """A line of a plot, and what is written at its end."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()  # of the band around it
    high: Sequence[float] = ()
    base: str = ""  # what its values are multiples of
    predicted: Sequence[float] = ()  # what they should be; nan where nothing says it
    errors: Sequence[float] = ()  # half the length of the bars at its points; nan: none
    doubtful: Sequence[float] = ()  # the xs of points that are drawn hollow


def new_figure(
    title: str, *, num_panels: int = 1, height: float = 5.0
) -> tuple["Figure", list["Axes"]]:
    """Return a figure with its title, and its panels from left to right.

    Args:
        title: above all panels.
        num_panels: how many there are.
        height: inches.
    """
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(9 if num_panels == 1 else 8 * num_panels, height), layout="constrained"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    panels = figure.subplots(1, num_panels, squeeze=False)[0]
    return figure, list(panels)


def draw_lines(
    axes: "Axes",
    lines: Sequence[Line],
    *,
    first: str,
    xlabel: str,
    ideal: Sequence[Line] = (),
    is_ragged: bool = False,
) -> None:
    """Draw lines and name them at the right; the scale of the axes must have been set.

    Args:
        axes: where.
        lines: the first ones in colour, the rest in grey.
        first: what sets the first ones apart, in a word, as `fastest`.
        xlabel: of the horizontal axis.
        ideal: dashed ones behind them.
        is_ragged: the lines end far apart, so that a legend names them better than their ends.
    """
    for line in lines[len(COLOURS) :][:MOST_GREY]:
        axes.plot(line.xs, line.ys, color=GREY, alpha=0.3, linewidth=0.8)
    for index, line in enumerate(ideal):
        name = None if index else line.name
        axes.plot(line.xs, line.ys, color=GREY, linestyle="--", linewidth=1.5, label=name)
    coloured = lines[: len(COLOURS)]
    for index, line in enumerate(coloured):
        is_marked = len(line.xs) <= MOST_MARKED
        axes.plot(
            line.xs,
            line.ys,
            color=COLOURS[index],
            label=_wrapped(line.name),
            marker=MARKERS[index] if is_marked else None,
            linewidth=2.0 + 0.4 * (len(coloured) - 1 - index),  # seen even below one that coincides
            markersize=6 + 0.4 * (len(coloured) - 1 - index),
        )
        if line.predicted:
            axes.plot(line.xs, line.predicted, color=COLOURS[index], linestyle=":", linewidth=2)
        if line.errors:
            axes.errorbar(
                line.xs, line.ys, line.errors, color=COLOURS[index], fmt="none", capsize=4
            )
        for x, y in zip(line.xs, line.ys, strict=True):
            if x in line.doubtful:
                axes.plot([x], [y], MARKERS[index], color=COLOURS[index], mfc="white", ms=9)
        if line.low:
            axes.fill_between(
                line.xs, line.low, line.high, color=COLOURS[index], alpha=0.15, linewidth=0
            )
    ends = [*zip(coloured, COLOURS, strict=False), *((line, GREY) for line in ideal)]
    if is_ragged:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    else:
        _name_ends(axes, ends)
    is_full = len(lines) > len(COLOURS)
    note = f"\n(the {len(COLOURS)} {first} of {len(lines)} in colour)" if is_full else ""
    axes.set_xlabel(xlabel + note)


def plain_log_ticks(axes: "Axes") -> None:
    """Make the vertical axis logarithmic, with 0.1, 0.2, 0.5, 1, … written out."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _name_ends(axes: "Axes", ends: Sequence[tuple[Line, str]]) -> None:
    """Write each line's name beside the axes, at the height of its end, none over another."""
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    labels = [
        (float(to_axes.transform((line.xs[-1], line.ys[-1]))[1]), line, colour)
        for line, colour in ends
    ]
    place = -1.0  # the lower edge of what is free
    texts = []
    for height, line, colour in sorted(labels, key=lambda label: label[0]):
        text = _wrapped(line.name)
        half = LABEL_HEIGHT * (1 + text.count("\n")) / 2
        centre = max(height, place + half)
        place = centre + half
        texts.append((centre, text, line, colour))
    too_high = max(0.0, place - 1.05)  # the topmost ones would leave the figure
    for centre, text, line, colour in texts:
        axes.annotate(
            text,
            xy=(line.xs[-1], line.ys[-1]),
            xytext=(1.03, centre - too_high),
            textcoords="axes fraction",
            color=colour,
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.6, "relpos": (0, 0.5)},
            annotation_clip=False,
        )


def _wrapped(name: str) -> str:
    return "\n".join(textwrap.fill(line, LABEL_WIDTH) for line in name.splitlines())
