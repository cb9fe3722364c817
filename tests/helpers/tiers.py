"""Which cases of a test the default tier runs."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def first_of(cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a table for ``parametrize``: all but the first are marked `full`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.full] if number else [],
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
