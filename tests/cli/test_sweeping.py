"""The jobs of a sweep are composed as Hydra composes them, tens of times sooner."""

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
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from tiers import first_of

from ddp_runner.cli import sweeping
from ddp_runner.cli.command_line import parse
from ddp_runner.cli.compose import compose, register
from ddp_runner.cli.hydra_adapter import ROOT_CONFIG
from ddp_runner.cli.sweeping import job_composer
from ddp_runner.config.schema import CONFIG_DIR

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
        compose_job = partial(job_composer(parse(common), composed), number=3)
        for job in (["seed=7"], overrides.split(), ["seed=8", "train.epochs=9"]):
            expected, fault = outcome(partial(loader.load_sweep_config, composed), job)
            found, own_fault = outcome(compose_job, job)
            assert own_fault == fault
            if fault is not None:
                continue
            assert (found.hydra.job.num, found.hydra.job.id) == (3, "3")
            for one in (found, expected):
                with open_dict(one):
                    one.hydra.job.num, one.hydra.job.id = 0, "0"
                    # Each composition is told the folders again.
                    one.hydra.overrides.hydra, one.hydra.runtime.config_sources = [], []
            assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
            assert found == expected
            assert flags(found) == flags(expected)


def test_the_options_of_groups_are_composed_once_for_all_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four choices and a hundred jobs: Hydra reads its YAMLs four times."""
    command = parse(["-m", "model=toy"])
    reads = Mock(side_effect=sweeping.compose_config)
    monkeypatch.setattr(sweeping, "compose_config", reads)
    compose_job = job_composer(command, compose(command))
    for seed, optimizer, model in product(range(25), ("sgd", "adam"), ("toy", "convnet")):
        words = [f"seed={seed}", f"optimizer={optimizer}", f"model={model}"]
        job = compose_job(words, seed)
        assert (job.seed, job.model.name, job.hydra.job.num) == (seed, model, seed)
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
        return OmegaConf.create(), type(error).__name__


def flags(node: Container) -> list[object]:
    """Return the flags of a config and of all that it contains."""
    keys = node if isinstance(node, DictConfig) else range(len(node))
    children = [] if node._is_none() or node._is_missing() else map(node._get_node, keys)
    below = [
        flags(one) for one in children if OmegaConf.is_config(one) and not one._is_interpolation()
    ]
    return [node._metadata.flags, *below]
