"""The tests that docs/reliability.md names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = [
    line
    for line in TABLE.partition("## Faults and their tests")[2].splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| fault |"))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:50])
def test_each_fault_has_tests_that_exist(row: str) -> None:
    """By file and name; a name without a file belongs to the file before it."""
    *_, tests = row.strip(" |").split("|")
    names = [pair for pair in re.findall(r"`(\S*\.py)?(?:::(\w+))?`", tests) if any(pair)]
    assert names or tests.strip().startswith("the same"), "the row names no test"
    file = ""
    for path, name in names:
        file = path or file
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, f"{file} has no {name}"
