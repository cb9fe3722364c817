"""The tests that docs/reliability.md names exist."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = [
    line
    for line in TABLE.partition("## Faults and their tests")[2].splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| fault |"))
]


def test_each_fault_has_tests_that_exist() -> None:
    """By file and name; a name without a file belongs to the file before it."""
    assert ROWS
    assert not [missing for row in ROWS for missing in _missing(row)]


def _missing(row: str) -> Iterator[str]:
    fault, *_, tests = row.strip(" |").split("|")
    names = [pair for pair in re.findall(r"`(\S*\.py)?(?:::(\w+))?`", tests) if any(pair)]
    if not names and not tests.strip().startswith("the same"):
        yield f"{fault.strip()}: names no test"
    file = ""
    for path, name in names:
        file = path or file
        source = ROOT / "tests" / file
        text = source.read_text(encoding="utf-8") if source.is_file() else ""
        if not text or (name and f"def {name}(" not in text):
            yield f"{fault.strip()}: {file} has no {name}"
