"""The list of keys is made from the schema: complete, and the same in --help and on its page."""

from dataclasses import asdict
from pathlib import Path

from configs import compose_raw

from ddp_runner.cli.compose import register
from ddp_runner.config.fields import walk
from ddp_runner.config.identity import leaves
from ddp_runner.config.keys import help_text, page, shown_default
from ddp_runner.config.schema import Config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "keys.md"


def test_every_key_of_the_schema_has_a_meaning() -> None:
    """In the order of the schema; a key without a comment would be listed without a word."""
    keys = list(walk(Config()))
    schema = [key for key, value in leaves(asdict(Config())) if value != {}]
    assert [key.name for key in keys if key.value != {}] == schema
    assert [key.name for key in keys if not key.rule.doc] == []


def test_a_default_is_written_as_it_is_given() -> None:
    """Each can be copied to a command line."""
    register()
    compose_raw(*(f"{key.name}={shown_default(key.value)}" for key in walk(Config())))


def test_the_page_is_up_to_date() -> None:
    """Make it again with `python -m ddp_runner.config.keys > docs/keys.md`."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_page_has_the_range_of_a_number() -> None:
    """It stands beside the key, for the page as for the error."""
    rows = [line for line in page().splitlines() if line.startswith("| `launch.join_timeout_s`")]
    assert "number of seconds, 1 or greater, 31536000 or less" in rows[0]


def test_help_has_the_keys() -> None:
    """Each key has its type, range and default, and its meaning below."""
    assert (
        "train.epochs=10  (whole number, greater than 0)\n    passes over the training set\n"
        in help_text()
    )
