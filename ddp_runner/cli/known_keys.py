"""Which key a command line could have meant: the keys of the groups that it chooses. Torch-free."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ddp_runner.cli.hydra_adapter import argument_parser, compose_config
from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.errors import nearest

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


def known_keys(arguments: Sequence[str]) -> list[str]:
    """Return the dotted keys of the config that a command line's groups make.

    If they do not compose, return the keys of the default groups; if those fail too, nothing.
    """
    for given in (arguments, ()):
        try:
            return dotted_keys(_compose_groups(given))
        except Exception:  # the command's own error is reported anyway; this is about a hint only
            continue
    return []


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the key that the user most likely meant; None if no key is near."""
    parent, _, last = key.rpartition(".")
    if parent.partition(".")[0] != "hydra":
        known = [one for one in known if one.partition(".")[0] != "hydra"]
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == parent}
    alike = next((words for words in SAME_MEANING if last in words), set())
    candidates = siblings if parent else {one.rpartition(".")[2]: one for one in known}
    for word in sorted(alike & candidates.keys() - {last}):
        return candidates[word]
    if (sibling := nearest(last, siblings)) is not None:
        return siblings[sibling]
    if siblings and parent:
        return None  # every key of this parent would be near the whole key
    if (whole := nearest(key, known, cutoff=0.8)) is not None:
        return whole
    same_name = [one for one in known if one.rpartition(".")[2] == last]
    return " or ".join(same_name) or None


def own_folders(config_dir: str | None, overrides: Sequence[Override]) -> list[str]:
    """Return the URLs of the user's own groups: --config-dir, then hydra.searchpath."""
    # Not as_uri, since Hydra does not decode %20.
    folders = [f"file://{Path(config_dir).absolute()}"] if config_dir else []
    for override in overrides:
        if override.key_or_group == "hydra.searchpath":
            value = override.value()
            folders += map(str, value if isinstance(value, list) else [])
    return folders


def _compose_groups(arguments: Sequence[str]) -> DictConfig:
    """Compose only the groups of a command line; for a sweep, the first value of each."""
    parsed, _ = argument_parser().parse_known_intermixed_args(list(arguments))
    parser = OverridesParser.create()
    overrides = [parser.parse_override(one) for one in parsed.overrides if "=" in one]
    folders = own_folders(parsed.config_dir, overrides)
    roots = [CONFIG_DIR, *(Path(one.removeprefix("file://")) for one in folders)]
    groups = {path.name for root in roots if root.is_dir() for path in root.iterdir()}
    chosen = []
    for override in overrides:
        group = override.key_or_group
        if group not in groups and not group.startswith("hydra/"):
            continue
        if override.is_choice_sweep():
            chosen.append(f"{group}={next(iter(override.sweep_string_iterator()))}")
        elif not override.is_sweep_override():
            chosen.append(str(override.input_line))
    return compose_config(chosen, folders=folders)


def dotted_keys(config: DictConfig) -> list[str]:
    """Return the keys of a config, of its groups too, without resolving anything."""
    tree = OmegaConf.to_container(config, resolve=False)
    return list(_keys(tree)) if isinstance(tree, dict) else []


def _keys(tree: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
