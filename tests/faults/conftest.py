"""What the tests of faults share."""

from pathlib import Path

import pytest
from trainings import RUN, trained


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the training that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    end = trained(folder)
    assert (end.exit_code, end.stderr) == (0, "")
    return folder / RUN
