"""The command ``python -m ddp_runner``, alone or as a rank of torchrun, srun or mpirun."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from ddp_runner.cli.mistakes import validate_words
from ddp_runner.dist_env import RANKS, mistake_is_noted, note_mistake
from ddp_runner.errors import UserError
from ddp_runner.host.processes import handled_signals, start_fork_server, stop_fork_server
from ddp_runner.host.streams import keep_streams, print_line
from ddp_runner.job import EXIT_COMPLETED, EXIT_USER_ERROR
from ddp_runner.tracking.run_record import versions

# Words of commands that start no ranks, or not here, or as only Hydra or a resumed run can tell.
NO_EARLY_RANKS = ("-", "resume=", "hydra/", "hydra.job", "hydra.mode", "launch.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, by default this process's; exit with a code of docs/launching.md."""
    started_at = time.time()
    warnings: list[str] = []  # about stdout and stderr
    keep_streams(warnings.append)
    # Torchrun's ranks other than 0 will point descriptor 2 at their log: errors go to this copy.
    stderr, descriptor = sys.stderr, os.dup(2) if "TORCHELASTIC_RUN_ID" in os.environ else 2
    for signum in handled_signals():
        # No rank has started yet, so there is nothing to save.
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    words = sys.argv[1:] if arguments is None else arguments
    arguments = ["verbose=true" if word == "-v" else word for word in words]
    if "--version" in arguments:
        print(", ".join(f"{name} {number}" for name, number in versions().items()))
        sys.exit()
    if mistake_is_noted():
        sys.exit(EXIT_USER_ERROR)
    try:
        validate_words(arguments)
        if not any(word.lstrip("+~").startswith(NO_EARLY_RANKS) for word in arguments) and (
            {"COMP_LINE", *RANKS}.isdisjoint(os.environ)
        ):
            with suppress(OSError):  # it is reported once the config is known
                start_fork_server()  # it imports torch while this process imports Hydra
        sys.exit(run(arguments, started_at=started_at, warnings=warnings))
    except Exception as error:
        stop_fork_server()  # else it would import torch first, and keep stderr open
        if "COMP_LINE" in os.environ:  # a message would be pasted into the completed line
            sys.exit(EXIT_USER_ERROR)
        explained = error if isinstance(error, UserError) else None
        if explained is None:
            from ddp_runner.cli.messages import user_error  # it imports Hydra

            explained = user_error(error, arguments)
        if explained is None or "HYDRA_FULL_ERROR" in os.environ:
            raise
        if note_mistake():
            os.dup2(descriptor, 2)
            print_line(f"error: {explained}", stream=stderr)
        sys.exit(EXIT_USER_ERROR)


def run(arguments: Sequence[str], *, started_at: float, warnings: Sequence[str] = ()) -> int:
    """Run a command: one run, a sweep, or one rank of a run; return the exit code.

    The command began at `started_at`, a time.time(). The `warnings` are printed with the config's.

    Raises:
        UserError: the command or the config is invalid.
        HydraException, OmegaConfBaseException: Hydra cannot compose the config; see ``messages``.
    """
    from ddp_runner.cli.command import compose, parse  # they import Hydra
    from ddp_runner.cli.compose import opened_node
    from ddp_runner.config.load import find_secrets

    command = parse(arguments)
    composed = compose(command)
    if command.asks_help:
        with opened_node(composed) as node:  # Hydra's own code takes three times as long
            print(node.help.template)
        return EXIT_COMPLETED
    from ddp_runner.cli.start_runs import start_runs  # many modules that a mistake does not need

    with find_secrets(composed).hidden_in_errors():
        return start_runs(command, composed, started_at=started_at, warnings=warnings)
