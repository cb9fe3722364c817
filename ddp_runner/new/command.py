"""The command ``ddp-runner new my_project``: copies ``template/`` under the user's name.

ddp-runner new my_project
ddp-runner new work/my_project
"""

import argparse
import errno
import importlib.util
import keyword
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from ddp_runner import __version__
from ddp_runner.errors import UserError, one_line
from ddp_runner.new.origin import Origin, origin

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel template/ lies inside the package, in a checkout beside it.
IN_WHEEL = PACKAGE / "template"
TEMPLATE = IN_WHEEL if IN_WHEEL.is_dir() else PACKAGE.parent / "template"
PLACEHOLDER = "my_project"  # the template's own name
REQUIREMENT = '"ddp-runner"'  # in its pyproject.toml
NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?")  # what a distribution may be called, too
TAKEN = {
    "conf",
    "data",
    "hydra_plugins",
    "outputs",
    "tests",
}  # folders of every project, and Hydra's
# What the project itself takes from others, whether or not it is installed where the command runs.
NEEDED = {
    *("ddp_runner", "torch", "sklearn", "scikit_learn", "hydra", "hydra_core", "omegaconf"),
    *("numpy", "scipy", "pytest", "pluggy", "iniconfig", "hatchling", "packaging", "pathspec"),
    *("trove_classifiers", "editables", "pip", "uv", "setuptools", "wheel"),
}
EXIT_USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit.

    Args:
        arguments: the words after ``new``; None: those of this process.
    """
    try:
        run(sys.argv[2:] if arguments is None else arguments)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except BrokenPipeError:  # for example `| head`; the project is written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: Sequence[str]) -> None:
    """Create the project that a command line names, and print what to do next.

    Raises:
        UserError: no folder is named, its name cannot be a package's, or it holds something.
    """
    args, unknown = _parser().parse_known_args(arguments)
    words = [*args.folder, *unknown]
    if len(words) != 1 or unknown:
        given = f", not {' '.join(words)}" if words else ""
        raise UserError(f"new takes the folder of one project{given}; write ddp-runner new NAME")
    folder = Path(words[0])
    found = origin()
    try:
        validate_folder(folder)
        name = folder.resolve().name
        validate_name(name)
        paths = create(folder, name, found)
    except OSError as error:
        where = error.filename or folder
        reason = error.strerror or one_line(error)
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free some" if is_full else "give a folder that can be written"
        raise UserError(f"{where}: {reason}; {fix}") from error
    print(f"created {folder}, {len(paths)} files")
    if found.missing is not None:
        print(f"ddp-runner came from {found.missing}, which is gone: correct it in pyproject.toml")
    print(f"  cd {shlex.quote(str(folder))}")
    print(f"  uv run python -m {name}    # train")
    print("  uv run pytest    # test")


def create(folder: Path, name: str, found: Origin) -> list[Path]:
    """Write the template under a name; return the paths below the folder.

    What is written by then is removed again if it cannot be written whole.

    Raises:
        UserError: the folder holds something already, or is a file.
        OSError: it cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give the name of a new folder")
    if folder.exists() and any(_others(folder)):
        raise UserError(f"{folder} exists and is not empty; give the name of a new folder")
    made = list[Path]()
    try:
        return _copy_template(folder, name, found, made)
    except BaseException:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise


def _copy_template(folder: Path, name: str, found: Origin, made: list[Path]) -> list[Path]:
    """Write the files of the template; add to `made` every folder and file that is new."""
    sources = [path for path in sorted(TEMPLATE.rglob("*")) if path.is_file()]
    written = list[Path]()
    for source in sources:
        relative = source.relative_to(TEMPLATE)
        if "__pycache__" in relative.parts:
            continue
        text = source.read_text(encoding="utf-8").replace(PLACEHOLDER, name)
        if relative.name == "pyproject.toml":
            text = text.replace(REQUIREMENT, f'"ddp-runner>={__version__}"') + found.lines()
        target = Path(str(relative).replace(PLACEHOLDER, name))
        path = folder / target
        for parent in [one for one in reversed(path.parents) if not one.exists()]:
            parent.mkdir()
            made.append(parent)
        made.append(path)
        path.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def validate_folder(folder: Path) -> None:
    """Reject a folder that no name belongs to, or that a dead link stands for.

    Raises:
        UserError: it says which, and what to write instead.
        OSError: the file system cannot have such a folder.
    """
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise UserError(
                f"{path} is a link to {path.readlink()}, which does not exist; give the name of a "
                "new folder"
            )
    if not folder.resolve().name:
        raise UserError(f"{folder} is no folder of a project; write ddp-runner new {PLACEHOLDER}")


def validate_name(name: str) -> None:
    """Reject a name that Python cannot import, or that would hide another package.

    Raises:
        UserError: it says which, and what to write instead.
    """
    if not NAME.fullmatch(name):
        raise UserError(f"{name} cannot be the name of a Python package; write {_nearest(name)}")
    if keyword.iskeyword(name):
        raise UserError(f"{name} is a word of Python's own; write {name}_project")
    taken_by = _taken_by(name)
    if taken_by:
        raise UserError(f"{name} would hide {taken_by}; write {_nearest(name)}")


def _nearest(name: str) -> str:
    """Return the valid name that is most like an invalid one."""
    # Without the accents of its letters, which are characters of their own after this.
    letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    meant = re.sub(r"[^A-Za-z0-9]+", "_", letters).strip("_")
    if not meant:
        return PLACEHOLDER
    if not NAME.fullmatch(meant):
        return f"project_{meant}"
    return f"{meant}_project" if keyword.iskeyword(meant) or _taken_by(meant) else meant


def _taken_by(name: str) -> str | None:
    """Return what a package of this name would hide; None: nothing."""
    if name in sys.stdlib_module_names:
        return f"Python's module {name}"
    if name.lower() in NEEDED:
        return f"the package {name.lower()}, which the project needs"
    if name in TAKEN:
        return f"the folder {name} of the project"
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:  # a folder without __init__.py has none
        return f"the package {name}, which is installed"
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return f"the distribution {name}, which is installed"


def _others(folder: Path) -> list[Path]:
    """Return what a folder holds besides an empty repository's own."""
    return [path for path in folder.iterdir() if path.name != ".git"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddp-runner new",
        description="Create a small project of your own that trains and tests: a package, its "
        "config groups, a test and a README.",
        epilog="Exit code: 0; 2 for a mistake in the command.",
    )
    parser.add_argument("folder", nargs="*", metavar="NAME", help="its folder, and its package")
    return parser
