"""Reads the command line: Hydra's options, the overrides, and which key a wrong key could mean."""

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ddp_runner.cli.compose import (
    compose_config,
    group_folders,
    literal,
    own_folders,
    parse_options,
    quoted,
)
from ddp_runner.cli.resume import resumed_overrides
from ddp_runner.config.schema import RUNNER_KEYS
from ddp_runner.config.signatures import CLOSE
from ddp_runner.errors import UserError, nearest

# Words of other programs for the last part of a key of this program.
SAME_MEANING = (
    {"path", "folder", "file", "dir", "directory", "root"},
    {"lr", "learning_rate", "rate"},
    {"epochs", "num_epochs", "max_epochs"},
    {"max_steps", "num_steps", "max_iters", "iterations"},
    {"per_rank", "batch_size", "bs"},
    {"world_size", "nproc", "num_processes", "num_gpus", "gpus", "devices"},
    {"clip_norm", "max_norm", "grad_clip", "gradient_clip_val"},
    {"seed", "random_seed"},
)


@dataclass(frozen=True)
class CommandLine:
    """A command line, with the groups that a resumed run adds."""

    written: tuple[str, ...]  # every argument as the user gave it
    options: tuple[str, ...]  # Hydra's, with their values
    overrides: tuple[Override, ...]  # every key=value, parsed
    implied: tuple[str, ...] = ()  # those that the user did not write: the groups of a resumed run
    folders: tuple[str, ...] = ()  # URLs of the user's own groups
    config_dir: Path | None = None  # the absolute folder of --config-dir
    is_multirun: bool = False  # -m is given; a YAML may ask for a sweep as well
    asks_help: bool = False  # --help
    only_shows: bool = False  # what Hydra answers: --cfg, --info, --shell-completion, --hydra-help

    def arguments(self, *added: str) -> list[str]:
        """Return the overrides, with further ones, which win, then the options.

        After the option --info an override would be taken for its value.
        """
        return [*(str(one.input_line) for one in self.overrides), *added, *self.options]

    @property
    def own_groups(self) -> tuple[str, ...]:
        """The words by which Hydra finds the user's own groups: no job's overrides hold them."""
        folder = () if self.config_dir is None else (f"--config-dir={self.config_dir}",)
        places = [one for one in self.overrides if one.key_or_group == "hydra.searchpath"]
        return (*folder, *(str(one.input_line) for one in places))


def parse(arguments: Sequence[str]) -> CommandLine:
    """Read a command line.

    Raises:
        UserError: an option does not exist, lacks its value, or excludes another.
        HydraException: an override cannot be read.
    """
    parsed, unknown = parse_options(arguments)
    _validate_options(parsed, unknown, arguments)
    options = list(arguments)
    for override in parsed.overrides:
        options.remove(override)
    parsed.overrides = _key_by_key([quoted_runs(one) for one in parsed.overrides])
    if parsed.shell_completion:  # its words are no overrides: install=bash, and what is half typed
        return CommandLine(tuple(arguments), (*options, *parsed.overrides), (), only_shows=True)
    read = OverridesParser.create().parse_overrides
    folders = own_folders(parsed.config_dir, read(parsed.overrides))
    overrides, implied = resumed_overrides(parsed.overrides, folders=group_folders(folders))
    return CommandLine(
        written=tuple(arguments),
        options=tuple(options),
        overrides=tuple(read(overrides)),
        implied=tuple(implied),
        folders=tuple(folders),
        config_dir=Path(parsed.config_dir).absolute() if parsed.config_dir else None,
        is_multirun=parsed.multirun,
        asks_help=parsed.help,
        only_shows=bool(parsed.hydra_help or parsed.cfg or parsed.info),
    )


def quoted_runs(override: str) -> str:
    """Return an override with the quotes that Hydra wants around names that hold = and commas.

    In resume, a job's folder is its keys, as in ``outputs/SWEEP/seed=1,model=toy``, and a comma may
    as well stand between two runs. So the longest name that is a folder counts.
    """
    key, _, value = override.partition("=")
    if not re.fullmatch(r"[\w./~ +@%:,=-]+", value):
        return override
    if key != "resume":  # elsewhere a name with = is one value
        return f"{key}={quoted(value)}" if "=" in value and "," not in value else override
    names, parts = list[str](), value.split(",")
    while parts:
        lengths = range(len(parts), 0, -1)
        length = next((one for one in lengths if Path(",".join(parts[:one])).is_dir()), 1)
        names.append(",".join(parts[:length]))
        del parts[:length]
    return f"resume={','.join(quoted(one) if set(one) & set(',=') else one for one in names)}"


