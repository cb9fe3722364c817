"""Reads and composes the command line, and gives hints for a wrong key."""

import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddp_runner.cli.compose import (
    compose_config,
    group_folders,
    literal,
    own_folders,
    parse_options,
    quoted,
)
from ddp_runner.cli.mistakes import nearest_key
from ddp_runner.cli.resume import resumed_overrides
from ddp_runner.config.identity import dotted_keys
from ddp_runner.config.schema import LIST_GROUPS, RUNNER_KEYS
from ddp_runner.errors import UserError

GRID = "ddp_runner.sweep.search.Grid"  # the _target_ of hydra/sweeper=grid


@dataclass(frozen=True)
class CommandLine:
    """A command line, with the groups that a resumed run adds."""

    written: tuple[str, ...]  # every argument as the user wrote it
    options: tuple[str, ...]  # Hydra's options, with their values
    overrides: tuple[Override, ...]  # every key=value, parsed
    implied: tuple[str, ...] = ()  # the overrides that a resumed run adds: its groups
    folders: tuple[str, ...] = ()  # URLs of the user's own groups
    # The words by which Hydra finds the user's own groups; a job's overrides lack them.
    own_groups: tuple[str, ...] = ()
    is_multirun: bool = False  # -m; a YAML may ask for a sweep too
    asks_help: bool = False  # --help
    only_shows: bool = False  # Hydra answers: --cfg, --info, --shell-completion, --hydra-help

    def arguments(self, *added: str) -> list[str]:
        """Return the overrides, then the `added` overrides, which win, then the options.

        The options come last: an override after --info would be taken for its value.
        """
        return [*(str(item.input_line) for item in self.overrides), *added, *self.options]


def parse(arguments: Sequence[str]) -> CommandLine:
    """Read a command line; raise a UserError or a HydraException if it is wrong."""
    parsed, unknown = parse_options(arguments)
    _validate_options(parsed, unknown, arguments)
    options = list(arguments)
    for override in parsed.overrides:
        options.remove(override)
    parsed.overrides = _split_mappings([quoted_runs(word) for word in parsed.overrides])
    if parsed.shell_completion:  # its words are install=bash, or an unfinished override
        return CommandLine(tuple(arguments), (*options, *parsed.overrides), (), only_shows=True)
    read = OverridesParser.create().parse_overrides
    folders = own_folders(parsed.config_dir, read(parsed.overrides))
    words, implied = resumed_overrides(parsed.overrides, folders=group_folders(folders))
    overrides, folder = read(words), parsed.config_dir
    own_groups = [f"--config-dir={Path(folder).absolute()}"] if folder else []
    own_groups += [str(o.input_line) for o in overrides if o.key_or_group == "hydra.searchpath"]
    return CommandLine(
        written=tuple(arguments),
        options=tuple(options),
        overrides=tuple(overrides),
        implied=tuple(implied),
        folders=tuple(folders),
        own_groups=tuple(own_groups),
        is_multirun=parsed.multirun,
        asks_help=parsed.help,
        only_shows=bool(parsed.hydra_help or parsed.cfg or parsed.info),
    )


def compose(command: CommandLine) -> DictConfig:
    """Return the composed config of a run, or the part that all jobs of a sweep share.

    Raises:
        UserError: a key has several values and the command is not a sweep.
        HydraException: the config cannot be composed.
    """
    sweeps = [item for item in command.overrides if item.is_sweep_override()]
    shared = [str(item.input_line) for item in command.overrides if item not in sweeps]
    composed = compose_config(shared, folders=command.folders)
    for sweep in sweeps:
        line = sweep.input_line
        if is_sweep(command, composed):
            if composed.hydra.sweeper.get("_target_") == GRID and not sweep.is_discrete_sweep():
                raise UserError(
                    f"{line} is an interval and this sweeper takes a list of values",
                    "write hydra/sweeper=optuna, which searches intervals",
                )
        elif sweep.is_choice_sweep():
            key = sweep.key_or_group
            is_list = OmegaConf.is_list(OmegaConf.select(composed, key)) or key in LIST_GROUPS
            raise UserError(
                f"{line} has a comma; write -m for a sweep over its values, or "
                + (f"{key}=[ONE,OTHER] for a list" if is_list else f"{key}=VALUE for one run")
            )
        else:
            raise UserError(f"{line} is a sweep", "write -m for it")
    if composed.hydra.verbose or composed.hydra.job.chdir:
        raise UserError(
            "hydra.verbose and hydra.job.chdir are not for this program",
            "leave them out: a run writes all its files into its own folder, tracebacks into "
            "RUN/logs",
        )
    return composed


def is_sweep(command: CommandLine, composed: DictConfig) -> bool:
    """Return whether the command is a sweep: by -m, or by ``hydra.mode`` in a YAML."""
    return command.is_multirun or composed.hydra.mode == RunMode.MULTIRUN


