"""Composes configs, and holds all uses of Hydra's private names. For hydra-core 1.3.8.

Hydra documents ``hydra.main``, the compose API, plug-ins and ``HydraConf``. Its argument parser and
its globals have no public name. ``tests/cli/test_compose.py`` fails when one of them disappears.
"""

import os
import pickle
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import get_overrides_dirname as get_overrides_dirname
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from ddp_runner.config.keys import help_text
from ddp_runner.config.schema import CONFIG_DIR, Config
from ddp_runner.errors import UserError
from ddp_runner.files import mapped

ROOT_CONFIG = "ddp_runner"  # in conf/; a user's project may have its own config.yaml
OWN_GROUPS = list[str]()  # URLs of the folders that Hydra reads before conf/, for this command
UNNAMED = "auto"  # in conf/ for hydra.run.dir: the runner names the folder
FULL_ERROR = "HYDRA_FULL_ERROR"  # set: Hydra raises; else it prints an error itself and exits


def parse_options(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return Hydra's options of a command line, with its ``overrides``, and unknown options.

    Raises:
        UserError: an option lacks its value, or its value is not a choice.
    """

    def fail(reason: str) -> NoReturn:
        raise UserError(str(reason), "see --help")

    parser = get_args_parser()
    vars(parser)["error"] = fail  # argparse's own prints Hydra's usage, without the keys
    # Intermixed: keys may be before and after options, as in `model=toy -m seed=1,2`.
    return parser.parse_known_intermixed_args(list(arguments))


def run_hydra(task_function: TaskFunction, arguments: Sequence[str]) -> None:
    """Let ``hydra.main`` answer a command line: --cfg, --info, --hydra-help, shell completion.

    It reads sys.argv and its environment, which are restored afterwards.
    """
    from unittest.mock import patch  # its imports take a while, and only these options need it

    entry = hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=ROOT_CONFIG)
    argv = [sys.argv[0], *arguments]
    with patch.object(sys, "argv", argv), patch.dict(os.environ, {FULL_ERROR: "1"}):
        entry(task_function)()


@cache
def register() -> None:
    """Give Hydra the schema, and OmegaConf the resolvers of conf/."""
    ConfigStore.instance().store(name="schema", node=Config)
    data_root = partial(os.environ.get, "DDP_RUNNER_DATA_ROOT", "data")
    OmegaConf.register_new_resolver("data_root", data_root, replace=True)
    OmegaConf.register_new_resolver("keys", cache(help_text), replace=True)
    OmegaConf.register_new_resolver("groups", _groups_text, replace=True)


def compose_config(overrides: Sequence[str], *, folders: Sequence[str] = ()) -> DictConfig:
    """Return the config of one job with its ``hydra`` node; the overrides have no sweeps.

    The `folders` are URLs of the user's own groups, including those of a hydra.searchpath among the
    overrides.
    """
    register()  # a hint about an unknown option composes before the command does
    GlobalHydra.instance().clear()
    OWN_GROUPS[:] = folders
    with initialize_config_dir(str(CONFIG_DIR), job_name="ddp_runner", version_base="1.3"):
        return compose(ROOT_CONFIG, list(overrides), return_hydra_config=True)


def own_folders(config_dir: str | None, overrides: Sequence[Override]) -> list[str]:
    """Return the URLs of the user's own groups: --config-dir, then hydra.searchpath."""
    # Not as_uri, since Hydra does not decode %20.
    folders = [f"file://{Path(config_dir).absolute()}"] if config_dir else []
    for override in overrides:
        if override.key_or_group == "hydra.searchpath":
            value = override.value()
            folders += map(str, value if isinstance(value, list) else [])
    return folders


def group_folders(urls: Sequence[str]) -> list[Path]:
    """Return the folders that hold groups: conf/, and the user's own by their URLs."""
    return [CONFIG_DIR, *(Path(url.removeprefix("file://")) for url in urls)]


def group_options() -> dict[str, list[str]]:
    """Return the options of each group by name, including the user's own."""
    groups = dict[str, set[str]]()
    for folder in group_folders(OWN_GROUPS):
        for path in folder.rglob("*.yaml"):
            group = path.parent.relative_to(folder)
            if group.parts and group.parts[0] != "hydra":
                groups.setdefault(group.as_posix(), set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(groups.items())}


def yaml_of(error: BaseException) -> str:
    """Return the YAML that Hydra was reading when it raised an error: some errors lack it."""
    paths = [frame.f_locals.get("full_path") for frame, _ in walk_tb(error.__traceback__)]
    return next(filter(None, paths), "a YAML")


def config_at(error: BaseException) -> Any:
    """Return the plain config to which Hydra was adding an override at the error; else None."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_apply_overrides_to_config":
            return OmegaConf.to_container(frame.f_locals["cfg"])
    return None


def _groups_text() -> str:
    lines = (f"{group}: {', '.join(options)}" for group, options in group_options().items())
    return "\n".join(textwrap.fill(line, width=80, subsequent_indent="    ") for line in lines)


def parse_sweep(overrides: Sequence[str], *, folders: Sequence[str] = ()) -> list[Override]:
    """Return the parsed overrides of a sweep; a glob finds the options of all folders."""
    OWN_GROUPS[:] = folders
    with initialize_config_dir(str(CONFIG_DIR), job_name="ddp_runner", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))


@contextmanager
def opened(composed: DictConfig) -> Iterator[tuple[DictConfig, HydraConf]]:
    """Give a copy of a composed config without its ``hydra`` node, and that node."""
    with opened_node(composed) as node:
        raw = pickle.loads(pickle.dumps(composed))  # OmegaConf's own copy takes twice as long
        with open_dict(raw):
            del raw["hydra"]
        yield raw, node


@contextmanager
def opened_node(composed: DictConfig) -> Iterator[HydraConf]:
    """Give the ``hydra`` node of a composed config.

    Interpolations such as ``${hydra:job.num}`` read a global, which is set within the block.
    ``set_config`` would copy the config, which takes longer than composing a job.
    """
    holder = HydraConfig.instance()
    before = holder.cfg
    vars(holder)["cfg"] = composed  # its declared type has only the node `hydra`
    try:
        yield HydraConfig.get()
    finally:
        holder.cfg = before


def literal(value: Any) -> str:
    """Return a plain value, such as a mapping, as the value of an override."""

    def with_quotes(item: Any) -> Any:
        is_text = isinstance(item, str | bytes)
        return QuotedString(str(item), Quote.double) if is_text else item

    return Override._get_value_element_as_str(mapped(with_quotes, value))


def quoted(text: str) -> str:
    """Return any text as the value of an override."""
    return QuotedString(text, Quote.single).with_quotes()