def _key_by_key(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with ``KEY={_target_:…}`` as single keys: Hydra would merge the mapping.

    Whatever is beside a ``_target_`` of the command is set with two plus signs, since the chosen
    option may not have it. ``signatures`` rejects what the class does not take.
    """
    words = list[str]()
    for override in overrides:
        key, _, value = override.partition("=")
        tree = None
        if value.startswith("{") and "_target_" in value:
            (parsed,) = OverridesParser.create().parse_overrides([override])
            tree = parsed.value()
        if isinstance(tree, dict) and "_target_" in tree:
            words += [f"{key.lstrip('+')}.{name}={literal(one)}" for name, one in tree.items()]
        else:
            words.append(override)
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    owners = [key.removesuffix("_target_") for key in keys if key.endswith("._target_")]
    # What the runner itself reads of a group need not be in an option's YAML.
    read = [f"{group}.{name}" for group, names in RUNNER_KEYS.items() for name in names]
    return [
        f"++{word.lstrip('+')}" if key in read or key.startswith(tuple(owners)) else word
        for key, word in zip(keys, words, strict=True)
    ]


def _validate_options(parsed: Namespace, unknown: Sequence[str], arguments: Sequence[str]) -> None:
    """Reject what Hydra has no option for, often a key, and options that do not fit a run."""
    if (parsed.experimental_rerun, parsed.config_name, parsed.config_path) != (None, None, None):
        raise UserError(
            "--experimental-rerun, --config-name and --config-path are not for this program; give "
            "your own groups by --config-dir=FOLDER, and to continue a run write resume=RUN_FOLDER"
        )
    folder = parsed.config_dir
    if folder is not None and not (folder and Path(folder).is_dir()):
        raise UserError(
            f"--config-dir ({folder}): there is no such folder; write --config-dir=FOLDER, or "
            "leave it out"
        )
    if sum(bool(re.match(r"--config-d|-cd(=|$)", one)) for one in arguments) > 1:
        raise UserError(
            f"--config-dir is given twice, and {folder} would replace the other one; "
            "give one of them by 'hydra.searchpath=[file:///FOLDER]'"
        )
    modes = (parsed.cfg, parsed.info, parsed.shell_completion, parsed.multirun, parsed.run)
    if sum(map(bool, modes)) > 1:
        raise UserError(
            "--cfg, --info, --shell-completion and -m exclude each other; leave -m out to see "
            "one job"
        )
    completes = ("install=", "uninstall=", "query=")
    if parsed.shell_completion and not any(one.startswith(completes) for one in parsed.overrides):
        raise UserError('write eval "$(ddp-runner --shell-completion install=bash)"')
    if option := next((one for one in unknown if one.startswith("-")), None):
        word, _, value = option.lstrip("-").partition("=")
        if not value:
            value = next((one for one in parsed.overrides if "=" not in one), "VALUE")
        meant = nearest_key(word.replace("-", "_"), known_keys(arguments))
        hint = f"keys have no dashes: write {meant}={value}" if meant else "see --help"
        if (dashed := option.replace("_", "-").partition("=")[0]) in ("--config-dir", "--help"):
            hint = f"write {dashed}"
        raise UserError(f"{option} is not an option; {hint}")


def known_keys(arguments: Sequence[str]) -> list[str]:
    """Return the dotted keys of the config that a command line's groups make.

    If they do not compose, return the keys of the default groups; if those fail too, nothing.
    """
    for given in (arguments, ()):
        with suppress(Exception):  # the command's own error is reported; this is about a hint only
            return list(dotted_keys(OmegaConf.to_container(compose_groups(given))))
    return []


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the key that the user most likely meant; None if no key is near."""
    parent, _, last = key.rpartition(".")
    if parent.partition(".")[0] != "hydra":
        known = [one for one in known if one.partition(".")[0] != "hydra"]
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == parent}
    alike = next((words for words in SAME_MEANING if last in words), {last})
    candidates = siblings if parent else {one.rpartition(".")[2]: one for one in known}
    for word in sorted(alike & candidates.keys() - {last}):
        return candidates[word]
    same_name = [one for one in known if one.rpartition(".")[2] in alike]
    if len(same_name) == 1:  # as in train.lr, and nnodes, which is near notes
        return same_name[0]
    if (sibling := nearest(last, siblings, cutoff=CLOSE)) is not None:
        return siblings[sibling]
    if siblings and parent:
        return None  # every key of this parent would be near the whole key
    return nearest(key, known, cutoff=0.8) or " or ".join(same_name) or None


def compose_groups(arguments: Sequence[str]) -> DictConfig:
    """Compose only the groups of a command line; for a sweep, the first value of each."""
    parsed, _ = parse_options(arguments)
    written = [one for one in parsed.overrides if "=" in one]
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
    return compose_config(chosen, folders=folders)


def dotted_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a plain config, of its groups too."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from dotted_keys(value, f"{prefix}{key}.")
