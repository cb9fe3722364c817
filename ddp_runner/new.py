"""The command ``ddp-runner new my_project``: copies ``template/`` under its name. Torch-free.

ddp-runner new my_project
ddp-runner new work/my_project
"""

import argparse
import importlib.util
import json
import keyword
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ddp_runner import __version__
from ddp_runner.errors import UserError, one_line

PACKAGE = Path(__file__).resolve().parent
# In a wheel template/ lies inside the package, in a checkout beside it.
IS_INSTALLED = (PACKAGE / "template").is_dir()
TEMPLATE = (PACKAGE if IS_INSTALLED else PACKAGE.parent) / "template"
PLACEHOLDER = "my_project"  # the template's own name
REQUIREMENT = '"ddp-runner"'  # in its pyproject.toml
NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?")  # what a distribution may be called, too
# Folders of the project, Hydra's plugins, and what runs its tests.
TAKEN = {"conf", "data", "hydra_plugins", "outputs", "pytest", "tests"}
EXIT_USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Create the project that a command line names, say what to do next, and exit.

    Args:
        arguments: the words after ``new``; None: those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="ddp-runner new",
        description="Create a small project of your own that trains and tests: a package, its "
        "config groups, a test and a README.",
        epilog="Exit code: 0; 2 for a mistake in the command.",
    )
    parser.add_argument("folder", type=Path, metavar="NAME", help="its folder, and its package")
    folder = parser.parse_args(sys.argv[2:] if arguments is None else arguments).folder
    try:
        name = folder.resolve().name
        validate_name(name)
        num_files = create(folder, name)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    print(f"created {folder}, {num_files} files")
    print(f"  cd {shlex.quote(str(folder))}")
    print(f"  uv run python -m {name}    # train")
    print("  uv run pytest    # test")


def create(folder: Path, name: str) -> int:
    """Write the template under a name; return the number of files.

    Raises:
        UserError: the folder holds something already, or cannot be written.
    """
    is_new = not folder.exists()
    try:
        if not is_new and any(path.name != ".git" for path in folder.iterdir()):
            raise UserError(f"{folder} exists and is not empty; give the name of a new folder")
        sources = [path for path in sorted(TEMPLATE.rglob("*")) if path.is_file()]
        sources = [path for path in sources if path.parent.name != "__pycache__"]
        for source in sources:
            text = source.read_text(encoding="utf-8").replace(PLACEHOLDER, name)
            if source.name == "pyproject.toml":
                text = text.replace(REQUIREMENT, f'"ddp-runner>={__version__}"') + uv_source()
            path = folder / str(source.relative_to(TEMPLATE)).replace(PLACEHOLDER, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{one_line(error)}; give a folder that can be written") from error
    return len(sources)


def uv_source() -> str:
    """Return what tells uv where this ddp-runner comes from; empty for a package index.

    Installers record it: https://packaging.python.org/specifications/direct-url
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
    # What JSON writes for texts and truth values is TOML as well.
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in source.items())
    comment = (
        "# Where ddp-runner comes from on this machine. Delete this if a package index has it."
    )
    return f"\n{comment}\n[tool.uv.sources]\nddp-runner = {{ {pairs} }}\n"


def validate_name(name: str) -> None:
    """Reject a name that Python cannot import, or that would hide another package.

    Raises:
        UserError: it says which, and what to write instead.
    """
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        meant = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
        meant = meant if NAME.fullmatch(meant) and not _is_taken(meant) else PLACEHOLDER
        raise UserError(f"{name!r} cannot be the name of a Python package; write {meant}")
    if _is_taken(name):
        raise UserError(
            f"{name} is the name of a package that is installed, or of a folder that each project "
            f"has; write {name}_project"
        )


def _is_taken(name: str) -> bool:
    if name in TAKEN or name in sys.stdlib_module_names or keyword.iskeyword(name):
        return True
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:  # a folder without __init__.py has none
        return True
    return any(True for _ in metadata.distributions(name=name))
