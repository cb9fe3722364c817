"""The keys under loop are the arguments of the user's function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_runner.errors import UserError
from ddp_runner.own_loop.own_task import line_noted, validate_arguments
from ddp_runner.tracking.start_block import shown_path


def plain(run: Any, *, latent: int, lr: float = 0.1) -> None:
    """Take two arguments."""


def any_keyword(run: Any, **settings: Any) -> None:
    """Take whatever comes."""


def nothing(run: Any) -> None:
    """Take the run alone."""


def no_run() -> None:
    """Take nothing at all."""


@pytest.mark.parametrize(
    ("function", "arguments", "sentence"),
    [
        (plain, {"latnet": 1}, "loop.latnet is not a keyword of it; did you mean loop.latent?"),
        (plain, {"x": 1}, "loop.x is not a keyword of it; it has latent, lr"),
        (plain, {}, "it needs loop.latent; add +loop.latent=VALUE"),
        (nothing, {"x": 1}, "loop.x is not a keyword of it; it has none"),
        (no_run, {}, "task (it) takes no run; write def no_run(run, …)"),
    ],
)
def test_arguments_that_do_not_fit(
    function: Callable[..., Any], arguments: dict[str, Any], sentence: str
) -> None:
    """The nearest name is proposed."""
    with pytest.raises(UserError) as error:
        validate_arguments(function, arguments, target="it")
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(plain, {"latent": 2}), (plain, {"latent": 2, "lr": 1}), (any_keyword, {"x": 1})],
)
def test_arguments_that_fit(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """A default, and any keyword."""
    validate_arguments(function, arguments, target="it")


def failing(depth: int) -> None:
    """Fail in the standard library, called from here."""
    if depth:
        failing(depth - 1)
    else:
        int("x" * depth + "?")


def test_the_note_names_the_last_line_of_the_function() -> None:
    """Not that of a library which raised, nor that of the caller."""
    with pytest.raises(ValueError, match="invalid literal") as caught, line_noted(failing):
        failing(3)
    line = failing.__code__.co_firstlineno + 5
    assert caught.value.__notes__ == [f"{shown_path(Path(__file__))}, line {line}"]
