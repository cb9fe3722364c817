"""What is wrong with a command line that Hydra rejects, in one line with the fix. Torch-free."""

import re
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from shlex import quote
from traceback import walk_tb
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException, ValidationError

from ddp_runner.cli.command import compose_groups, known_keys, nearest_key
from ddp_runner.cli.compose import OWN_GROUPS, group_options, yaml_of
from ddp_runner.config.fields import KINDS
from ddp_runner.config.schema import CONFIG_DIR, LIST_GROUPS, Config
from ddp_runner.config.signatures import source_keywords
from ddp_runner.errors import UserError, in_yaml, os_sentence

OURS = "ddp_runner"
PACKAGE_LINE = "begin it with the line # @package _global_"
GROUP_EXAMPLE = "params.groups=[{match:head.*,lr:0.01}]"
LIBRARIES = ("hydra", "omegaconf", "antlr4", "yaml")
# Class names of errors, which tell a user nothing.
EVALUATING = re.compile(r" \w+ while evaluating ")
RESOLVING = re.compile(r"\w+ (?:raised )?while resolving interpolation: ")
# What Hydra and OmegaConf say so that a user cannot act on it: a pattern of their message, and what
# to print. The first match wins. test_mistakes.py has a command line for each.
SENTENCES: tuple[tuple[str, str], ...] = (
    (r"(?s)Missing mandatory value.*full_key: (\S+)", r"\1 has no value; write \1=VALUE"),
    (r"\Amaximum recursion depth", "the defaults of a YAML lead back to itself; change them"),
    (r"(?s)override '([^=]+)=.*Unknown function '(\w+)'",
     r"\1: there is no function \2; for a search write \1=interval(LOW,HIGH) or "
     "\\1=tag(log,interval(LOW,HIGH)), and for a text \\1='\"TEXT\"'"),
    (r"In '([\w/]+)': Could not override '(\w+)@\w+\.\2'",
     rf"\1.yaml chooses an option of \2; {PACKAGE_LINE}"),
    (r"In '([\w/]+)': Could not override '\w+/(\w+)@\2'",
     r"\1.yaml overrides \2 without a slash; write override /\2: OPTION"),
    (r"In '([\w/]+)': Could not override '([\w/]+)'\. No match",
     r"\1.yaml overrides \2, which is no group that every run has; see --help for the groups"),
    (r"(?m)^(\w+) appears more than once in the final defaults list",
     r"a YAML's defaults choose \1, which has an option already; write override /\1: OPTION"),
    (r"Multiple values for ([\w/]+)\. To override a value use 'override [^:]+: (.+)'",
     r"\1 has a value already; write \1=\2, without +"),
    (r"Cannot assign (\w+) to Dict\b",
     rf"params.groups holds \1 where mappings belong; write {GROUP_EXAMPLE}"),
    (r"(?s)Environment variable '(\w+)' not found.*full_key: (\S+)",
     r"\2: the environment variable \1 is not set; set it, or write ${oc.env:\1,DEFAULT}"),
    (r"(?s)Interpolation key '(dataset\.\w+)' not found.*full_key: (\S+)",
     r"\2 comes from \1, which this dataset does not have; choose another dataset, or set \2"),
)  # fmt: skip
# Of a group's value: a number, a word of YAML or a call, where the name of an option belongs.
NOT_A_NAME = re.compile(r"(?:^|[\[(,])\s*(?:null|true|false|-?\d[\w.]*)\s*(?:$|[\]),])", re.I)


def user_error(error: BaseException, arguments: Sequence[str] = ()) -> UserError | None:
    """Return the one line that says what is wrong, or None for what the user did not cause.

    `arguments`, the command line, are for hints about its keys.
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        if cause in chain:
            break  # in a debugger some errors of OmegaConf are their own cause
        chain.append(cause)
    if own := [link for link in chain if isinstance(link, UserError)]:
        return own[0]
    is_hydras = isinstance(error, HydraException | OmegaConfBaseException)
    # Some of Hydra's are both; one without a number is OmegaConf's, about a YAML.
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
    """Return whether Hydra, or a library that it reads configs with, raised this error itself.

    They raise plain ValueErrors and TypeErrors for much that a user can cause. Frames of the
    standard library do not count.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    packages = [one for name in modules if (one := name.partition(".")[0]) in (*LIBRARIES, OURS)]
    return isinstance(error, Exception) and bool(packages) and packages[-1] != OURS


def _own_words(chain: Sequence[BaseException]) -> str:
    """Return what a library says itself."""
    error = chain[0]
    if isinstance(error, OverrideParseException):
        reason = EVALUATING.sub(": ", " ".join(str(error).partition("\nSee ")[0].split()))
        if reason.startswith("LexerNoViableAltException"):  # of the first character that it rejects
            reason = f"{error.override} cannot be read"
        return (
            f"{reason}; write key=value without spaces around =, quote what the shell would "
            "change, and put a text with any of ,[]{}'\" into quotes of its own: 'key=\"a,b\"'"
        )
    if isinstance(error, UnicodeDecodeError):
        return f"{yaml_of(error)} is not a text in UTF-8 ({error.reason}); save it as one"
    if isinstance(error, yaml.YAMLError):
        return f"{error}; correct the YAML there"
    found = next((one for one in chain if isinstance(one, OmegaConfBaseException)), None)
    if found is None:
        return str(error) or "the command cannot be read; see --help"
    reason = RESOLVING.sub("the interpolation fails: ", str(found).strip().partition("\n")[0])
    key = next(filter(None, (getattr(one, "full_key", None) for one in chain)), "")
    return reason if not key or key.startswith("_dummy_") else f"{key}: {reason}"  # Hydra's dummy


