"""How Hydra finds and fills the config: the schema, the resolvers of conf/config.yaml, resuming.

Called by ``__main__``; torch-free.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ddp_runner.config import Config
from ddp_runner.environment import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.folders import claim, job_name, run_folder, sweep_folder
from ddp_runner.hardware import detect
from ddp_runner.ledger import unfinished_sweep
from ddp_runner.rules import resolve
from ddp_runner.text_files import check_text_files

_PACKAGE = Path(__file__).resolve().parent
# In a wheel conf/ lies inside the package, in a checkout beside it.
CONFIG_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"


def register(env: DistEnv | None) -> dict[str, str]:
    """Tell Hydra the schema, and OmegaConf the resolvers that conf/config.yaml uses.

    Args:
        env: this process's rank facts if it is a worker already; such a process creates no folder.

    Returns:
        The folders that Hydra's questions will have made this command claim: run, or sweep.
    """
    ConfigStore.instance().store(name="schema", node=Config)
    claimed: dict[str, str] = {}  # one command has one folder, however often Hydra asks for it

    def run_dir(*, _root_: DictConfig) -> str:
        config = validated(_root_)
        if config.resume is not None:
            return config.resume
        if env is not None or config.launch.nnodes > 1:
            return "."  # rank 0 of the whole gang claims the folder
        check_text_files(config.model, config.dataset, data_root=Path(config.data_root))
        if "run" not in claimed:
            claimed["run"] = str(claim(run_folder(config)))
        return claimed["run"]

    def validated(root: DictConfig) -> Config:
        # Before Hydra creates anything: a mistake leaves no folder behind.
        raw = OmegaConf.masked_copy(root, [str(key) for key in root if key != "hydra"])
        overrides = root.hydra.overrides.task
        config = to_config(with_resumed(raw, overrides))
        return resolve(config, hardware=detect(), chosen=chosen_keys(overrides), env=env)[0]

    def sweep_dir(*, _root_: DictConfig) -> str:
        if "sweep" not in claimed:
            planned = sweep_folder(_root_.name)
            sampler = _root_.hydra.sweeper.get("sampler")  # of a search such as Optuna's
            begun = None
            if sampler is None or sampler.get("seed") is not None:  # else it tries other jobs
                begun = unfinished_sweep(
                    planned.parent,
                    command=sweep_command(),
                    retry_failed=_root_.sweep.retry is not None,
                )
            claimed["sweep"] = str(begun or claim(planned))
        return claimed["sweep"]

    def sweep_job_name(*, _root_: DictConfig) -> str:
        # What the command line gives without a choice is the same for all jobs: no part of a name.
        fixed = {
            one.key_or_group
            for one in OverridesParser.create().parse_overrides(
                [argument for argument in sys.argv[1:] if "=" in argument and argument[0] != "-"]
            )
            if not one.is_sweep_override()
        }
        overrides = as_written(_root_.hydra.overrides.task)
        varied = [one for one in overrides if one.partition("=")[0].lstrip("+~") not in fixed]
        return job_name(varied or overrides)

    for name, resolver in (
        ("run_dir", run_dir),
        ("sweep_dir", sweep_dir),
        ("job_name", sweep_job_name),
        ("data_root", lambda: os.environ.get("DDP_RUNNER_DATA_ROOT", "data")),
    ):
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    return claimed


def to_config(raw: DictConfig) -> Config:
    """Return a composed config as the schema's object, its interpolations resolved.

    Raises:
        UserError: a key is not in the schema.
    """
    for key in map(str, raw):
        if key not in {field.name for field in fields(Config)}:
            raise UserError(f"{key} is not a key of the config; see --help for all keys")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), raw))
    assert isinstance(config, Config)
    return config


def as_written(overrides: Any) -> list[str]:
    """Return Hydra's overrides with their interpolations, which may be secrets, unresolved."""
    written = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(written, list)
    return list(map(str, written))


def opened(job: DictConfig) -> tuple[DictConfig, Any]:
    """Return a composed job without its hydra node, and that node, for whose resolvers it is set.

    The job's ``hydra`` interpolations resolve until the next job is opened.
    """
    HydraConfig.instance().set_config(job)
    hydra_node = HydraConfig.get()
    return OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"]), hydra_node


def sweep_command() -> list[str]:
    """Return by what a sweep is found again: this command, but for how it treats failures."""
    return [argument for argument in sys.argv[1:] if not argument.startswith("sweep.")]


def chosen_keys(overrides: Sequence[str]) -> list[str]:
    """Return the keys that the command line gives."""
    return [override.partition("=")[0].lstrip("+~") for override in overrides]


def with_resumed(raw: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the composed config; of a resumed run what it had, with this command's keys on top.

    Raises:
        UserError: the run to resume does not exist, or a key cannot change it.
    """
    if raw.resume is None:
        return raw
    path = Path(raw.resume) / ".hydra" / "config.yaml"
    if not path.exists():
        raise UserError(
            f"resume={raw.resume} is not a run folder: {path} does not exist; "
            "name the folder that holds run.json"
        )
    try:
        frozen = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} is damaged or of another version ({reason}); restore it, or start anew"
        ) from error
    assert isinstance(frozen, DictConfig)
    for key in chosen_keys(overrides):
        if key == "experiment":
            raise UserError("experiment= cannot change a run that is resumed; give single keys")
        OmegaConf.update(frozen, key, OmegaConf.select(raw, key), merge=False, force_add=True)
    # A config that came with somebody's run cannot allow itself to run code.
    frozen.allowed_targets = raw.allowed_targets
    return frozen
