"""Where real datasets lie; a helper of the tests, not a test."""

from pathlib import Path

import pytest


def real(path: Path) -> Path:
    """Return a path below DDP_RUNNER_DATA_ROOT; where it is not there, the test is skipped."""
    if not path.exists():
        pytest.skip(f"{path} is not there: the real data are too large, or not ours, to ship")
    return path
