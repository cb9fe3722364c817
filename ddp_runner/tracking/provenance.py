"""The commit of the user's code, and the versions of the packages that it uses. Torch-free."""

import platform
import subprocess
from importlib import metadata

from ddp_runner import __version__

GIT_TIMEOUT_S = 2.0
PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard")


def git_revision() -> str | None:
    """Return the commit of the current folder, with ``+dirty`` if tracked files have changed.

    None outside a git repository, without git, or if git takes longer than 2 s.
    """
    # With all tags excluded, describe prints the full hash, so one call returns both facts.
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
    except (OSError, subprocess.TimeoutExpired):  # no git, or a stuck network disk
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def versions() -> dict[str, str | None]:
    """Return the versions of Python, ddp_runner and the packages that decide the results."""
    return {
        "python": platform.python_version(),
        "ddp_runner": __version__,
        **{package: metadata.version(package) for package in PACKAGES},
    }
