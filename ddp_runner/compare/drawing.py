"""Draw and save figures: colours, lines, bars, legends.

No pyplot: it has global state and may need a display. matplotlib is imported only to draw a plot.
"""

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
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
MAX_GREY = 100  # grey lines behind the coloured lines
MAX_MARKED = 30  # points of a line with markers
MAX_LABEL, LABEL_WIDTH = 120, 30  # characters
MIN_NUMBERED = 0.06  # share of the axes; shorter parts of a bar get no number
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "text.parse_math": False,  # a setting may contain a dollar sign
    "svg.hashsalt": "ddp_runner",  # makes the file reproducible
    "path.simplify_threshold": 0.5,  # points; invisible, and saves a third of the file
}

Points = Mapping[float, float]  # y by x


def write_plots(plots: Mapping[str, "Figure | str"], folder: Path) -> list[str]:
    """Write each plot as PNG and SVG into a folder; return a line for each."""
    lines = []
    for name, figure in plots.items():
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
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # they have addresses
    svg = _saved(figure, format="svg", transparent=True, metadata=metadata)
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _saved(figure: "Figure", **options: Any) -> bytes:
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(file, **options)
    return file.getvalue()


def new_figure(
    title: str, *, num_panels: int = 1, height: float = 5.0
) -> tuple["Figure", list["Axes"]]:
    """Return a figure with a title, and its panels from left to right; `height` in inches."""
    from matplotlib.figure import Figure

    width = 9 if num_panels == 1 else 8 * num_panels
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    return figure, list(figure.subplots(1, num_panels, squeeze=False)[0])


def in_short_lines(name: str) -> str:
    """Return a name in short lines."""
    return "\n".join(textwrap.fill(cut(line, MAX_LABEL), LABEL_WIDTH) for line in name.splitlines())


def draw_lines(
    axes: "Axes", lines: Sequence[tuple[str, Points]], *, first: str, xlabel: str
) -> None:
    """Draw the first lines in colour and the rest in grey, and a legend to the right.

    `first` describes the first lines, for example `fastest`.
    """
    num_coloured = min(len(lines), len(COLOURS))
    for _, points in lines[num_coloured:][:MAX_GREY]:
        axes.plot([*points], [*points.values()], color=GREY, alpha=0.3, linewidth=0.8)
    for index, (name, points) in enumerate(lines[:num_coloured]):
        # Earlier lines are thicker, so that they stay visible below later lines.
        thicker = 0.4 * (num_coloured - 1 - index)
        axes.plot(
            [*points],
            [*points.values()],
            color=COLOURS[index],
            label=in_short_lines(name),
            marker=MARKERS[index] if len(points) <= MAX_MARKED else None,
            linewidth=2.0 + thicker,
            markersize=6 + thicker,
        )
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    is_full = len(lines) > num_coloured
    note = f"\n(the {num_coloured} {first} of {len(lines)} in colour)" if is_full else ""
    axes.set_xlabel(xlabel + note)


def draw_bars(
    axes: "Axes",
    bars: Mapping[float, Mapping[str, float]],
    colours: Mapping[str, str],
    height: float,
    word: str = "",
) -> None:
    """Draw bars by position. With a `word` they are pale, and their parts have no numbers."""
    starts = [0.0] * len(bars)
    style: dict[str, Any] = {"edgecolor": "white", "alpha": 0.45 if word else None}
    for name, colour in colours.items():
        lengths = [max(0.0, parts.get(name, 0.0)) for parts in bars.values()]
        container = axes.barh([*bars], lengths, height, starts, color=colour, **style)
        container.set_label("" if word else printable(name))
        if not word:
            least = MIN_NUMBERED * axes.get_xlim()[1]
            numbers = [digits(length) if length > least else "" for length in lengths]
            axes.bar_label(container, numbers, label_type="center", color="white")
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    for (y, parts), start in zip(bars.items(), starts, strict=True):
        text = f"  {digits(sum(parts.values()))} ms{word}"
        axes.text(start, y, text, va="center", color=TEXT, fontsize=8 if word else None)
