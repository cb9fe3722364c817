"""The code of a page of the documentation: its blocks, and the files that they show."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(r"^# ([\w/]+\.(?:py|yaml))\b", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    language: str
    text: str

    @property
    def path(self) -> str | None:
        """The file that a comment in its first two lines names; None: it names none."""
        found = PATH.search("\n".join(self.text.splitlines()[:2]))
        return found and found[1]


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page, such as docs/your_own_step.md."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [Block(language, body) for language, body in found]


def write_files(page: str, folder: Path) -> list[str]:
    """Write the files that a page shows below a folder; return their paths."""
    paths = []
    for block in blocks(page):
        if block.path is not None:
            path = folder / block.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            if path.suffix == ".py":
                (path.parent / "__init__.py").touch()
            paths.append(block.path)
    return paths


def commands(page: str) -> list[list[str]]:
    """Return the arguments of each command of a page that starts the runner."""
    shells = "\n".join(block.text for block in blocks(page) if block.language == "bash")
    lines = shells.replace("\\\n", " ").splitlines()
    found = [line.partition("-m ddp_runner ")[2] for line in lines if "-m ddp_runner " in line]
    return [shlex.split(one, comments=True) for one in found]
