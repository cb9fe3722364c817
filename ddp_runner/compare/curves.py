"""The curves of one run's metrics, as paths of small charts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from ddp_runner.compare.run import Run
from ddp_runner.metric_names import LINE_FIELDS, headlines

SIZE = 10_000  # of a chart, in the units of its path: readings have four digits
MAX_DOTTED = 40  # points of a curve that are marked
LOG_FROM = 50  # highest divided by lowest value from which a logarithmic scale shows more

Point = tuple[float, float]  # step and value; nan: the value is not finite


@dataclass(frozen=True)
class Curve:
    """A curve, as wide and as high as its values reach."""

    name: str
    path: str  # the data of an SVG path, in a square of SIZE from the top left
    dots: str  # the same for its points; empty if they are many
    first: float  # step
    last: float
    low: float
    high: float
    is_log: bool


def curves(run: Run, *, num_points: int) -> list[Curve]:
    """Return a curve for each metric that changed; each has about `num_points` points at most."""
    logged = dict.fromkeys(name for line in run.lines for name in line)
    names = dict.fromkeys([*headlines(logged), *logged])
    made = (_curve(run, name, num_points) for name in names if name not in LINE_FIELDS)
    return [curve for curve in made if curve is not None]


def thinned(points: Sequence[Point], num_points: int) -> list[Point]:
    """Return the lowest, the highest and a missing point of each stretch: no spike is lost."""
    size = math.ceil(2 * len(points) / num_points)
    if size <= 2:
        return list(points)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        known = [point for point in stretch if not math.isnan(point[1])]
        ends = {min(known, key=itemgetter(1)), max(known, key=itemgetter(1))} if known else set()
        gaps = [point for point in stretch if math.isnan(point[1])]
        kept += sorted((*ends, *gaps[:1]), key=itemgetter(0))
    return kept


def _curve(run: Run, name: str, num_points: int) -> Curve | None:
    found = [(line["step"] or 0.0, line[name]) for line in run.lines if name in line]
    points = [(step, math.nan if value is None else value) for step, value in found]
    values = run.values(name)
    if len(values) < 2 or min(values) == max(values):
        return None
    low, high, first, last = min(values), max(values), points[0][0], points[-1][0]
    is_log = low > 0 and high / low >= LOG_FROM
    bottom, top = (math.log(low), math.log(high)) if is_log else (low, high)

    def place(step: float, value: float) -> str:
        across = (step - first) / ((last - first) or 1)
        up = ((math.log(value) if is_log else value) - bottom) / ((top - bottom) or 1)
        return f"{round(SIZE * across)},{round(SIZE * (1 - up))}"

    shown = thinned(points, num_points)
    stretches = groupby(shown, key=lambda point: math.isnan(point[1]))
    parts = [[place(*point) for point in part] for is_gap, part in stretches if not is_gap]
    path = "".join(f"M{' '.join(part)}" for part in parts)
    # A line without length has round ends: a dot that no scaling deforms.
    dots = "".join(f"M{one}h0" for part in parts for one in part)
    dots = dots if len(shown) <= MAX_DOTTED else ""
    return Curve(name, path, dots, first, last, low, high, is_log)
