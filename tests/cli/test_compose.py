"""Hydra's inner parts that the program uses: a version of Hydra without them fails here first."""

import os
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from ddp_runner.cli.command import compose, parse
from ddp_runner.cli.compose import opened, parse_options, quoted, run_hydra, yaml_of


def test_the_parser_has_every_option_that_is_read() -> None:
    """Their values are attributes of these names."""
    parsed, unknown = parse_options(["seed=1"])
    assert (parsed.overrides, unknown) == (["seed=1"], [])
    flags = ("help", "hydra_help", "cfg", "info", "shell_completion", "multirun", "run")
    assert not any(getattr(parsed, name) for name in flags)
    for name in ("config_dir", "config_name", "config_path", "experimental_rerun"):
        assert getattr(parsed, name) is None


@pytest.mark.parametrize("text", ["plain", "a b=1,c='d'", r"back\slash", "trailing\\", "${x}", ""])
def test_a_quoted_text_is_read_as_it_was(text: str) -> None:
    """Whatever Hydra's grammar makes of its characters."""
    assert OverridesParser.create().parse_override(f"name={quoted(text)}").value() == text


def test_the_global_that_interpolations_ask_is_set_for_a_while() -> None:
    """``${hydra:...}`` resolves within the block; afterwards the global is what it was before."""
    before = HydraConfig.instance().cfg
    composed = compose(parse(["name=${hydra:job.name}"]))
    with opened(composed) as (raw, node):
        assert raw.name == node.job.name == "ddp_runner"
        assert "hydra" not in raw
    assert HydraConfig.instance().cfg is before


def test_an_error_has_the_key_and_the_value() -> None:
    """``messages`` asks the exception for them, not its text."""
    with pytest.raises(HydraException) as raised:
        compose(parse(["train.epochs=many"]))
    cause = raised.value.__cause__
    assert isinstance(cause, ValidationError)
    assert (cause.full_key, cause.value) == ("train.epochs", "many")


def test_an_error_of_reading_a_yaml_names_the_file(tmp_path: Path) -> None:
    """A frame of Hydra has it; elsewhere no file is known."""
    path = tmp_path / "optimizer" / "odd.yaml"
    path.parent.mkdir()
    path.write_bytes(b"a: \xff")
    with pytest.raises(UnicodeDecodeError) as raised:
        compose(parse([f"--config-dir={tmp_path}", "optimizer=odd"]))
    assert yaml_of(raised.value) == str(path)
    assert yaml_of(ValueError("ours")) == "a YAML"


def test_hydra_shows_the_config_and_leaves_the_process_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sys.argv and HYDRA_FULL_ERROR are set while Hydra runs only; no folder is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ddp_runner", "as", "before"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    command = parse(["--cfg", "job", "model=toy", "seed=7"])
    assert command.only_shows
    compose(command)
    run_hydra(lambda _: pytest.fail("nothing is to run"), command.arguments())
    assert OmegaConf.create(capsys.readouterr().out).seed == 7
    assert sys.argv == ["ddp_runner", "as", "before"]
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert list(tmp_path.iterdir()) == []
