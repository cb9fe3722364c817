"""Hydra's inner parts that the program uses: a version of Hydra without them fails here first."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import ValidationError
from tiers import first_of

from ddp_runner.cli.command_line import parse
from ddp_runner.cli.compose import compose, register
from ddp_runner.cli.hydra_adapter import (
    ROOT_CONFIG,
    is_grid,
    job_composer,
    opened,
    parse_options,
    quoted,
    run_hydra,
)
from ddp_runner.config.schema import CONFIG_DIR


def test_the_parser_has_every_option_that_is_read() -> None:
    """Their values are attributes of these names."""
    parsed, unknown = parse_options(["seed=1"])
    assert (parsed.overrides, unknown) == (["seed=1"], [])
    flags = ("help", "hydra_help", "cfg", "info", "shell_completion", "multirun", "run")
    assert not any(getattr(parsed, name) for name in flags)
    for name in ("config_dir", "config_name", "config_path", "experimental_rerun"):
        assert getattr(parsed, name) is None


def test_the_grid_is_reported_from_other_sweepers() -> None:
    """By the class that the composed config names."""
    assert is_grid(compose(parse([])).hydra.sweeper)
    assert not is_grid(OmegaConf.create({"_target_": "hydra_plugins.other.Sweeper"}))


GRIDS = (
    "optimizer.lr=0.1 model=toy_slow ++train.added=3 +model.extra={a:1}",
    "~model.name name=${seed} data_root=${oc.env:HOME}",
    "metrics=[top_k,pixel_accuracy] ~scheduler +own=three",
    "train.no=1",
    "seed=1",
    "seed=2 model=toy",
    "optimizer=adam optimizer.lr=0.1 optimizer.lr=0.2",
    "hydra.job.name=other seed=3 +experiment=null",
    "model={a:1}",
    "train.epochs=many",
    "model=no",
    "seed=1,2",
    "model@other=toy",
    "other@train=1",
)


@pytest.mark.parametrize("overrides", first_of(GRIDS, num_quick=4))
def test_a_job_is_composed_as_hydra_composes_it(tmp_path: Path, overrides: str) -> None:
    """With the same keys, flags and hydra node, or the same error, whatever came before it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "three.yaml").write_text("# @package _global_\nname: three\n")
    common = (
        "model=convnet",
        f"hydra.searchpath=[{tmp_path}]",
        "hydra.job.config.override_dirname.kv_sep=:",
        "hydra.sweep.subdir='${hydra:job.num}'",
    )
    with grid_loader(*common) as (loader, composed):
        compose_job = job_composer(loader, composed)
        for job in (["seed=7"], overrides.split(), ["seed=8", "train.epochs=9"]):
            expected, fault = outcome(partial(loader.load_sweep_config, composed), job)
            found, own_fault = outcome(compose_job, job)
            assert own_fault == fault
            if fault is not None:
                continue
            assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
            assert found == expected
            assert flags(found) == flags(expected)


def test_the_options_of_groups_are_composed_once_for_all_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four choices and a hundred jobs: Hydra reads its YAMLs four times."""
    with grid_loader("model=toy") as (loader, composed):
        reads = Mock(side_effect=loader.load_sweep_config)
        monkeypatch.setattr(loader, "load_sweep_config", reads)
        compose_job = job_composer(loader, composed)
        for seed, optimizer, model in product(range(25), ("sgd", "adam"), ("toy", "convnet")):
            job = compose_job([f"seed={seed}", f"optimizer={optimizer}", f"model={model}"])
            assert (job.seed, job.model.name) == (seed, model)
    assert reads.call_count == 4


@contextmanager
def grid_loader(*overrides: str) -> Iterator[tuple[ConfigLoader, DictConfig]]:
    """Give Hydra's loader, and what all jobs of a grid have in common."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), job_name="ddp_runner", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        yield loader, loader.load_configuration(ROOT_CONFIG, list(overrides), RunMode.MULTIRUN)


def outcome(
    compose_job: Callable[[list[str]], DictConfig], job: list[str]
) -> tuple[DictConfig, str | None]:
    """Return what a job is composed to, and with which error it is not."""
    try:
        return compose_job(job), None
    except (HydraException, ValueError) as error:
        return OmegaConf.create(), repr(error)


def flags(node: Container) -> list[object]:
    """Return the flags of a config and of all that it contains."""
    keys = node if isinstance(node, DictConfig) else range(len(node))
    children = [] if node._is_none() or node._is_missing() else map(node._get_node, keys)
    below = [
        flags(one) for one in children if OmegaConf.is_config(one) and not one._is_interpolation()
    ]
    return [node._metadata.flags, *below]


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
    """``hydra_errors`` asks the exception for them, not its text."""
    with pytest.raises(HydraException) as raised:
        compose(parse(["train.epochs=many"]))
    cause = raised.value.__cause__
    assert isinstance(cause, ValidationError)
    assert (cause.full_key, cause.value) == ("train.epochs", "many")


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
