"""Hydra's own tests of a launcher, on ours: any task function runs, not only this program's.

Left out is Hydra's BatchedSweeperTestSuite: it tests a sweeper, with a plug-in of Hydra's sources.
"""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import (
    IntegrationTestSuite,
    LauncherTestSuite,
)
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf

from ddp_runner.cli.command_line import parse
from ddp_runner.cli.compose import compose
from hydra_plugins.ddp_runner_launcher import SweepLauncher

NAME = "hydra_plugins.ddp_runner_launcher.SweepLauncher"


@pytest.fixture(autouse=True)
def _launcher(hydra_restore_singletons: None) -> None:
    """Let Hydra's own test configs choose the launcher; ours name it in conf/hydra/launcher.

    They expect the behaviour of a program that asks for no version, which another test of this
    process may have asked for.
    """
    state = Singleton.get_state()
    Singleton.set_state(
        {
            **state,
            "instances": {k: v for k, v in state["instances"].items() if k is not VersionBase},
        }
    )
    ConfigStore.instance().store(
        group="hydra/launcher", name="ddp_runner", node={"_target_": NAME}, provider="test"
    )


@pytest.mark.parametrize(("launcher_name", "overrides"), [("ddp_runner", [])])
class TestLauncher(LauncherTestSuite):
    """Sweeps over one job and several, over groups, with overrides and resolvers."""


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({}, ["-m", f"hydra.launcher._target_={NAME}"])],
)
class TestIntegration(IntegrationTestSuite):
    """Whole programs of others with hydra.main, which have no config group for the launcher."""


def test_hydra_finds_the_launcher() -> None:
    """By its namespace: nothing registers it."""
    found = [
        f"{one.__module__}.{one.__qualname__}" for one in Plugins.instance().discover(Launcher)
    ]
    assert NAME in found


class Batches:
    """A task that takes whole batches, as this program's sweep does."""

    def run_batch(self, composing: Iterable[DictConfig]) -> list[float | str | None]:
        """Return a number for the first job, and why the second has none."""
        composed = list(composing)
        assert [job.hydra.job.num for job in composed] == [3, 4]
        return [float(composed[0].seed), "it failed"]


def test_a_batch_is_handed_over_whole() -> None:
    """Each result has all that Hydra's own launcher would give."""
    loader = SimpleNamespace(
        load_sweep_config=lambda _, overrides: compose(parse(["model=toy", *overrides]))
    )
    launcher = SweepLauncher()
    launcher.setup(
        hydra_context=SimpleNamespace(config_loader=loader),
        task_function=Batches(),
        config=OmegaConf.create(),
    )
    results = launcher.launch([["seed=5"], ["seed=6"]], initial_job_idx=3)
    assert [one.return_value for one in results] == [5.0, "it failed"]
    for one, seed in zip(results, (5, 6), strict=True):
        assert one.status == JobStatus.COMPLETED
        assert one.overrides == ["model=toy", f"seed={seed}"]
        assert one.cfg is not None
        assert (one.cfg.seed, one.cfg.model.name, "hydra" in one.cfg) == (seed, "toy", False)
        assert one.hydra_cfg is not None
        assert one.hydra_cfg.hydra.job.num == seed - 2
        assert one.task_name == one.hydra_cfg.hydra.job.name
        assert one.working_dir == str(Path.cwd())
