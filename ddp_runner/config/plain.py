"""What OmegaConf lets into a config and no run can use, whatever its key means. Torch-free."""

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from ddp_runner.config.schema import Config, leaves
from ddp_runner.errors import UserError

MOST_BITS = 1024  # of a whole number; Python refuses to print one of some thousand digits


def validate_plain(config: Config) -> None:
    """Reject a list of texts that holds something else, and a number that cannot be printed.

    Raises:
        UserError: naming the key.
    """
    for key, texts in _lists_of_texts(config):
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                shown = str(text).replace("'", "")
                raise UserError(f"{key}[{index}] ({shown}) must be a text; write {key}=[ONE,OTHER]")
    for key, value in leaves(asdict(config)):
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and number.bit_length() > MOST_BITS:
                raise UserError(
                    f"{key} is a number of more than {MOST_BITS} bits; write a smaller one"
                )


def _lists_of_texts(config: Any, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the dotted keys that the schema makes lists of texts, and their values."""
    for one in fields(config):
        value = getattr(config, one.name)
        if is_dataclass(value):
            yield from _lists_of_texts(value, f"{prefix}{one.name}.")
        elif one.type in (list[str], list[str] | None) and value is not None:
            yield prefix + one.name, value
