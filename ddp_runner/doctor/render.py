"""Draws the doctor's report as lines of a terminal, or as JSON. Torch-free."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from ddp_runner.doctor.finding import Finding, Level
from ddp_runner.errors import counted, printable

NAME = 13  # columns of a finding's name
INDENT = " " * (2 + len(Level.PROBLEM) + 2 + NAME + 2)


@dataclass(frozen=True)
class Report:
    """All findings: of each machine by its name, rank 0's first, and between them."""

    machines: Mapping[str, Sequence[Finding]]
    between: Sequence[Finding] = ()

    @property
    def counts(self) -> dict[Level, int]:
        """How many findings there are of each level."""
        found = [*self.between, *(one for own in self.machines.values() for one in own)]
        return {level: sum(one.level == level for one in found) for level in Level}

    @property
    def has_problem(self) -> bool:
        """Whether runs would fail."""
        return self.counts[Level.PROBLEM] > 0


def as_text(report: Report, *, width: int) -> str:
    """Return the report of the first machine; of the others only what is not ok there."""
    lines = []
    for number, (name, findings) in enumerate(report.machines.items()):
        shown = findings if number == 0 else [one for one in findings if one.level != Level.OK]
        lines += [printable(f"machine {name}" + ("" if shown else ": ok"))]
        lines += _lines(shown, width)
    if report.between:
        noun = "between the machines" if len(report.machines) > 1 else "between the ranks"
        lines += [noun, *_lines(report.between, width)]
    counts = [counted(report.counts[one], one) for one in (Level.PROBLEM, Level.WARNING)]
    return "\n".join([*lines, ", ".join(counts)])


def as_json(report: Report) -> str:
    """Return one object: the findings of each machine, those between them, and the counts."""
    content = {
        "machines": {
            name: [asdict(one) for one in findings] for name, findings in report.machines.items()
        },
        "between": [asdict(one) for one in report.between],
        "counts": report.counts,
    }
    return json.dumps(content, indent=1)


def _lines(findings: Iterable[Finding], width: int) -> Iterator[str]:
    for one in findings:
        start = f"  {one.level:<{len(Level.PROBLEM)}}  {one.name:<{NAME}}  "
        yield from _wrapped(printable(one.value), start, width)
        if one.advice is not None:
            yield from _wrapped(printable(one.advice), f"{INDENT}-> ", width)


def _wrapped(text: str, start: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=start, subsequent_indent=INDENT, break_on_hyphens=False
    )
