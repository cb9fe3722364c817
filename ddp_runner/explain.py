"""Hydra's many ways to refuse a command line, each as one plain line with the nearest valid key.

Called by ``__main__`` when composing has failed; torch-free.
"""

import difflib
import re
import sys
from collections.abc import Iterator, Sequence

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_runner.compose import CONFIG_DIR
from ddp_runner.errors import UserError

TYPES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}


def user_error(error: BaseException) -> UserError | None:
    """Return the one line that says what is wrong, or None for what the user did not cause."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for link in chain:
        if isinstance(link, UserError):
            return link
    if isinstance(error, OverrideParseException):
        reason = " ".join(str(error).split("\nSee ")[0].split())
        return UserError(f"{reason}; write key=value, and quote what the shell would change")
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OSError):
        return UserError(
            f"{error.filename}: {error.strerror}; give folders that exist or can be made"
        )
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _refused_override(chain)
    return None


def _refused_override(chain: Sequence[BaseException]) -> UserError:
    text = "\n".join(str(link) for link in chain)
    if match := re.search(r"Could not (?:override|delete from config\.) '([^']+)'", text):
        return _unknown_key(match[1].partition("@")[0])
    value = re.search(r"Error merging override ([^=\s]+)=(.*)", text)
    kind = re.search(r"(?:could not be converted to|is not a valid) (\w+)", text)
    if value and kind:
        wanted = TYPES.get(kind[1], kind[1])
        return UserError(f"{value[1].lstrip('+')} ({value[2]}) must be {wanted}")
    key = re.search(r"full_key: (\S+)", text)
    lacking = re.search(r"Interpolation key '(dataset\.\w+)' not found", text)
    if key and lacking:
        return UserError(
            f"{key[1]} comes from {lacking[1]}, which this dataset has not; choose another "
            f"dataset, or give {key[1]} itself"
        )
    if key and "is not a ListConfig" in text:
        return UserError(f"{key[1]} must be a list; write {key[1]}=[ONE,OTHER]")
    reasons = [str(link) for link in chain if isinstance(link, OmegaConfBaseException)]
    reason = (reasons or [text])[0].splitlines()[0]
    return UserError(f"{key[1]}: {reason}" if key else reason)


def _missing_option(error: MissingConfigException) -> UserError:
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = list(error.options or [])
    if not group:
        return UserError(" ".join(str(error).split()))
    if "optuna" in option:
        return UserError(
            f"{group}={option} needs Hydra's Optuna plugin; pip install 'ddp-runner[optuna]'"
        )
    hint = _nearest(option, options) or ";"
    return UserError(f"{group}={option} does not exist{hint} options: {', '.join(options)}")


def _unknown_key(key: str) -> UserError:
    known = list(_keys(_compose_groups()))
    parent, _, last = key.rpartition(".")
    siblings = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == parent]
    same_name = [one for one in known if one.rpartition(".")[2] == last]
    prefix = f"{parent}." if parent else ""
    hint = _nearest(last, siblings, prefix=prefix) or _nearest(key, known, cutoff=0.8)
    if not hint and same_name:
        hint = f"; did you mean {' or '.join(same_name)}?"
    if not hint and parent and siblings:
        hint = f"; the keys of {parent} are {', '.join(siblings)}"
    return UserError(f"{key} is not a key of the config{hint or '; see --help for all keys'}")


def _compose_groups() -> DictConfig:
    """Return the config with this command line's groups alone, whose keys the user meant."""
    groups = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}
    given = [one for one in sys.argv[1:] if not any(sign in one for sign in ",()")]  # no sweeps
    chosen = [one for one in given if one.partition("=")[0] in groups]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("config", chosen)


def _nearest(word: str, known: Sequence[str], *, prefix: str = "", cutoff: float = 0.6) -> str:
    matches = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, config):
        yield f"{prefix}{key}"
        if OmegaConf.is_dict(config._get_node(key)):
            yield from _keys(config[key], f"{prefix}{key}.")
