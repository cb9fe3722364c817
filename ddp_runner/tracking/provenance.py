"""What made a run: the commit of the user's code, and the versions of what it uses. Torch-free."""

import platform
import subprocess
from importlib import metadata

from ddp_runner import __version__

GIT_TIMEOUT_S = 2.0
PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard")


def git_revision() -> str | None:
    """Return the commit of the current folder, with ``+dirty`` if tracked files differ from it.

    None outside a git repository, without git, or if git takes longer than 2 s.
    """
    # Excluding every tag makes describe print the full hash: one call returns both facts.
    describe = "git --no-optional-locks describe --always --abbrev=40 --exclude=* --dirty=+dirty"
    try:
        result = subprocess.run(
            describe.split(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def versions() -> dict[str, str | None]:
    """Return the installed version of Python and of each package; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "ddp_runner": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
