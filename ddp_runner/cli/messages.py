"""Explains why Hydra rejects a command line, in one line with the fix. Torch-free."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import reduce
from operator import getitem
from traceback import walk_tb
from typing import Any, get_origin

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException, ValidationError

from ddp_runner.cli.command import known_config
from ddp_runner.cli.compose import OWN_GROUPS, config_at, group_options, yaml_of
from ddp_runner.cli.mistakes import missing_option, nearest_key
from ddp_runner.config.fields import KINDS, plain_kind, walk
from ddp_runner.config.identity import dotted_keys
from ddp_runner.config.schema import CONFIG_DIR, LIST_GROUPS, Config
from ddp_runner.config.signatures import source_keywords
from ddp_runner.errors import UserError, in_yaml, os_sentence, with_causes

OURS = "ddp_runner"
PACKAGE_LINE = "begin it with the line # @package _global_"
GROUP_EXAMPLE = "params.groups=[{match:head.*,lr:0.01}]"
# Class names of errors, which do not help a user.
EVALUATING = re.compile(r" \w+ while evaluating ")
RESOLVING = re.compile(r"\w+ (?:raised )?while resolving interpolation: ")
# Patterns of messages of Hydra and OmegaConf without a fix, and the message to print instead. The
# first match wins. test_mistakes.py has a command line for each.
SENTENCES: tuple[tuple[str, str], ...] = (
    (r"(?s)Missing mandatory value.*full_key: (\S+)", r"\1 has no value; write \1=VALUE"),
    (r"\Amaximum recursion depth", "the defaults of a YAML lead back to itself; change them"),
    (r"(?s)override '([^=]+)=.*Unknown function '(\w+)'",
     r"\1: the function \2 does not exist; for a search write \1=interval(LOW,HIGH) or "
     "\\1=tag(log,interval(LOW,HIGH)), and for a text \\1='\"TEXT\"'"),
    (r"In '([\w/]+)': Could not override '(\w+)@\w+\.\2'",
     rf"\1.yaml chooses an option of \2; {PACKAGE_LINE}"),
    (r"In '([\w/]+)': Could not override '\w+/(\w+)@\2'",
     r"\1.yaml overrides \2 without a slash; write override /\2: OPTION"),
    (r"In '([\w/]+)': Could not override '([\w/]+)'\. No match",
     r"\1.yaml overrides \2, which not every run has; see --help for the groups"),
    (r"(?m)^(\w+) appears more than once in the final defaults list",
     r"a YAML's defaults choose \1, which has an option already; write override /\1: OPTION"),
    (r"Multiple values for ([\w/]+)\. To override a value use 'override [^:]+: (.+)'",
     r"\1 has a value already; write \1=\2, without +"),
    (r"Cannot assign (\w+) to Dict\b",
     rf"params.groups holds \1 instead of mappings; write {GROUP_EXAMPLE}"),
    (r"(?s)Environment variable '(\w+)' not found.*full_key: (\S+)",
     r"\2: the environment variable \1 is not set; set it, or write ${oc.env:\1,DEFAULT}"),
    (r"(?s)Interpolation key '(dataset\.\w+)' not found.*full_key: (\S+)",
     r"\2 comes from \1, which this dataset does not have; choose another dataset, or set \2"),
)  # fmt: skip
# A number, a word of YAML or a call, where the name of an option belongs.
NOT_A_NAME = re.compile(r"(?:^|[\[(,])\s*(?:null|true|false|-?\d[\w.]*)\s*(?:$|[\]),])", re.I)


def user_error(error: BaseException, arguments: Sequence[str] = ()) -> UserError | None:
    """Return the line that explains an error, or None if the user did not cause it.

    The `arguments`, the command line, are for hints about its keys.
    """
    chain = with_causes(error)
    if own := [link for link in chain if isinstance(link, UserError)]:
        return own[0]
    is_hydras = isinstance(error, HydraException | OmegaConfBaseException)
    # Some errors of Hydra are OSErrors too; OmegaConf's, about a YAML, have no number.
    if isinstance(error, OSError) and not is_hydras and error.errno is not None:
        return UserError(os_sentence(error))
    if not (is_hydras or _is_from_libraries(error)):
        return None
    text = "\n".join(map(str, chain))
    matches = ((re.search(pattern, text), sentence) for pattern, sentence in SENTENCES)
    sentence = (
        _missing_option(error)
        or _unknown_key(error, text, arguments)
        or _wrong_value(chain)
        or next((match.expand(sentence) for match, sentence in matches if match), None)
        or _group_value(error, arguments)
        or _own_words(chain)
    )
    return UserError(" ".join(sentence.split()))


def _is_from_libraries(error: BaseException) -> bool:
    """Return whether Hydra, or a library that it reads configs with, raised this error.

    They raise plain ValueErrors and TypeErrors for many mistakes of a user. Frames of the standard
    library do not count.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    names = [module.partition(".")[0] for module in modules]
    packages = [name for name in names if name in ("hydra", "omegaconf", "antlr4", "yaml", OURS)]
    return isinstance(error, Exception) and bool(packages) and packages[-1] != OURS


def _own_words(chain: Sequence[BaseException]) -> str:
    error = chain[0]
    if isinstance(error, OverrideParseException):
        reason = EVALUATING.sub(": ", " ".join(str(error).partition("\nSee ")[0].split()))
        if reason.startswith("LexerNoViableAltException"):  # names only the first bad character
            reason = f"{error.override} cannot be read"
        return (
            f"{reason}; write key=value without spaces around =, quote what the shell would "
            "change, and put a text with any of ,[]{}'\" into quotes of its own: 'key=\"a,b\"'"
        )
    if isinstance(error, UnicodeDecodeError):
        return f"{yaml_of(error)} is not a text in UTF-8 ({error.reason}); save it as UTF-8"
    if isinstance(error, yaml.YAMLError):
        return f"{error}; correct the YAML there"
    link = next((link for link in chain if isinstance(link, OmegaConfBaseException)), None)
    if link is None:
        return str(error) or "the command cannot be read; see --help"
    reason = RESOLVING.sub("the interpolation fails: ", str(link).strip().partition("\n")[0])
    key = next(filter(None, (getattr(link, "full_key", None) for link in chain)), "")
    return reason if not key or key.startswith("_dummy_") else f"{key}: {reason}"  # Hydra's dummy


