"""Tab in a shell: what Hydra's script asks, and what it prints into the line."""

from pathlib import Path

import pytest
from commands import run_command


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("ddp-runner model=toy_m", "model=toy_mp\n"),
        ("ddp-runner 'a=[", ""),
        ("ddp-runner model=nothing model=[ opt", ""),
    ],
)
def test_a_mistake_in_a_half_typed_line_prints_nothing(
    line: str, printed: str, tmp_path: Path
) -> None:
    """Whatever it prints would stand in the line that the user types."""
    environ = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    end = run_command("-sc", "query=bash", folder=tmp_path, environ=environ)
    assert (end.stdout.replace(" ", "").rstrip("\n"), end.stderr) == (printed.rstrip("\n"), "")
