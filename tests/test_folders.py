"""Run folders of any name, as the user is told of them."""

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ddp_runner.folders import resume_argument


@pytest.mark.parametrize(
    "name",
    [
        *("outputs/run", "/tmp/2026-11-21_10-30-00", "outputs/s/world_size=2,optimizer.lr=0.1"),
        *("with space", "it's", 'a "b"', "a\\'b", "$HOME", "[x]{y: z}", "日本", "a;b|c&d"),
    ],
)
def test_a_printed_resume_is_what_shell_and_hydra_take(name: str) -> None:
    """Whatever its name, the folder comes out of both as it went in."""
    (argument,) = shlex.split(resume_argument(Path(name)))
    assert OverridesParser.create().parse_override(argument).value() == name
