"""docs/reliability.md names a test for each fault; here they are looked for."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NOT_YET = ("a node lost", "waiting for other machines")  # how the rows without a test begin
ROWS = [
    line
    for line in TABLE.partition("## Faults and their tests")[2].splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| fault |"))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:50])
def test_each_fault_has_tests_that_exist(row: str) -> None:
    """By file and name; a name without a file is of the file before it."""
    *_, tests = row.strip(" |").split("|")
    fault = row.split("|")[1].strip()
    named = re.findall(r"`(\S*\.py)?(?:::(\w+))?`", tests)
    if fault.startswith(NOT_YET):
        assert tests.strip() == "not yet tested"
        return
    if tests.strip().startswith("the same"):
        named = [one for one in named if any(one)]
    else:
        assert any(any(one) for one in named), "the row names no test"
    file = ""
    for given, name in named:
        file = given or file
        if not (given or name):
            continue  # another word between backticks
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, f"{file} has no {name}"
