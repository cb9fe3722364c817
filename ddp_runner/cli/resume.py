"""What a command that resumes a run takes from that run: its groups, and its frozen config.

Used by ``__main__`` and ``compose``. Torch-free.
"""

import re
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from ddp_runner.config.load import chosen_keys
from ddp_runner.config.moved import with_moved_names
from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.tracking.claims import AUTO
from ddp_runner.tracking.run_dir import RunDir, newest_run

LAST = "last"  # the value of `resume` that stands for the newest run
GROUPS = ("model", "dataset", "parallelism", "optimizer", "scheduler")  # each with a `_target_`


def resumed_command(arguments: Sequence[str], *, conf: Path) -> tuple[list[str], list[str]]:
    """Return a command line as Hydra is to read it, and the overrides added to it.

    A run that is resumed brings its groups (``model=bert``): without them Hydra would compose the
    default ones, and refuse the keys that the run's own have. ``resume=last`` becomes a path.

    Args:
        arguments: what the user wrote after the program's name.
        conf: the project's own groups.

    Raises:
        UserError: there is no last run.
    """
    arguments = list(arguments)
    found = [place for place, one in enumerate(arguments) if one.startswith("resume=")]
    if not found or {"-m", "--multirun"} & set(arguments):
        return arguments, []
    (value,) = (
        one.value() for one in OverridesParser.create().parse_overrides([arguments[found[-1]]])
    )
    if value == LAST:
        newest = newest_run()
        if newest is None:
            raise UserError(
                "resume=last finds no run below outputs; start in the folder that holds it, or "
                "give resume=RUN"
            )
        value = str(newest)
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        arguments[found[-1]] = f"resume='{quoted}'"
    given = {one.partition("=")[0] for one in arguments}
    folders = [conf, *_config_dirs(arguments)]
    implied = [
        f"{group}={option}"
        for group, option in _choices(Path(str(value))).items()
        if group not in given
        and any((folder / group / f"{option}.yaml").is_file() for folder in folders)
    ]
    place = found[-1] + 1  # beside it: argparse takes what is not an option in one piece
    return [*arguments[:place], *implied, *arguments[place:]], implied


def with_resumed(
    raw: DictConfig, overrides: Sequence[str], *, is_launched: bool = False
) -> DictConfig:
    """Return the composed config; of a resumed run what it had, with this command's keys on top.

    Args:
        raw: as composed.
        overrides: of this command.
        is_launched: whether the ranks run already, so that the run's number of them gives way.

    Raises:
        UserError: the run to resume does not exist, or a key cannot change it.
    """
    if raw.resume in (None, AUTO):
        return raw
    frozen = _frozen(Path(raw.resume))
    for key in chosen_keys(overrides):
        if key == "experiment":
            raise UserError("experiment= cannot change a run that is resumed; give single keys")
        # The scaling group has no keys of its own: it chooses the batch.
        changed = "batch" if key == "scaling" else key
        value = _as_composed(raw, changed)
        OmegaConf.update(frozen, changed, value, merge=False, force_add=True)
    # A config that came with somebody's run cannot allow itself to run code.
    frozen.allowed_targets = raw.allowed_targets
    # Where the ranks meet, and which machine this is, was true of that launch alone; and whoever
    # is met there is sent pickles.
    for key in ("init_method", "node_rank", "rdzv_endpoint"):
        frozen.launch[key] = raw.launch[key]
    if is_launched and "world_size" not in chosen_keys(overrides):
        frozen.world_size = "auto"
    return frozen


def _as_composed(raw: DictConfig, key: str) -> Any:
    """Return what a command gives for a key, unresolved: a secret is frozen as it was given."""
    value = OmegaConf.select(raw, key)
    if value is None or OmegaConf.is_config(value):
        return value  # what is within a container has not been resolved
    plain: Any = OmegaConf.to_container(raw, resolve=False)
    return reduce(getitem, key.split("."), plain)


def _frozen(run_dir: Path) -> DictConfig:
    """Return the config that a run froze.

    Raises:
        UserError: there is none, or it is not whole.
    """
    path = RunDir(run_dir).config
    if not path.exists():
        raise UserError(
            f"resume={run_dir} is not a run folder: {path} does not exist; "
            "name the folder that holds run.json"
        )
    try:
        text = path.read_text(encoding="utf-8").strip()
        if text.startswith("---") and not text.endswith("..."):
            raise ValueError("it is cut off")
        loaded = OmegaConf.to_container(OmegaConf.load(path))
        frozen = OmegaConf.merge(OmegaConf.structured(Config), with_moved_names(loaded))
        assert isinstance(frozen, DictConfig)
        lacking = [group for group in GROUPS if "_target_" not in frozen[group]]
        if lacking:
            raise ValueError(f"it ends before {lacking[0]}")
    except Exception as error:  # of any kind, as PyYAML makes of odd tags
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} is damaged or of another version ({reason}); restore it, or start anew"
        ) from error
    return frozen


def _config_dirs(arguments: Sequence[str]) -> list[Path]:
    """Return the folders of the user's own groups."""
    found = []
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=True):
        option, _, value = argument.partition("=")
        if option in ("--config-dir", "-cd"):
            found.append(Path(value or after))
    return found


def _choices(run_dir: Path) -> dict[str, str]:
    """Return the options of the groups that a run was composed of, as far as they exist here."""
    try:
        choices = yaml.safe_load(RunDir(run_dir).choices.read_text(encoding="utf-8"))
    except Exception:  # of any kind, as PyYAML makes of odd tags
        return {}  # of an older version, or none: with_resumed tells what is wrong with it
    pairs = choices.items() if isinstance(choices, dict) else ()
    return {
        str(group): str(option)
        for group, option in pairs
        if group in (*GROUPS, "backend") and re.fullmatch(r"[\w.-]{1,99}", str(option))
    }