def _missing_option(error: BaseException) -> str | None:
    if not isinstance(error, MissingConfigException):
        return None
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    if not group:
        return None
    # For an option in a list, as in metrics=[auc,top_k], Hydra does not list the options.
    options = list(error.options or group_options().get(group, []))
    if not options:
        last = group.rpartition("/")[2]
        is_inner = last != group and last in group_options()
        fix = f"; write override /{last}: {option}" if is_inner else ""
        return f"{group}={option} does not exist, and a YAML's defaults name it{fix}"
    return missing_option(group, option, options, has_own=bool(OWN_GROUPS))


def _unknown_key(error: BaseException, text: str, arguments: Sequence[str]) -> str | None:
    """Explain a key of the command line or of a YAML that the config does not have."""
    if match := re.match(r"Could not (?:override|delete from config\.) '([^'@]+)", str(error)):
        # Where words may hold several values, the config lacks their groups.
        has_sweep = any(re.search(r"[,(]", word) for word in arguments)
        return _key_hint(match[1], arguments, None if has_sweep else config_at(error))
    key_match = re.search(r"Key '([^']*)' not in '\w*Config'\s+full_key: (\S+)", text)
    yaml_match = re.match(r"In '((\w+)/[^']+)'", str(error))
    if key_match is None or yaml_match is None:
        return None
    (name, key), (path, group) = key_match.groups(), yaml_match.groups()
    if key in (group, "global"):
        return f"{path}.yaml sets keys of the whole config; {PACKAGE_LINE}"
    if key == "_target_":
        return f"{path}.yaml has _target_ at its top; write the keys of its class below {group}:"
    if "." in name:
        return f"{path}.yaml: {name} is written with a dot; nest it, as in train: {{epochs: 3}}"
    return f"{path}.yaml: {_key_hint(key, arguments)}"


def _key_hint(key: str, arguments: Sequence[str], config: Any = None) -> str:
    if key.startswith(("loop.", "user.")):  # Hydra adds the user's own keys only with a plus
        return f"{key} is a key of your own that no YAML gives; write +{key}=VALUE"
    config = config or known_config(arguments)
    known = list(dotted_keys(config))
    if key in known:
        return f"{key} takes no such override; write {key}=VALUE, or +{key}.KEY=VALUE for a new key"
    parent, _, last = key.rpartition(".")
    if f"{parent}._target_" in known:
        target = reduce(getitem, parent.split("."), config)["_target_"]
        with suppress(ImportError):  # the key is wrong, too
            if last in source_keywords(str(target)):
                return (
                    f"{key} is not a key of the chosen option, but its class takes it; "
                    f"write +{key}=VALUE"
                )
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == parent]
    hint = f"see --help for all keys, and put your own under user, as in user.{key}"
    if match := nearest_key(key, known):
        hint = f"did you mean {match}?"
    elif parent and siblings:
        hint = f"the keys of {parent} are {', '.join(siblings)}"
    return f"{key} is not a key of the config; {hint}"


def _wrong_value(chain: Sequence[BaseException]) -> str | None:
    """Explain a value of the wrong type for a key of the schema."""
    errors = [link for link in chain if isinstance(link, ValidationError | ConfigTypeError)]
    if not errors or not errors[0].full_key:
        return None
    kinds: dict[str, Any] = dict.fromkeys((item.name for item in fields(Config)), dict)
    for item in walk(Config()):
        kinds[item.name] = get_origin(plain_kind(item.kind)) or plain_kind(item.kind)
    key, value = errors[0].full_key, in_yaml(errors[0].value)
    kind = kinds.get(key)
    if str(chain[0]).startswith("Error merging override ~"):
        return f"{key} cannot be removed; every run needs it: write {key}=VALUE"
    if kind is dict:
        return f"{key} is a group of keys; write {key}.KEY=VALUE"
    if kind is list:
        return f"{key} must be a list; write {key}=[ONE,OTHER]"
    whole = key.partition("[")[0]
    if whole == "params.groups":
        return f"{key} must be a mapping; write {GROUP_EXAMPLE}"
    if whole != key and kinds.get(whole) is list:
        return f"{key} ({value}) must be a text; write {whole}=[ONE,OTHER]"
    return f"{key} ({value}) must be {KINDS[kind]}" if kind in KINDS else None


def _group_value(error: BaseException, arguments: Sequence[str]) -> str | None:
    """Explain a group with a value that is not an option's name: Hydra does not name the group."""
    is_silent = isinstance(error, AssertionError) and not str(error)
    is_about_group = str(error).startswith("Config group override ")
    if not (is_silent or is_about_group or isinstance(error, TypeError)):
        return None
    groups = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}
    for argument in arguments:
        key, sign, value = argument.partition("=")
        name = key.lstrip("+~")
        if not sign or (name and (name not in groups or not NOT_A_NAME.search(value))):
            continue
        if name in LIST_GROUPS:
            return f"{name} ({value}) must be a list of options; write {name}=[] for none of them"
        name = name or "the empty key"
        return f"{name} ({value}) must be the name of an option; see --help for the options"
    return "a group must be given the name of an option; see --help for the options"
