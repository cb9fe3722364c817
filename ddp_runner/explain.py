"""Hydra's many ways to refuse a command line, each as one plain line with the nearest valid key."""

import difflib
import re
from collections.abc import Iterable

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_runner.compose import CONFIG_DIR
from ddp_runner.errors import UserError


def user_error(error: BaseException) -> UserError | None:
    """Return the one line that says what is wrong, or None for what the user did not cause."""
    chain = []
    link: BaseException | None = error
    while link is not None:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in chain:
        if isinstance(link, UserError):
            return link
    # The innermost knows the key: "full_key: train.epochs".
    text = "\n".join(str(link) for link in chain)
    if isinstance(error, OverrideParseException):
        first = " ".join(str(error).split("\nSee ")[0].split())
        return UserError(f"{first}; write key=value, and quote what the shell would change")
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    if match := re.search(r"Could not (?:override|delete from config\.) '([^']+)'", text):
        return _unknown_key(match[1].partition("@")[0])
    key = re.search(r"full_key: (\S+)", text)
    reason = next((str(link) for link in reversed(chain) if str(link)), str(error))
    reason = reason.splitlines()[0].rstrip(".")
    return UserError(f"{key[1]}: {reason}" if key and key[1] else " ".join(reason.split()))


def _missing_option(error: MissingConfigException) -> UserError:
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = list(error.options or [])
    if not group:
        return UserError(" ".join(str(error).split()))
    nearest = _nearest(option, options)
    return UserError(f"{group}={option} does not exist{nearest}; options: {', '.join(options)}")


def _unknown_key(key: str) -> UserError:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        known = list(_keys(compose("config")))
    nearest = _nearest(key, known)
    if not nearest:
        # A right last part under a wrong group: learning rates are often looked for under train.
        last = key.rpartition(".")[2]
        same = [one for one in known if one.rpartition(".")[2] == last]
        nearest = f"; did you mean {' or '.join(same)}?" if same else "; see --help for all keys"
    return UserError(f"{key} is not a key of the config{nearest}")


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def _keys(config: DictConfig, prefix: str = "") -> Iterable[str]:
    for key in map(str, config):
        yield f"{prefix}{key}"
        if OmegaConf.is_dict(config._get_node(key)):
            yield from _keys(config[key], f"{prefix}{key}.")
