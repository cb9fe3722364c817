"""The schema's object: what OmegaConf lets into it, and no run can use."""

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from configs import config_error

from ddp_runner.config.schema import Config


def lists_of_texts(kind: Any = Config, prefix: str = "") -> Iterator[str]:
    """Yield the keys that the schema makes lists of texts."""
    for one in fields(kind):
        if is_dataclass(one.type):
            yield from lists_of_texts(one.type, f"{prefix}{one.name}.")
        elif list[str] in (one.type, *typing.get_args(one.type)):
            yield prefix + one.name


KEYS = list(lists_of_texts())


def test_the_keys_are_found() -> None:
    """Those of groups of keys, too."""
    assert {"tags", "params.freeze", "collectives.ops", "checkpoint.export"} <= {*KEYS}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("item", ["[a]", "{a: 1}"])
def test_an_item_of_texts_is_a_text(key: str, item: str) -> None:
    """One line, instead of a traceback from whoever reads it first."""
    sentence = config_error(f"{key}=[b,{item}]")
    assert sentence == f"{key}[1] ({item}) must be a text; write {key}=[ONE,OTHER]"
