"""Every place where the program depends on how Hydra works inside. Checked on hydra-core 1.3.8.

Hydra documents ``hydra.main``, the compose API, plug-ins and ``HydraConf``. What has no public name
is here: its argument parser, its sweeper of grids (``hydra_plugins`` extends it), how it tells
groups from keys, and the globals that it reads.
``tests/cli/test_hydra_adapter.py`` fails when one of them goes away.
"""

import os
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.defaults_list import Overrides
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.types import TaskFunction
from omegaconf import DictConfig, open_dict

from ddp_runner.config.load import as_written
from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.errors import UserError

GRID_SWEEPER = "hydra_plugins.ddp_runner_sweeper.GridSweeper"  # runs the grids of this program
ROOT_CONFIG = "ddp_runner"  # in conf/; a project of the user's has a config.yaml of its own
OWN_GROUPS = list[str]()  # URLs of the folders that Hydra reads before conf/: those of the command
UNNAMED = "auto"  # in conf/ for hydra.run.dir and its like: the runner names the folder
FULL_ERROR = "HYDRA_FULL_ERROR"  # set: Hydra raises; else it prints an error itself and exits


def parse_options(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return Hydra's options of a command line, with its ``overrides``, and unknown options.

    Raises:
        UserError: an option lacks its value, or does not have the value that it is given.
    """

    def fail(reason: str) -> NoReturn:
        raise UserError(f"{reason}; see --help")

    parser = get_args_parser()
    vars(parser)["error"] = fail  # argparse prints a usage that names no key
    # Intermixed: keys may stand before and after options, as in `model=toy -m seed=1,2`.
    return parser.parse_known_intermixed_args(list(arguments))


def run_hydra(task_function: TaskFunction, arguments: Sequence[str]) -> None:
    """Let ``hydra.main`` answer a command line: a sweep, --help, --cfg, --info, shell completion.

    The launcher calls the task function. ``hydra.main`` reads sys.argv, which meanwhile holds the
    arguments.
    """
    entry = hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=ROOT_CONFIG)
    before, sys.argv[1:] = sys.argv[1:], arguments
    kept = {name: value for name, value in os.environ.items() if name == FULL_ERROR}
    os.environ[FULL_ERROR] = "1"
    try:
        entry(task_function)()
    finally:
        sys.argv[1:] = before
        del os.environ[FULL_ERROR]
        os.environ.update(kept)


def compose_config(overrides: Sequence[str], *, folders: Sequence[str] = ()) -> DictConfig:
    """Return the config of one job, whose overrides are no sweeps, with its ``hydra`` node.

    The `folders` are URLs of the user's own groups. They include those of a hydra.searchpath among
    the overrides, since Hydra reads only the first hydra.searchpath.
    """
    path = [f"hydra.searchpath=[{','.join(map(quoted, folders))}]"] if folders else []
    GlobalHydra.instance().clear()
    OWN_GROUPS[:] = folders
    with initialize_config_dir(str(CONFIG_DIR), job_name="ddp_runner", version_base="1.3"):
        return compose(ROOT_CONFIG, [*path, *overrides], return_hydra_config=True)


def job_composer(loader: ConfigLoader, common: DictConfig) -> Callable[[Sequence[str]], DictConfig]:
    """Return what composes a job of a sweep from its overrides, as ``loader.load_sweep_config``.

    That reads every YAML again for each job. Jobs that choose the same options of groups differ in
    plain keys only, so here Hydra composes each choice of options once, and the keys of a job are
    set in a copy: tens of times sooner.

    Args:
        loader: of the sweep.
        common: what its jobs have in common, with the ``hydra`` node.
    """
    assert isinstance(loader, ConfigLoaderImpl)
    read = OverridesParser.create().parse_overrides
    # The groups that exist, with those of hydra.searchpath.
    _, groups = loader._parse_overrides_and_create_caching_repo(
        common.hydra.job.config_name, as_written(common.hydra.overrides.hydra)
    )
    composed = dict[tuple[str, ...], bytes]()  # by the overrides that choose options

    def is_plain(override: Override) -> bool:
        """Return whether an override sets a key of a job, once all groups are composed."""
        if override.is_sweep_override() or override.is_hydra_override():
            return False
        return bool(Overrides(groups, [override]).config_overrides)

    def compose_job(overrides: Sequence[str]) -> DictConfig:
        parsed = read(list(overrides))
        keys = [one for one in parsed if is_plain(one)]
        options = tuple(str(one.input_line) for one in parsed if one not in keys)
        if options not in composed:
            composed[options] = pickle.dumps(loader.load_sweep_config(common, list(options)))
        job: DictConfig = pickle.loads(composed[options])
        ConfigLoaderImpl._apply_overrides_to_config(keys, job)
        of_task = [one for one in parsed if not one.is_hydra_override()]
        job.hydra.overrides.task = [one.input_line for one in of_task]
        job.hydra.job.override_dirname = get_overrides_dirname(
            overrides=of_task, **job.hydra.job.config.override_dirname
        )
        return job

    return compose_job


@contextmanager
def opened(composed: DictConfig) -> Iterator[tuple[DictConfig, HydraConf]]:
    """Give a composed config without its ``hydra`` node, and that node; see ``opened_node``."""
    with opened_node(composed) as node:
        raw = pickle.loads(pickle.dumps(composed))  # OmegaConf's own copy takes twice as long
        with open_dict(raw):
            del raw["hydra"]
        yield raw, node


@contextmanager
def opened_node(composed: DictConfig) -> Iterator[HydraConf]:
    """Give the ``hydra`` node of a composed config.

    Interpolations such as ``${hydra:job.num}`` resolve within the block: they ask a global.
    """
    holder = HydraConfig.instance()
    before = holder.cfg
    holder.set_config(composed)
    try:
        yield HydraConfig.get()
    finally:
        holder.cfg = before


def is_grid(sweeper: Any) -> bool:
    """Return whether the node ``hydra.sweeper`` tries a whole grid; others choose by results."""
    return bool(sweeper.get("_target_") == f"{BasicSweeper.__module__}.{BasicSweeper.__name__}")


def literal(value: Any) -> str:
    """Return a plain value, such as a mapping, as a value of an override."""

    def with_quotes(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: with_quotes(one) for key, one in tree.items()}
        if isinstance(tree, list):
            return [with_quotes(one) for one in tree]
        is_text = isinstance(tree, str | bytes)
        return QuotedString(str(tree), Quote.double) if is_text else tree

    return Override._get_value_element_as_str(with_quotes(value))


def quoted(text: str) -> str:
    """Return a text as a value of an override, whatever characters it has."""
    return QuotedString(text, Quote.single).with_quotes()
