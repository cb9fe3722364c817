"""``task=PACKAGE.MODULE.FUNCTION``: calls a function of the user's own as the task of a rank."""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ddp_runner.config.instantiate import construct, find, keywords
from ddp_runner.config.signatures import ANY, unknown_key
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.own_loop.run import Run, finish
from ddp_runner.parallelism.mode import local_engine
from ddp_runner.rank.records import log_start
from ddp_runner.rank.session import Session
from ddp_runner.seeds import seed_all
from ddp_runner.tracking.start_block import placement, shown_path


def run_own_loop(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Call the function that the task names with a ``Run`` and the keys under loop.

    Collective: every rank must call.

    Returns:
        PREEMPTED if ``Run.should_stop`` has returned True, else COMPLETED.

    Raises:
        UserError: the function does not take the keys, or raised one.
        Exception: whatever else the function raised, with the place of its own code as a note.
    """
    config = session.config
    if session.mode.engine is not local_engine:
        raise UserError(
            f"parallelism={config.parallelism.get('name')} computes its steps by an engine, and a "
            "loop of your own computes them itself; write parallelism=ddp"
        )
    function = find(config.task, key="task", allowed=config.allowed_targets)
    arguments = {
        key: construct(value, key=f"loop.{key}", allowed=config.allowed_targets)
        for key, value in config.loop.items()
    }
    validate_arguments(function, arguments, named=config.task)
    written = session.job.secrets.written(config).loop
    given = ", ".join(f"{key}={value}" for key, value in written.items())
    facts = {"task": f"{config.task}({given})", **placement(config, session.env, session.devices)}
    log_start(session, facts, explains=True)
    seed_all(config.seed)  # equal modules on all ranks
    with ExitStack() as stack:
        run = Run(session, stop_requested=stop_requested, stack=stack)
        with place_noted(function):
            function(run, **arguments)
        return finish(run)


def validate_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, named: str
) -> None:
    """Reject keys under loop that the function does not take, and missing ones.

    Raises:
        UserError: an argument is unknown or missing, or the function takes no run.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # written in C
        return
    if not parameters or parameters[0].kind == parameters[0].KEYWORD_ONLY:
        raise UserError(f"task ({named}) takes no run; write def {function.__name__}(run, …)")
    known = keywords(function) - {parameters[0].name}
    for key in arguments:
        if not known & {key, ANY}:
            raise unknown_key(key, "loop", target=named, known=known)
    for one in parameters[1:]:
        is_one = one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        if is_one and one.default is one.empty and one.name not in arguments:
            raise UserError(f"{named} needs loop.{one.name}; add +loop.{one.name}=VALUE")


@contextmanager
def place_noted(function: Callable[..., Any]) -> Iterator[None]:
    """Add to an exception, as a note, the last line of the function's own package on its way."""
    try:
        yield
    except Exception as error:
        package = str(function.__module__).partition(".")[0]
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
                error.add_note(f"{shown_path(Path(frame.f_code.co_filename))}, line {line}")
                break
        raise
