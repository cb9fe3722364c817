"""The uninterrupted run that tests of faults compare with."""

from pathlib import Path

import pytest
from trainings import RUN, run_training


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a training without a fault."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    end = run_training(folder)
    assert (end.exit_code, end.stderr) == (0, "")
    return folder / RUN
