"""Run a function of a test's own as the task of a real command."""

from pathlib import Path
from textwrap import dedent

from commands import CommandResult, run_command


def run_function(source: str, *args: str, folder: Path) -> CommandResult:
    """Run the function ``train`` of a module ``mine``, whose source this is, on two ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(dedent(source))
    return run_command(
        "task=mine.train",
        "allowed_targets=[mine]",
        *args,
        *([] if any(one.startswith("world_size=") for one in args) else ["world_size=2"]),
        folder=folder,
        environ={"PYTHONPATH": str(folder)},
    )
