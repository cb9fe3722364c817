"""A user's mistake under torchrun, which would start the ranks again for it. Torch-free.

All attempts of an agent share a folder, which it removes at its end. The rank that notes a mistake
there prints it: others of this machine, and those of further attempts, end in silence.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ddp_runner.dist_env import prints_errors


def is_noted(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether an earlier attempt of this agent ended by a mistake: a restart mends none."""
    note = _note(os.environ if environ is None else environ)
    return note is not None and note.exists()


def note_mistake(sentence: str, environ: Mapping[str, str] | None = None) -> bool:
    """Note a mistake for the ranks and attempts to come; return whether this rank prints it."""
    note = _note(os.environ if environ is None else environ)
    if note is None:
        return prints_errors(environ)
    try:
        with note.open("x", encoding="utf-8") as file:
            file.write(sentence)
    except FileExistsError:
        return False
    except OSError:  # the disk is full
        return prints_errors(environ)
    return True


def _note(environ: Mapping[str, str]) -> Path | None:
    """Return the file for it in the folder of torchrun's agent; None without one.

    The agent gives each rank a file for its error: FOLDER/attempt_N/RANK/error.json.
    """
    attempt = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    is_agents = re.fullmatch(r"attempt_\d+", attempt.name) is not None
    return attempt.with_name("mistake.txt") if is_agents else None