def quoted_runs(override: str) -> str:
    """Return an override with the quotes that Hydra needs around names with = and commas.

    A job's folder in resume has its keys as its name, as in ``outputs/SWEEP/seed=1,model=toy``, but
    a comma may also separate two runs. So the longest name of an existing folder counts.
    """
    key, _, value = override.partition("=")
    if not re.fullmatch(r"[\w./~ +@%:,=-]+", value):
        return override
    if key != "resume":  # a comma separates values
        return f"{key}={quoted(value)}" if "=" in value and "," not in value else override
    names, parts = list[str](), value.split(",")
    while parts:
        lengths = range(len(parts), 0, -1)
        length = next((size for size in lengths if Path(",".join(parts[:size])).is_dir()), 1)
        names.append(",".join(parts[:length]))
        del parts[:length]
    return f"resume={','.join(quoted(name) if set(name) & set(',=') else name for name in names)}"


def _split_mappings(overrides: Sequence[str]) -> list[str]:
    """Return ``KEY={_target_:…}`` as single keys, since Hydra would merge the mapping.

    Keys beside a ``_target_`` of the command get ++, since the chosen option may lack them.
    ``signatures`` rejects those that the class does not take.
    """
    words = list[str]()
    for override in overrides:
        key, _, value = override.partition("=")
        tree: Any = None
        if value.startswith("{") and "_target_" in value:
            tree = OverridesParser.create().parse_override(override).value()
        if isinstance(tree, dict) and "_target_" in tree:
            words += [f"{key.lstrip('+')}.{name}={literal(item)}" for name, item in tree.items()]
        else:
            words.append(override)
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    owners = [key.removesuffix("_target_") for key in keys if key.endswith("._target_")]
    # An option's YAML need not have the keys that the runner reads.
    read = [f"{group}.{name}" for group, names in RUNNER_KEYS.items() for name in names]
    return [
        f"++{word.lstrip('+')}" if key in read or key.startswith(tuple(owners)) else word
        for key, word in zip(keys, words, strict=True)
    ]


def _validate_options(parsed: Namespace, unknown: Sequence[str], arguments: Sequence[str]) -> None:
    """Reject options that Hydra does not have, often keys, and options that do not fit a run."""
    if (parsed.experimental_rerun, parsed.config_name, parsed.config_path) != (None, None, None):
        raise UserError(
            "--experimental-rerun, --config-name and --config-path are not for this program",
            "give your own groups by --config-dir=FOLDER, and continue a run by resume=RUN_FOLDER",
        )
    folder = parsed.config_dir
    if folder is not None and not (folder and Path(folder).is_dir()):
        raise UserError(
            f"--config-dir ({folder}) does not exist", "write --config-dir=FOLDER, or leave it out"
        )
    followed = zip(arguments, (*arguments[1:], ""), strict=False)
    given = [(word, after) for word, after in followed if re.match(r"--config-d|-cd(=|$)", word)]
    if len({Path(word.partition("=")[2] or after).absolute() for word, after in given}) > 1:
        raise UserError(
            f"--config-dir is given twice, and {folder} would replace the first",
            "give one of them by 'hydra.searchpath=[file:///FOLDER]'",
        )
    modes = (parsed.cfg, parsed.info, parsed.shell_completion, parsed.multirun, parsed.run)
    if sum(map(bool, modes)) > 1:
        raise UserError(
            "--cfg, --info, --shell-completion and -m exclude each other",
            "leave -m out to see a job",
        )
    completes = ("install=", "uninstall=", "query=")
    if parsed.shell_completion and not any(w.startswith(completes) for w in parsed.overrides):
        raise UserError('write eval "$(ddp-runner --shell-completion install=bash)"')
    if option := next((word for word in unknown if word.startswith("-")), None):
        name, _, value = option.lstrip("-").partition("=")
        if not value:
            value = next((word for word in parsed.overrides if "=" not in word), "VALUE")
        word = name.replace("-", "_")
        match = nearest_key(word, [*dotted_keys(known_config(arguments))])
        hint = f"keys have no dashes: write {match}={value}" if match else "see --help"
        if (dashed := option.replace("_", "-").partition("=")[0]) in ("--config-dir", "--help"):
            hint = f"write {dashed}"
        raise UserError(f"{option} is not an option", hint)


def known_config(arguments: Sequence[str]) -> Any:
    """Return the plain config of a command line's groups alone, for a hint.

    A sweep has the first value of each group. If they do not compose, return the config of the
    default groups; if those fail too, {}.
    """
    for words in (arguments, ()):
        with suppress(Exception):  # a hint must not replace the command's own error
            parsed, _ = parse_options(words)
            written = [word for word in parsed.overrides if "=" in word]
            overrides = OverridesParser.create().parse_overrides(written)
            folders = own_folders(parsed.config_dir, overrides)
            groups = {path.name for root in group_folders(folders) for path in root.glob("*")}
            chosen = list[str]()
            for override in overrides:
                group = override.key_or_group
                is_group = group in groups or group.startswith("hydra/")
                if is_group and override.is_choice_sweep():
                    chosen.append(f"{group}={next(iter(override.sweep_string_iterator()))}")
                elif is_group and not override.is_sweep_override():
                    chosen.append(str(override.input_line))
            return OmegaConf.to_container(compose_config(chosen, folders=folders))
    return {}
