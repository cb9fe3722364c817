"""What the doctor finds, one line each, and the time limit of each look. Torch-free."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from ddp_runner.errors import typed

LIMIT_S = 20.0  # for a look at something that answers at once if it answers at all


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"  # runs work, but slower, or not in every case
    PROBLEM = "problem"  # runs fail


@dataclass(frozen=True)
class Finding:
    """One line of the report; what is not ok has an advice."""

    name: str
    level: Level
    value: str
    advice: str | None = None


def ok(name: str, value: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(name, Level.OK, value)


def warning(name: str, value: str, advice: str) -> Finding:
    """Return a finding with which runs work, but slower, or not in every case."""
    return Finding(name, Level.WARNING, value, advice)


def problem(name: str, value: str, advice: str) -> Finding:
    """Return a finding with which runs fail."""
    return Finding(name, Level.PROBLEM, value, advice)


def within(
    limit_s: float, name: str, look: Callable[[], Iterable[Finding]], *, advice: str
) -> list[Finding]:
    """Return what a look finds; a problem if it raises, or takes longer than its limit.

    A disk or a name server that does not answer holds its thread for ever, and nothing can end
    that. So the look has a thread of its own, and the process ends without waiting for it.
    """
    found: list[Finding] = []
    done = threading.Event()

    def work() -> None:
        try:
            found.extend(look())
        except Exception as error:  # whatever a broken machine makes a library raise
            found.append(problem(name, typed(error), advice))
        finally:
            done.set()

    threading.Thread(target=work, name=f"look at {name}", daemon=True).start()
    if done.wait(limit_s):
        return found
    return [*found, problem(name, f"no answer within {limit_s:g} s", advice)]
