"""Carry out what a page of docs/ shows: write its files, and run its commands."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
FOLDER = "FOLDER"  # what a page calls the user's --config-dir


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that its first comment names; None if it is to be run."""
        named = re.match(r"(?:# @package \S+\n)?# ([\w./]+\.(?:py|yaml))\n", self.text)
        return named[1] if named else None


def blocks(page: str) -> list[Block]:
    """Return the code blocks of a page of docs/."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [Block(language, code) for language, code in FENCE.findall(text)]


def write_files(page: str, folder: Path) -> None:
    """Write the files of a page into a folder; its packages can be imported from there."""
    for block in blocks(page):
        if block.file is not None:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")


def commands(page: str) -> list[list[str]]:
    """Return the arguments of each command of the runner that a page shows."""
    lines = [
        line
        for block in blocks(page)
        if block.language == "bash"
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    words = [shlex.split(line, comments=True) for line in lines]
    return [one[3:] for one in words if one[:3] == ["python", "-m", "ddp_runner"]]
