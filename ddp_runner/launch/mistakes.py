"""A user's mistake under torchrun, which would start the ranks again for it. Torch-free.

All attempts of an agent share a folder, which it removes at its end. The rank that notes a mistake
there prints it: others of this machine, and those of further attempts, end in silence.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ddp_runner.dist_env import prints_errors


def is_noted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether an earlier attempt of this agent ended by a mistake: a restart mends none."""
    note = _note(environ)
    return note is not None and note.exists()


def note_mistake(environ: Mapping[str, str] = os.environ) -> bool:
    """Note a mistake for the ranks and attempts to come; return whether this rank prints it."""
    if (note := _note(environ)) is None:
        return prints_errors(environ)
    try:
        note.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _note(environ: Mapping[str, str]) -> Path | None:
    """Return the file for it in the agent's folder: FOLDER/attempt_N/RANK/error.json is a rank's.

    None where no agent has a folder.
    """
    attempt = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return attempt.with_name("mistake") if re.fullmatch(r"attempt_\d+", attempt.name) else None
