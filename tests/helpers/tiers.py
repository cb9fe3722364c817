"""Which cases of a test the default tier runs."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def first_of(cases: Iterable[Any], *, num_quick: int = 1, num_full: int | None = None) -> list[Any]:
    """Return the cases of a table for ``parametrize``: all but the first are marked `full`.

    Those after the first `num_quick` and the next `num_full`, if that is given, are `slow` as well.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[
                *([] if number < num_quick else [pytest.mark.full]),
                *(
                    [pytest.mark.slow]
                    if num_full is not None and number >= num_quick + num_full
                    else []
                ),
            ],
        )
        for number, case in enumerate(cases)
    ]


def only(quick: str, cases: Mapping[str, Any]) -> list[Any]:
    """Return the values of a table for ``parametrize``: all but the quick one are marked `full`."""
    assert quick in cases
    return [
        pytest.param(case, id=name, marks=[] if name == quick else [pytest.mark.full])
        for name, case in cases.items()
    ]


def named(cases: Iterable[str], *, quick: Iterable[str], slow: Iterable[str] = ()) -> list[Any]:
    """Return the names of a table for ``parametrize``: all but the quick ones are marked `full`.

    The `slow` ones are marked so as well.
    """
    names, default, late = list(cases), set(quick), set(slow)
    assert default | late <= set(names)
    marks = {
        name: [
            *([] if name in default else [pytest.mark.full]),
            *([pytest.mark.slow] if name in late else []),
        ]
        for name in names
    }
    return [pytest.param(name, id=name, marks=marks[name]) for name in names]


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return the values of a parameter in the tests of this file that pytest is going to run.

    A fixture that prepares cases for several tests then prepares no more than they ask for.
    """
    calls = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(params[name] for params in calls if name in params))


def runs_full(request: pytest.FixtureRequest) -> bool:
    """Return whether pytest is going to run a `full` test of this file."""
    return any(
        item.get_closest_marker("full") is not None
        for item in request.session.items
        if item.path == request.path
    )
