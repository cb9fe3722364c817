"""The tests that docs/reliability.md and SECURITY.md name exist; the default tier has one a row."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLES = {  # the page, and the heading above its tables
    "docs/reliability.md": "## Faults and their tests",
    "SECURITY.md": "## What may come from somebody else",
}
ROWS = [
    line
    for page, heading in TABLES.items()
    for line in (ROOT / page).read_text(encoding="utf-8").partition(heading)[2].splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| fault |", "| what |"))
]
NOT_DEFAULT = re.compile(r"^pytest\.mark\.(full|slow)$")
NOT_DEFAULT_FILE = re.compile(r"^pytestmark = (.*\.(full|slow)\b|needs\()")  # `needs`: hosts


def named_tests(row: str) -> list[tuple[str, str]]:
    """Return file and name of a row's tests; no name stands for the whole file.

    A name without a file belongs to the file before it.
    """
    *_, tests = row.strip(" |").split("|")
    found, file = list[tuple[str, str]](), ""
    for path, name in re.findall(r"`(\S*\.py)?(?:::(\w+))?`", tests):
        if path or name:
            file = path or file
            found.append((file, name))
    return found


@cache
def tiers_of(file: str) -> dict[str, bool]:
    """Return whether the default tier runs each test of a file; "" stands for the whole file."""
    path = ROOT / "tests" / file
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    marks = [ast.unparse(one) for one in tree.body if isinstance(one, ast.Assign)]
    is_default = not any(map(NOT_DEFAULT_FILE.search, marks))
    found = {"": is_default}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            own = map(ast.unparse, node.decorator_list)
            found[node.name] = is_default and not any(map(NOT_DEFAULT.search, own))
    return found


def test_each_fault_has_tests_that_exist() -> None:
    """The table names it by file and name."""
    assert ROWS
    for row in ROWS:
        assert named_tests(row) or row.strip(" |").split("|")[-1].strip().startswith("the same")
    named = [test for row in ROWS for test in named_tests(row)]
    assert not [f"{file} has no {name}" for file, name in named if name not in tiers_of(file)]


def test_each_fault_has_a_test_that_runs_by_default() -> None:
    """Unless it takes several hosts."""
    rows = {row: named_tests(row) for row in ROWS}
    lacking = [
        row
        for row, tests in rows.items()
        if tests and not any(tiers_of(file)[name] for file, name in tests)
    ]
    assert not [row for row in lacking if not any("cluster/" in file for file, _ in rows[row])]
