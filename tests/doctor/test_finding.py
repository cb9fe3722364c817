"""The time limit of a look, and how findings are drawn."""

import json
import threading
from collections.abc import Iterator

from ddp_runner.doctor.finding import Finding, Level, ok, problem, warning, within
from ddp_runner.doctor.render import Report, as_json, as_text


def test_a_look_without_an_answer_is_a_line() -> None:
    """What it found before stays."""
    answer = threading.Event()

    def look() -> Iterator[Finding]:
        yield ok("first", "is there")
        answer.wait()

    silent, late = within(0.05, "disk", look, advice="look at it"), []
    answer.set()
    late = within(60.0, "disk", look, advice="look at it")
    assert silent[-1] == problem("disk", "no answer within 0.05 s", "look at it")
    assert late == [ok("first", "is there")]


def test_a_look_that_raises_is_a_line() -> None:
    """With the error's type, and no traceback."""

    def look() -> Iterator[Finding]:
        yield ok("first", "is there")
        raise OSError("odd\nmachine")

    found = within(60.0, "disk", look, advice="look at it")
    assert found == [
        ok("first", "is there"),
        problem("disk", "OSError: odd machine", "look at it"),
    ]


def test_the_first_machine_is_shown_whole_and_of_others_what_is_wrong() -> None:
    """With an advice below each line that is not ok, in 80 columns."""
    own = [ok("cores", "2 cores"), warning("memory", "little " * 20, "end other programs " * 9)]
    report = Report(
        {"n1": own, "n2": [ok("cores", "2 cores")], "n3": [problem("lock", "none", "mount it")]},
        [ok("link", "n1 to n2: \x1b[31m0.1 ms")],
    )
    lines = as_text(report, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:2] == ["machine n1", "  ok       cores          2 cores"]
    place = lines.index("machine n2: ok")
    assert lines[place:] == [
        "machine n2: ok",
        "machine n3",
        "  problem  lock           none",
        "                          -> mount it",
        "between the machines",
        "  ok       link           n1 to n2: \\x1b[31m0.1 ms",
        "1 problem, 1 warning",
    ]
    assert report.has_problem
    content = json.loads(as_json(report))
    assert content["counts"] == {"ok": 3, "warning": 1, "problem": 1}
    assert content["machines"]["n3"][0]["advice"] == "mount it"
    assert Report({"n1": own}).counts[Level.PROBLEM] == 0
