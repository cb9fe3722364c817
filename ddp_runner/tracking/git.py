"""The commits of a run's code, and the changes that no commit has. Torch-free.

Without git, without a repository, or if git fails or takes longer than 2 s, a fact is None: a run
does not depend on git.
"""

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ddp_runner.config.schema import PACKAGE

GIT_TIMEOUT_S = 2.0
MOST_BYTES = 2**20  # of the changes in one repository
# A repository's own config may name commands for git to run. These options skip them, except clean
# filters, which Git LFS needs.
GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
# With all tags excluded, describe prints the full hash, so one call returns both facts.
DESCRIBE = "describe --always --abbrev=40 --exclude=* --dirty=+dirty"
# Without --binary: large files would take the place of code, and their hashes tell them apart.
DIFF = (
    "diff HEAD --no-ext-diff --no-textconv --no-color --no-renames --no-relative --full-index "
    "--unified=3 --src-prefix=a/ --dst-prefix=b/"
)
FOLDERS = {"git_revision": Path(), "runner_revision": PACKAGE}  # by field of run.json


def git_revisions() -> dict[str, str | None]:
    """Return the commits of the current folder and of a checkout of ddp_runner outside of it.

    The keys are fields of run.json. ``+dirty`` follows a commit if tracked files have changed.
    """
    checkout = PACKAGE.parent
    is_apart = (checkout / ".git").exists() and _git("rev-parse --show-toplevel") != str(checkout)
    return {
        field: _git(DESCRIBE, folder=folder) if folder == Path() or is_apart else None
        for field, folder in FOLDERS.items()
    }


def uncommitted_changes(revisions: Mapping[str, Any]) -> str:
    """Return how tracked files differ from the commits of ``git_revisions``; empty if none does.

    Bytes that are not UTF-8 are surrogate escapes.
    """
    parts = []
    for field, folder in FOLDERS.items():
        commit, _, is_dirty = (revisions.get(field) or "").partition("+")
        if is_dirty and (diff := _git(DIFF, folder=folder)):
            parts.append(f"# Changes since {field} {commit}\n{diff}\n")
    return "".join(parts)


def code_version(record: Mapping[str, Any]) -> str:
    """Return the code of a run's last session in a few words, from an unchecked run.json."""
    words = {"git_revision": "", "runner_revision": "with ddp_runner ", "code_diff": "with "}
    known = [f"{word}{record[field]}" for field, word in words.items() if record.get(field)]
    text = " ".join(known) or "unknown"
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28}\b", r"\1", text)  # short hashes


def _git(words: str, *, folder: Path = FOLDERS["git_revision"]) -> str | None:
    """Return the first MOST_BYTES that a git command prints, and a line about the rest."""
    try:
        with TemporaryFile() as output:  # of a pipe, git's own children could keep the other end
            subprocess.run(
                [*GIT, *words.split()],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=GIT_TIMEOUT_S,
                check=True,
            )
            size = output.seek(0, os.SEEK_END)
            output.seek(0)
            text = output.read(MOST_BYTES)
            if size > MOST_BYTES:
                text = text[: text.rfind(b"\n") + 1]
                output.seek(0)
                digest = hashlib.file_digest(output, "sha256").hexdigest()
                text += b"# %d bytes are left out; " % (size - len(text))
                text += f"all have SHA-256 {digest}".encode()
    except (OSError, subprocess.SubprocessError):  # no git, or a stuck network disk
        return None
    return text.decode(errors="surrogateescape").removesuffix("\n")
