"""What OmegaConf lets into a config, and is of no use whatever its key means."""

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import config_error, resolved

from ddp_runner.config.schema import Config
from ddp_runner.tracking.run_dir import RunDir


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


def test_a_number_that_python_does_not_print_is_one_line(tmp_path: Path) -> None:
    """Of a run folder that somebody has changed."""
    run_dir = RunDir(tmp_path)
    run_dir.freeze(resolved("model=toy")[0], overrides=(), choices={"model": "toy"})
    frozen = yaml.safe_load(run_dir.config.read_text())
    number = f"0x{'f' * 5000}"
    run_dir.config.write_text(yaml.safe_dump(frozen).replace("seed: 0\n", f"seed: {number}\n"))
    assert config_error(f"resume={tmp_path}").startswith("seed is a number of more than 1024 bits")
