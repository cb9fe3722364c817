"""Starts the fork server before Hydra reads the command: it imports torch meanwhile. Torch-free."""

import os
from collections.abc import Sequence
from contextlib import suppress

from ddp_runner.dist_env import dist_env
from ddp_runner.errors import UserError
from ddp_runner.host.processes import start_fork_server

# Words of commands that start no ranks, not here, or in another environment.
OTHERS = ("-", "hydra/", "hydra.job", "hydra.mode", "launch.")


def start_early(words: Sequence[str]) -> None:
    """Start the fork server if the words look like those of a run on this machine.

    A command that turns out to be something else calls ``stop_fork_server``.
    """
    if any(word.startswith(OTHERS) for word in words) or "COMP_LINE" in os.environ:
        return
    with suppress(OSError, UserError):  # to be reported once the command is read
        for descriptor in range(3):
            os.fstat(descriptor)  # if it is closed, a pipe of the server would get its number
        if dist_env() is None:
            start_fork_server()
