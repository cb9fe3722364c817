"""Hydra's own tests of a launcher, on ours: any task function runs, not only this program's.

Left out is Hydra's BatchedSweeperTestSuite: it tests a sweeper, with a plug-in of Hydra's sources.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import (
    IntegrationTestSuite,
    LauncherTestSuite,
)
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf

from ddp_runner.cli.compose import register
from ddp_runner.cli.hydra_adapter import GRID_SWEEPER, ROOT_CONFIG
from ddp_runner.config.schema import CONFIG_DIR
from hydra_plugins.ddp_runner_launcher import SweepLauncher
from hydra_plugins.ddp_runner_sweeper import GridSweeper

pytestmark = pytest.mark.full

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


@pytest.mark.full
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
    """Each result has what a sweeper reads: the overrides, the objective, and no failure."""
    register()
    with initialize_config_dir(str(CONFIG_DIR), job_name="ddp_runner", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        launcher = SweepLauncher()
        launcher.setup(
            hydra_context=SimpleNamespace(config_loader=loader),
            task_function=Batches(),
            config=loader.load_configuration(ROOT_CONFIG, ["model=toy"], RunMode.MULTIRUN),
        )
        results = launcher.launch([["seed=5"], ["seed=6"]], initial_job_idx=3)
    assert [one.return_value for one in results] == [5.0, "it failed"]
    assert [one.overrides for one in results] == [["seed=5"], ["seed=6"]]
    assert {one.status for one in results} == {JobStatus.COMPLETED}


def test_only_hydra_s_own_sweeper_composes_jobs_to_validate_them() -> None:
    """Ours extends it by that alone; the launcher composes all jobs before it starts one."""
    loader = Mock()
    for sweeper, num_composed in ((BasicSweeper, 2), (GridSweeper, 0)):
        one = SimpleNamespace(config_loader=loader, config=OmegaConf.create())
        sweeper.validate_batch_is_legal(one, [["seed=1"], ["seed=2"]])
        assert loader.load_sweep_config.call_count == num_composed
        loader.reset_mock()
    assert f"{GridSweeper.__module__}.{GridSweeper.__name__}" == GRID_SWEEPER
