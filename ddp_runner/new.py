"""The command ``ddp-runner new my_project``: copies ``template/`` under a new name. Torch-free."""

import argparse
import importlib.util
import json
import keyword
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ddp_runner import __version__
from ddp_runner.errors import UserError, exit_with, os_errors

PACKAGE = Path(__file__).resolve().parent
# In a wheel, template/ is inside the package; in a checkout, beside it.
IS_INSTALLED = (PACKAGE / "template").is_dir()
TEMPLATE = (PACKAGE if IS_INSTALLED else PACKAGE.parent) / "template"
PLACEHOLDER = "my_project"  # the name of the template
NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?")  # also valid for a distribution
# Folders of each project, and packages that it needs.
RESERVED = {"conf", "data", "hydra_plugins", "outputs", "pytest", "tests"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit; `arguments` are the words after ``new``, by default sys.argv's."""
    exit_with(lambda words: run(words[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> None:
    """Create the project that a command line names, and print the next steps."""
    parser = argparse.ArgumentParser(
        prog="ddp-runner new",
        description="Create a small project of your own that trains and tests: a package, its "
        "config groups, a test and a README.",
        epilog="Exit code: 0; 2 for a mistake in the command.",
    )
    help_name = "the project's folder; its last part names the package"
    parser.add_argument("folder", type=Path, metavar="NAME", help=help_name)
    folder = parser.parse_args(arguments).folder
    name = folder.resolve().name
    validate_name(name)
    with os_errors(f"{folder} cannot be written", fix="give a folder that can be written"):
        num_files = create(folder, name)
    print(f"created {folder}, {num_files} files")
    print(f"  cd {shlex.quote(str(folder))}")
    print(f"  uv run python -m {name}    # train")
    print("  uv run pytest    # test")


def create(folder: Path, name: str) -> int:
    """Write the template under a name; return the number of files."""
    if folder.exists() and any(path.name != ".git" for path in folder.iterdir()):
        raise UserError(f"{folder} exists and is not empty", "give the name of a new folder")
    files = [path for path in sorted(TEMPLATE.rglob("*")) if path.is_file()]
    files = [path for path in files if path.parent.name != "__pycache__"]
    for file in files:
        text = file.read_text(encoding="utf-8").replace(PLACEHOLDER, name)
        if file.name == "pyproject.toml":
            text = text.replace('"ddp-runner"', f'"ddp-runner>={__version__}"') + uv_source()
        path = folder / str(file.relative_to(TEMPLATE)).replace(PLACEHOLDER, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return len(files)


def uv_source() -> str:
    """Return the lines that tell uv the source of this ddp-runner; empty for a package index.

    Installers record the source: https://packaging.python.org/specifications/direct-url
    """
    if IS_INSTALLED:
        text = metadata.distribution("ddp-runner").read_text("direct_url.json")
        if text is None:
            return ""
        recorded = json.loads(text)
        url, commit = recorded["url"], recorded.get("vcs_info", {}).get("commit_id")
        address = urlsplit(url)
        if commit is not None:
            source = {"git": url, "rev": commit}
        elif address.scheme == "file":
            source = {"path": unquote(address.path)}
        else:
            source = {"url": url}
    else:
        source = {"path": str(PACKAGE.parent), "editable": True}
    # JSON's strings and booleans are valid TOML.
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in source.items())
    comment = "# The source of ddp-runner on this machine; delete it if a package index has it."
    return f"\n{comment}\n[tool.uv.sources]\nddp-runner = {{ {pairs} }}\n"


def validate_name(name: str) -> None:
    """Raise a UserError if Python cannot import the name, or it would hide another package."""
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        meant = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
        meant = meant if NAME.fullmatch(meant) and not _is_reserved(meant) else PLACEHOLDER
        raise UserError(f"{name!r} cannot be the name of a Python package", f"write {meant}")
    if _is_reserved(name):
        raise UserError(
            f"{name} is the name of an installed package, or of a folder that each project has",
            f"write {name}_project",
        )


def _is_reserved(name: str) -> bool:
    if name in RESERVED or name in sys.stdlib_module_names or keyword.iskeyword(name):
        return True
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:  # None for a folder without __init__.py
        return True
    return any(True for _ in metadata.distributions(name=name))
