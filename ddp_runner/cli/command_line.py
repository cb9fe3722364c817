"""Reads the command line once: Hydra's options, the overrides, and what a resumed run adds."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from ddp_runner.cli.hydra_adapter import argument_parser
from ddp_runner.cli.known_keys import known_keys, nearest_key, own_folders
from ddp_runner.cli.resume import resumed_overrides
from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.errors import UserError


@dataclass(frozen=True)
class CommandLine:
    """A command line, with the groups that a resumed run adds."""

    written: tuple[str, ...]  # every argument as the user gave it
    options: tuple[str, ...]  # Hydra's, with their values
    overrides: tuple[Override, ...]  # every key=value, parsed
    implied: tuple[str, ...] = ()  # those that the user did not write: the groups of a resumed run
    folders: tuple[str, ...] = ()  # URLs of the user's own groups
    is_multirun: bool = False  # -m is given; a YAML may ask for a sweep as well
    only_shows: bool = False  # --help, --cfg, --info, --shell-completion: nothing is to run

    @property
    def arguments(self) -> list[str]:
        """The overrides, in one piece as argparse wants them, then the options.

        After the option --info an override would be taken for its value.
        """
        return [*(str(one.input_line) for one in self.overrides), *self.options]

    @property
    def fixed(self) -> list[str]:
        """The overrides that are the same for every job of a sweep."""
        return [str(one.input_line) for one in self.overrides if not one.is_sweep_override()]

    @property
    def sweeps(self) -> list[Override]:
        """The overrides with several values."""
        return [one for one in self.overrides if one.is_sweep_override()]


def parse(arguments: Sequence[str]) -> CommandLine:
    """Read a command line.

    Raises:
        UserError: an option does not exist, lacks its value, or excludes another.
        HydraException: an override cannot be read.
    """
    parser = argument_parser()
    vars(parser)["error"] = _raise_option_error  # argparse prints a usage that names no key
    # Intermixed: keys may stand before and after options, as in `model=toy -m seed=1,2`.
    parsed, unknown = parser.parse_known_intermixed_args(list(arguments))
    validate_options(parsed, unknown, arguments)
    options = list(arguments)
    for override in parsed.overrides:
        options.remove(override)
    reader = OverridesParser.create()
    if parsed.shell_completion:  # its words are no overrides: install=bash, and what is half typed
        return CommandLine(tuple(arguments), (*options, *parsed.overrides), (), only_shows=True)
    overrides = reader.parse_overrides(parsed.overrides)
    folders = own_folders(parsed.config_dir, overrides)
    implied: list[str] = []
    if not parsed.multirun:
        paths = [CONFIG_DIR, *(Path(one.removeprefix("file://")) for one in folders)]
        every, implied = resumed_overrides(parsed.overrides, folders=paths)
        overrides = reader.parse_overrides(every)
    return CommandLine(
        written=tuple(arguments),
        options=tuple(options),
        overrides=tuple(overrides),
        implied=tuple(implied),
        folders=tuple(folders),
        is_multirun=parsed.multirun,
        only_shows=bool(parsed.help or parsed.hydra_help or parsed.cfg or parsed.info),
    )


def validate_options(parsed: Namespace, unknown: Sequence[str], arguments: Sequence[str]) -> None:
    """Refuse options that Hydra does not have, which often are keys, and those that are not ours.

    Raises:
        UserError: it names the key that was meant, if one is near.
    """
    if parsed.experimental_rerun is not None:
        raise UserError(
            "--experimental-rerun reads a pickled config, which a run never leaves; write "
            "resume=RUN_FOLDER to go on with a run"
        )
    if parsed.config_name is not None or parsed.config_path is not None:
        raise UserError(
            "--config-name and --config-path are not for this program; give your own groups by "
            "--config-dir=FOLDER"
        )
    if parsed.config_dir is not None and not Path(parsed.config_dir).is_dir():
        raise UserError(f"--config-dir: there is no folder {Path(parsed.config_dir).absolute()}")
    modes = (parsed.cfg, parsed.info, parsed.shell_completion, parsed.multirun, parsed.run)
    if sum(map(bool, modes)) > 1:
        raise UserError(
            "--cfg, --info, --shell-completion and -m exclude each other; leave -m out to see "
            "one job"
        )
    completes = ("install=", "uninstall=", "query=")
    if parsed.shell_completion and not any(one.startswith(completes) for one in parsed.overrides):
        raise UserError('write eval "$(ddp-runner --shell-completion install=bash)"')
    option = next((one for one in unknown if one.startswith("-")), None)
    if option is not None:
        word, _, value = option.lstrip("-").partition("=")
        if not value:
            value = next((one for one in parsed.overrides if "=" not in one), "VALUE")
        meant = nearest_key(word.replace("-", "_"), known_keys(arguments))
        hint = f"keys have no dashes: write {meant}={value}" if meant else "see --help"
        raise UserError(f"{option} is not an option; {hint}")


def _raise_option_error(reason: str) -> NoReturn:
    raise UserError(f"{reason}; see --help")
