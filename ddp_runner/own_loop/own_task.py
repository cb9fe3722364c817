"""``task=PACKAGE.MODULE.FUNCTION``: calls a user's function as the task of a rank."""

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
from ddp_runner.rank.records import log_facts
from ddp_runner.rank.session import Session
from ddp_runner.seeds import seed_all
from ddp_runner.tracking.start_block import placement, shown_path


def run_own_loop(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Call the task's function with a ``Run`` and the keys under loop. Collective.

    The status is PREEMPTED if ``Run.should_stop`` returned True, else COMPLETED.

    Raises:
        UserError: the function does not accept the keys, or raised this error.
        Exception: the function's exception, with a note of the line in its own code.
    """
    config = session.config
    if session.mode.engine is not local_engine:
        raise UserError(
            f"parallelism={config.parallelism.get('name')} computes the steps of a run, and a "
            "loop of your own computes its own steps",
            "write parallelism=ddp",
        )
    function = find(config.task, key="task", allowed=config.allowed_targets)
    arguments = {
        key: construct(value, key=f"loop.{key}", allowed=config.allowed_targets)
        for key, value in config.loop.items()
    }
    validate_arguments(function, arguments, target=config.task)
    shown = session.job.secrets.written(config).loop
    call = f"{config.task}({', '.join(f'{key}={value}' for key, value in shown.items())})"
    facts = {"task": call, **placement(config, session.env, session.devices)}
    log_facts(session, facts, explains=True)
    seed_all(config.seed)  # all ranks build equal modules
    with ExitStack() as stack:
        run = Run(session, stop_requested=stop_requested, stack=stack)
        with line_noted(function):
            function(run, **arguments)
        return finish(run)


def validate_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, target: str
) -> None:
    """Reject unknown and missing keys under loop, and a function that takes no run."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind == parameters[0].KEYWORD_ONLY:
        raise UserError(f"task ({target}) takes no run", f"write def {function.__name__}(run, …)")
    accepted = keywords(function) - {parameters[0].name}
    for key in arguments:
        if not accepted & {key, ANY}:
            raise unknown_key(key, "loop", target=target, known=accepted)
    for parameter in parameters[1:]:
        name = parameter.name
        is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not is_variadic and name not in arguments:
            raise UserError(f"{target} needs loop.{name}", f"add +loop.{name}=VALUE")


@contextmanager
def line_noted(function: Callable[..., Any]) -> Iterator[None]:
    """Add a note to an exception: the innermost line of its traceback in the user's package."""
    try:
        yield
    except Exception as error:
        package = str(function.__module__).partition(".")[0]
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
                error.add_note(f"{shown_path(Path(frame.f_code.co_filename))}, line {line}")
                break
        raise