def _missing_option(error: BaseException) -> str | None:
    if not isinstance(error, MissingConfigException):
        return None
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    if not group:
        return None
    # Of an option in a list, as in metrics=[auc,top_k], Hydra does not say what there is.
    options = list(error.options or group_options().get(group, []))
    if not options:
        last = group.rpartition("/")[2]
        is_inner = last != group and last in group_options()
        fix = f"; write override /{last}: {option}" if is_inner else ""
        return f"{group}={option} does not exist, and a YAML's defaults name it{fix}"
    meant = nearest_key(option, options)
    hint = f"; did you mean {meant}?" if meant else ";"
    found = [one.parents[1] for one in Path().glob(f"*/{group}/*.yaml") if one.stem == option]
    folder = quote(str(found[0])) if found else "FOLDER"
    is_own = "/" not in group and (found or not OWN_GROUPS)
    own = f"; for your own write --config-dir={folder}" if is_own else ""
    return f"{group}={option} does not exist{hint} options: {', '.join(options)}{own}"


def _unknown_key(error: BaseException, text: str, arguments: Sequence[str]) -> str | None:
    """Explain a key, of the command line or of a YAML, that the config does not have."""
    if match := re.match(r"Could not (?:override|delete from config\.) '([^'@]+)", str(error)):
        return _key_hint(match[1], arguments)
    match = re.search(r"Key '([^']*)' not in '\w*Config'\s+full_key: (\S+)", text)
    place = re.match(r"In '((\w+)/[^']+)'", str(error))
    if match is None or place is None:
        return None
    (name, key), (path, group) = match.groups(), place.groups()
    if key in (group, "global"):
        return f"{path}.yaml sets keys of the whole config; {PACKAGE_LINE}"
    if key == "_target_":
        return f"{path}.yaml has _target_ at its top; write the keys of its class below {group}:"
    if "." in name:
        return f"{path}.yaml: {name} is written with a dot; nest it, as in train: {{epochs: 3}}"
    return f"{path}.yaml: {_key_hint(key, arguments)}"


def _key_hint(key: str, arguments: Sequence[str]) -> str:
    if key.startswith(("loop.", "user.")):  # the user's own, which Hydra adds with a plus only
        return f"{key} is a key of your own that no YAML gives; write +{key}=VALUE"
    known = known_keys(arguments)
    if key in known:
        return f"{key} takes no such override; write {key}=VALUE, or +{key}.KEY=VALUE for a new key"
    meant, (parent, _, last) = nearest_key(key, known), key.rpartition(".")
    if f"{parent}._target_" in known:
        with suppress(Exception):  # no hint is worth an exception
            target = OmegaConf.select(compose_groups(arguments), f"{parent}._target_")
            if last in (source_keywords(str(target)) or ()):
                return (
                    f"{key} is not a key of the chosen option, but its class takes it; "
                    f"write +{key}=VALUE"
                )
    siblings = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == parent]
    hint = f"see --help for all keys, and put your own under user, as in user.{key}"
    if meant:
        hint = f"did you mean {meant}?"
    elif parent and siblings:
        hint = f"the keys of {parent} are {', '.join(siblings)}"
    return f"{key} is not a key of the config; {hint}"


def _wrong_value(chain: Sequence[BaseException]) -> str | None:
    """Explain a value that the schema's type of its key does not allow."""
    error = next((one for one in chain if isinstance(one, ValidationError | ConfigTypeError)), None)
    if error is None or not error.full_key:
        return None
    key, kind = error.full_key, _schema_type(error.full_key)
    if str(chain[0]).startswith("Error merging override ~"):
        return f"{key} cannot be removed; every run needs it: write {key}=VALUE"
    if is_dataclass(kind) or kind is dict:
        return f"{key} is a group of keys; write {key}.KEY=VALUE"
    if kind is list:
        return f"{key} must be a list; write {key}=[ONE,OTHER]"
    whole = key.partition("[")[0]
    if whole == "params.groups":
        return f"{key} must be a mapping; write {GROUP_EXAMPLE}"
    if whole != key and _schema_type(whole) is list:
        return f"{key} ({in_yaml(error.value)}) must be a text; write {whole}=[ONE,OTHER]"
    return f"{key} ({in_yaml(error.value)}) must be {KINDS[kind]}" if kind in KINDS else None


def _schema_type(key: str) -> Any:
    """Return the type that the schema gives a key, without its ``| None``; None for no such key."""
    kind: Any = Config
    for part in key.split("."):
        kinds = {one.name: one.type for one in fields(kind)} if is_dataclass(kind) else {}
        kind = kinds.get(part)
        if isinstance(kind, types.UnionType):
            kind = typing.get_args(kind)[0]
    return typing.get_origin(kind) or kind


def _group_value(error: BaseException, arguments: Sequence[str]) -> str | None:
    """Explain a group whose value is no option's name; Hydra does not say which group it is."""
    says_nothing = isinstance(error, AssertionError) and not str(error)
    if not (
        says_nothing
        or isinstance(error, TypeError)
        or str(error).startswith("Config group override ")
    ):
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
