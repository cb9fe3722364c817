"""Tells mistakes without Hydra, whose imports take longer than the rest of an answer."""

import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from ddp_runner.config.fields import walk
from ddp_runner.config.schema import CONFIG_DIR, RUNNER_KEYS, Config
from ddp_runner.config.signatures import CLOSE
from ddp_runner.errors import UserError, nearest

# Words of other programs for the last part of a key.
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


def validate_words(words: Sequence[str]) -> None:
    """Raise a UserError for a key or an option that is wrong whatever the config is.

    All else is left to Hydra, also where the user may have groups of their own.
    """
    others = ("-", "resume=", "hydra.searchpath=")
    if any(word.lstrip("+").startswith(others) for word in {*words} - {"-m", "--multirun"}):
        return
    groups = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()} - {"hydra"}
    names = [*(item.name for item in walk(Config())), "optimizer.lr"]  # which every optimizer has
    typed = {name.partition(".")[0] for name in names[:-1] if "." in name}
    sections = {"hydra", *groups, *vars(Config())} - typed  # with any keys
    of_groups = {name for keys in RUNNER_KEYS.values() for name in keys}  # weights: whose?
    for key, is_set, value in (word.partition("=") for word in words):
        if key in groups and re.fullmatch(r"(?!(null|true|false)$)[a-z]\w*", value):
            options = sorted(path.stem for path in (CONFIG_DIR / key).glob("*.yaml"))
            if value not in options:
                raise UserError(missing_option(key, value, options, has_own=False))
        is_plain = is_set and re.fullmatch(r"[a-z]\w*(\.\w+)*", key) and key not in of_groups
        is_key = key.partition(".")[0] in sections or any(
            f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.") for name in names
        )
        if is_plain and not is_key and (match := nearest_key(key, names)):
            raise UserError(f"{key} is not a key of the config", f"did you mean {match}?")


def missing_option(group: str, option: str, options: Sequence[str], *, has_own: bool) -> str:
    """Return the sentence about an option that a group lacks; `has_own`: the user has groups."""
    match = nearest_key(option, options)
    hint = f"; did you mean {match}?" if match else ";"
    roots = [path.parents[1] for path in Path().glob(f"*/{group}/*.yaml") if path.stem == option]
    folder = quote(str(roots[0])) if roots else "FOLDER"
    is_own = "/" not in group and (roots or not has_own)
    own = f"; for your own write --config-dir={folder}" if is_own else ""
    return f"{group}={option} does not exist{hint} options: {', '.join(options)}{own}"


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """Return the known key that the user most likely meant; None if no key is near."""
    parent, _, last = key.rpartition(".")
    if parent.partition(".")[0] != "hydra":
        known = [name for name in known if name.partition(".")[0] != "hydra"]
    siblings = {
        name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent
    }
    synonyms = next((words for words in SAME_MEANING if last in words), {last})
    candidates = siblings if parent else {name.rpartition(".")[2]: name for name in known}
    for word in sorted(synonyms & candidates.keys() - {last}):
        return candidates[word]
    same_name = [name for name in known if name.rpartition(".")[2] in synonyms]
    if len(same_name) == 1:  # as in train.lr, and nnodes, which is near notes
        return same_name[0]
    if (sibling := nearest(last, siblings, cutoff=CLOSE)) is not None:
        return siblings[sibling]
    if siblings and parent:
        return None  # every key of this parent would be near the whole key
    return nearest(key, known, cutoff=0.8) or " or ".join(same_name) or None
