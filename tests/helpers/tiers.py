"""Which cases of a test the default tier runs."""

from collections.abc import Iterable
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
