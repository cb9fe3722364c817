"""Compose, resolve and write configs, in the test's own process."""

import hashlib
import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_runner.cli.compose import OWN_GROUPS, ROOT_CONFIG, register
from ddp_runner.cli.messages import user_error
from ddp_runner.cli.plan import validate_files
from ddp_runner.cli.resume import with_resumed
from ddp_runner.config.load import chosen_keys, to_config
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import CONFIG_DIR, Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.host.hardware import Hardware
from ddp_runner.job import Job
from ddp_runner.tracking.run_dir import RunDir

COMPOSED = "DDP_RUNNER_TEST_COMPOSED"  # a variable: the folder of composed configs
LAPTOP = Hardware(num_gpus=0, num_cores=4)  # so that tests resolve alike on every machine


def compose_raw(*overrides: str, folders: Sequence[Path] = ()) -> Any:
    """Return what Hydra composes from a command line, with `folders` as its --config-dir.

    Hydra composes each choice of options once; plain ``key=value`` are set in a copy, which is ten
    times as fast. A command line with anything else is Hydra's alone.
    """
    if not folders:
        with suppress(OmegaConfBaseException):  # Hydra raises it with the override's name
            return _compose_in_copy(OverridesParser.create().parse_overrides([*overrides]))
    return compose_by_hydra(*overrides, folders=folders)


def compose_by_hydra(*overrides: str, folders: Sequence[Path] = ()) -> Any:
    """Return what Hydra composes, without the cache."""
    register()
    search = (
        [f"hydra.searchpath=[{','.join(path.as_uri() for path in folders)}]"] if folders else []
    )
    OWN_GROUPS[:] = [path.as_uri() for path in folders]
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose(ROOT_CONFIG, [*overrides, *search])


def _compose_in_copy(overrides: Sequence[Override]) -> Any:
    options = tuple(str(one.input_line) for one in overrides if not _is_plain(one))
    composed = pickle.loads(_composed(options))
    for override in filter(_is_plain, overrides):
        OmegaConf.update(composed, override.key_or_group, override.value(), merge=True)
    return composed


def _is_plain(override: Override) -> bool:
    key = override.key_or_group
    is_change = not (override.is_add() or override.is_delete() or override.is_sweep_override())
    is_key = not (override.is_hydra_override() or override.package or (CONFIG_DIR / key).is_dir())
    return is_change and is_key


@cache
def _composed(options: tuple[str, ...]) -> bytes:
    """Return what Hydra composes, pickled; all processes of a test session share it."""
    folder = os.environ.get(COMPOSED)
    if not folder:
        return pickle.dumps(compose_by_hydra(*options))
    register()  # what is read from the file has interpolations as well
    path = Path(folder, hashlib.sha256("\n".join(options).encode()).hexdigest())
    if not path.exists():
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(compose_by_hydra(*options)))
        own.replace(path)
    return path.read_bytes()


def resolved(
    *overrides: str,
    hardware: Hardware = LAPTOP,
    env: DistEnv | None = None,
    folders: Sequence[Path] = (),
) -> tuple[Config, list[str]]:
    """Return the resolved config of a command line, and its warnings."""
    raw = compose_raw(*overrides, folders=folders)
    return resolve(
        to_config(with_resumed(raw, overrides)),
        hardware=hardware,
        chosen=chosen_keys(overrides),
        env=env,
    )


def config_error(*overrides: str, hardware: Hardware = LAPTOP, env: DistEnv | None = None) -> str:
    """Return the error line of an invalid command line."""
    try:
        config, _ = resolved(*overrides, hardware=hardware, env=env)
        validate_files(config, env=env)
    except Exception as error:
        answer = user_error(error)
        if answer is None:
            raise
        assert "\n" not in str(answer)
        return str(answer)
    raise AssertionError(f"{overrides} is valid")


def freeze(
    folder: Path,
    config: Config,
    *,
    overrides: Sequence[str] = (),
    choices: Mapping[str, str] | None = None,
) -> None:
    """Freeze a config in the folder of a run."""
    job = Job(config, 0.0, {}, overrides=tuple(overrides), choices=choices or {})
    RunDir(folder).freeze(job)


def frozen_text(changes: Mapping[str, Any], *overrides: str) -> str:
    """Return the config of a run as its folder holds it, with these dotted keys changed."""
    frozen = asdict(resolved(*overrides)[0])
    for key, value in changes.items():
        *groups, last = key.split(".")
        reduce(getitem, groups, frozen)[last] = value
    return yaml.safe_dump(frozen)


def write_experiment(folder: Path, name: str, *overrides: str) -> None:
    """Write experiment/NAME.yaml into a config folder, for a sweep over experiments."""
    choices, keys = [], []
    for override in overrides:
        group, _, option = override.partition("=")
        if (CONFIG_DIR / group).is_dir():
            choices.append({f"override /{group}": option})
        else:
            keys.append(override)
    content = OmegaConf.merge({"defaults": choices}, OmegaConf.from_dotlist(keys))
    path = folder / "experiment" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{OmegaConf.to_yaml(content)}")
