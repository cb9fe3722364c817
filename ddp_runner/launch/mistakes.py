"""Under torchrun: print a user's mistake once, and do not retry it. Torch-free.

All attempts of an agent share a folder, which the agent removes when it ends. The first rank that
creates the file ``mistake`` there prints; other ranks and later attempts end silently.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ddp_runner.dist_env import prints_errors


def is_noted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a mistake ended an earlier attempt of this agent: a restart fixes nothing."""
    note = _note(environ)
    return note is not None and note.exists()


def note_mistake(environ: Mapping[str, str] = os.environ) -> bool:
    """Note a mistake for other ranks and later attempts; return whether this rank prints it."""
    if (note := _note(environ)) is None:
        return prints_errors(environ)
    try:
        note.touch(exist_ok=False)
    except FileExistsError:  # another rank was first
        return False
    return True


def _note(environ: Mapping[str, str]) -> Path | None:
    """Return FOLDER/mistake if a rank's file is FOLDER/attempt_N/RANK/error.json."""
    attempt = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return attempt.with_name("mistake") if re.fullmatch(r"attempt_\d+", attempt.name) else None
