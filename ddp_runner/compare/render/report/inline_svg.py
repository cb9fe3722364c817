"""A matplotlib figure as SVG inside a page: in the page's colours, with ids of its own.

The page forbids style attributes, so they become presentation attributes, which SVG reads alike.
"""

import io
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from ddp_runner.compare.render.drawing import GREY, PART_COLOURS, STYLE, TEXT
from ddp_runner.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By the colours of the drawing: variables of the stylesheet, which differ in the dark.
VARIABLES = {
    **{colour: f"var(--plot-{number})" for number, colour in enumerate(PART_COLOURS)},
    GREY: "var(--plot-grey)",
    TEXT: "var(--text)",
    "#000000": "var(--text)",
    "#ffffff": "var(--page)",
    str(STYLE["grid.color"]): "var(--line)",
}
# What XML cannot hold, though a JSON or YAML file may.
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
NUMBER = re.compile(r"-?\d+\.\d+")
LEFT_OUT = {"font-family", "id", "style", "version"}


def inline_svg(figure: "Figure", *, name: str) -> str:
    """Return a figure as an ``svg`` element; `name` must be an identifier, unique in the page."""
    from matplotlib import rc_context

    # Without metadata: a page that is passed on has no address in it.
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    file = io.StringIO()
    with rc_context({**STYLE, "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    root = ElementTree.fromstring(NO_XML.sub("\ufffd", file.getvalue()))
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = _attributes(element.attrib, prefix=f"{name}-")
        element.text = _text(element.text or "")
        element.tail = None
    _keep_used_ids(root, name)
    title = figure.get_suptitle()
    root.attrib |= {"role": "img", "aria-label": printable(title), "fill": "var(--text)"}
    root.attrib["font-size"] = "11"  # of text without a size of its own
    for side in ("width", "height"):  # the stylesheet's business
        del root.attrib[side]
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """Return a name without its namespace, which HTML gives to an inline svg element by itself."""
    return name.rpartition("}")[2]


def _attributes(given: dict[str, str], *, prefix: str) -> dict[str, str]:
    pairs = {_local(key): value for key, value in given.items()}
    for declaration in pairs.get("style", "").split(";"):
        key, _, value = declaration.partition(":")
        pairs |= {key.strip(): value.strip()} if value else {}
    kept = {key: value for key, value in pairs.items() if key not in LEFT_OUT}
    if kept.get("transform", "").startswith("rotate(-0 "):
        del kept["transform"]
    for key in kept.keys() & {"d", "x", "y", "transform", "points"}:
        rounded = NUMBER.sub(lambda number: f"{float(number[0]):.1f}", kept[key])
        kept[key] = re.sub(r"\s+", " ", rounded.replace(".0 ", " ")).strip()
    if "d" in kept:  # a pair of numbers after another one needs no L
        kept["d"] = re.sub(r"(?<=\d) L (?=[-\d])", " ", kept["d"])
    for key in kept.keys() & {"fill", "stroke"}:
        kept[key] = VARIABLES.get(kept[key].lower(), kept[key])
    if "id" in pairs:
        kept["id"] = prefix + pairs["id"]
    if "href" in kept:
        kept["href"] = f"#{prefix}{kept['href'].removeprefix('#')}"
    if "clip-path" in kept:
        kept["clip-path"] = kept["clip-path"].replace("(#", f"(#{prefix}")
    return kept


def _text(text: str) -> str:
    """Return a text whose leading spaces, which set it apart from a bar, SVG does not collapse."""
    shown = printable(text.strip())
    num_spaces = len(text) - len(text.lstrip(" "))
    return "\N{NO-BREAK SPACE}" * num_spaces + shown if shown else ""


def _keep_used_ids(root: ElementTree.Element, name: str) -> None:
    """Drop the ids that nothing refers to, and the style sheet, which would be the page's own."""
    uses = {
        value.removeprefix("url(").rstrip(")").removeprefix("#")
        for element in root.iter()
        for key, value in element.attrib.items()
        if key in ("href", "clip-path")
    }
    for element in root.iter():
        if element.get("id") not in uses:
            element.attrib.pop("id", None)
        for child in [*element]:
            if child.tag in ("style", "metadata"):
                element.remove(child)
    assert all(one.startswith(f"{name}-") for one in uses)
