"""Which keys a command line could have meant: those of the groups that it chooses.

Used by ``explain``, and by ``__main__`` for options that Hydra does not have; torch-free.
"""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from ddp_runner.cli.resolvers import CONFIG_DIR
from ddp_runner.errors import UserError

# Words of other programs for a key of this one; the last part of a dotted key.
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


def validate_options(arguments: Sequence[str]) -> None:
    """Refuse an option with dashes that Hydra does not have; often it is a key.

    Raises:
        UserError: it says which key was meant, if one is near, or what an option lacks.
    """
    parser = get_args_parser()
    vars(parser)["error"] = _refuse_option  # its own prints its usage, which has none of the keys
    parsed, unknown = parser.parse_known_args(list(arguments))
    if parsed.experimental_rerun is not None:
        raise UserError(
            "--experimental-rerun reads a pickled config, which a run never leaves; write "
            "resume=RUN_FOLDER to go on with a run"
        )
    option = next((one for one in unknown if one.startswith("-")), None)
    if option is None:
        return
    word, _, value = option.lstrip("-").partition("=")
    if not value:
        value = next((one for one in parsed.overrides if "=" not in one), "VALUE")
    meant = nearest_key(word.replace("-", "_"), known_keys(arguments))
    hint = f"keys have no dashes: write {meant}={value}" if meant else "see --help"
    raise UserError(f"{option} is not an option; {hint}")


def _refuse_option(reason: str) -> NoReturn:
    raise UserError(f"{reason}; see --help")


def in_one_piece(arguments: Sequence[str]) -> list[str]:
    """Return a command line with its keys beside each other: argparse takes no others.

    As in ``model=toy -m seed=1,2``.
    """
    parsed, rest = get_args_parser().parse_known_args(list(arguments))
    if not rest:
        return list(arguments)
    options, keys = list(arguments), [*parsed.overrides, *rest]
    for key in keys:
        options.remove(key)
    return [*options, *keys]


def known_keys(arguments: Sequence[str]) -> list[str]:
    """Return the dotted keys of the config that a command line's groups make.

    Those of the default groups where the command line's fail, and none where these do.
    """
    for given in (arguments, ()):
        try:
            return list(_keys(_compose_groups(given)))
        except Exception:  # a hint is looked for; what is wrong with the command is known already
            continue
    return []


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the key that was meant, if there is one that is near enough."""
    parent, _, last = key.rpartition(".")
    if parent.partition(".")[0] != "hydra":
        known = [one for one in known if one.partition(".")[0] != "hydra"]
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == parent}
    alike = next((words for words in SAME_MEANING if last in words), set())
    candidates = siblings if parent else {one.rpartition(".")[2]: one for one in known}
    for word in sorted(alike & candidates.keys() - {last}):
        return candidates[word]
    if found := difflib.get_close_matches(last, siblings, n=1):
        return siblings[found[0]]
    if siblings and parent:
        return None  # the whole key would be near because of its parent
    if found := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
        return found[0]
    same_name = [one for one in known if one.rpartition(".")[2] == last]
    return " or ".join(same_name) or None


def own_folders(arguments: Sequence[str]) -> list[str]:
    """Return where the user's own groups lie, by --config-dir and hydra.searchpath, as Hydra's."""
    parsed, _ = get_args_parser().parse_known_args(list(arguments))
    # Not as_uri, since Hydra decodes no %20.
    folders = [f"file://{Path(parsed.config_dir).absolute()}"] if parsed.config_dir else []
    for override in _overrides(arguments):
        if override.key_or_group == "hydra.searchpath":
            value = override.value()
            folders += map(str, value if isinstance(value, list) else [])
    return folders


def _overrides(arguments: Sequence[str]) -> list[Override]:
    parsed, rest = get_args_parser().parse_known_args(list(arguments))
    parser = OverridesParser.create()
    given = [*parsed.overrides, *(one for one in rest if not one.startswith("-"))]
    return [parser.parse_override(one) for one in given if "=" in one]


def _compose_groups(arguments: Sequence[str]) -> DictConfig:
    """Compose the config with the groups alone that a command line chooses; of a sweep, a job's."""
    folders = own_folders(arguments)
    roots = [CONFIG_DIR, *(Path(one.removeprefix("file://")) for one in folders)]
    groups = {path.name for root in roots if root.is_dir() for path in root.iterdir()}
    chosen = []
    for override in _overrides(arguments):
        group = override.key_or_group
        if group not in groups and not group.startswith("hydra/"):
            continue
        if override.is_choice_sweep():
            chosen.append(f"{group}={next(iter(override.sweep_string_iterator()))}")
        elif not override.is_sweep_override():
            chosen.append(str(override.input_line))
    if folders:
        escaped = [one.replace("\\", "\\\\").replace("'", "\\'") for one in folders]
        quoted = ",".join(f"'{one}'" for one in escaped)
        chosen.append(f"hydra.searchpath=[{quoted}]")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("config", chosen, return_hydra_config=True)


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, config):
        yield f"{prefix}{key}"
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not (node._is_none() or node._is_interpolation()):
            yield from _keys(node, f"{prefix}{key}.")
