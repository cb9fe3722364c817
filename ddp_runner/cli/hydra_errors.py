"""What is wrong with a command line that Hydra rejects, in one line with the fix. Torch-free."""

import errno
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from traceback import walk_tb
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException, ValidationError

from ddp_runner.cli.command_line import group_folders, known_keys, nearest_key, taken_keys
from ddp_runner.cli.hydra_adapter import OWN_GROUPS
from ddp_runner.config.fields import KINDS
from ddp_runner.config.schema import CONFIG_DIR, LIST_GROUPS, Config
from ddp_runner.errors import UserError, in_yaml

OURS = "ddp_runner"
LIBRARIES = ("hydra", "omegaconf", "antlr4", "yaml")
GROUP_EXAMPLE = "params.groups=[{match:head.*,lr:0.01}]"
DEFAULT_HINT = (
    "write key=value, quote what the shell would change, and put a text with any of ,[]{}'\" into "
    "quotes of its own, as in 'key=\"a,b\"'"
)
# Class names of errors, which tell a user nothing.
EVALUATING = re.compile(r" \w+ while evaluating ")
RESOLVING = re.compile(r"\w+ (?:raised )?while resolving interpolation: ")
# What has no attributes to ask: a pattern of Hydra's or OmegaConf's message, and what to print. The
# first match wins. test_mistakes.py has a command line for each.
SENTENCES: tuple[tuple[str, str], ...] = (
    (r"Key '(\w+)' not in 'Config'",
     r"\1 is not a key of the config; see --help for all keys, and put your own under user, as in "
     r"user.\1"),
    (r"Could not override '(\w+)'\.\s+No match in the defaults list",
     r"a YAML overrides the group \1, which this program does not have; see --help for its groups"),
    (r"(?s)Missing mandatory value.*full_key: (\S+)", r"\1 has no value; write \1=VALUE"),
    (r"\Amaximum recursion depth", "the defaults of a YAML lead back to itself; change them"),
    (r"Multiple values for ([\w/]+)\. To override a value use 'override [^:]+: (.+)'",
     r"\1 has a value already; write \1=\2, without +"),
    (r"Could not append to config\. An item is already at '([^']+)'",
     r"\1 has a value already; write \1=VALUE, without +"),
    (r"force-add of config groups is not supported: '\+\+(.+)'", r"write \1, without ++"),
    (r"(?s)LexerNoViableAltException: (.+? = .+?)\s+\^",
     r"\1: write key=value without spaces around ="),
    (r"(?s)LexerNoViableAltException: (.*?)\s+\^\s*(?:See |$)",
     rf"\1 cannot be read; {DEFAULT_HINT}"),
    (r"Error parsing override '([^=]+)=(.*\$\{.*\$\{.*)'",
     r"""\1=\2: an interpolation inside another needs quotes; write '\1="\2"'"""),
    (r"(?s)Environment variable '(\w+)' not found.*full_key: (\S+)",
     r"\2: the environment variable \1 is not set; set it, or write ${oc.env:\1,DEFAULT}"),
    (r"(?s)Interpolation key '(dataset\.\w+)' not found.*full_key: (\S+)",
     r"\2 comes from \1, which this dataset does not have; choose another dataset, or set \2"),
    (r'can only concatenate str \(not "dict"\) to str',
     "a list of options holds a mapping; write +metrics.NAME._target_=my_package.MyMetric"),
    (r"Cannot assign (\w+) to Dict\b",
     rf"params.groups holds \1 where mappings belong; write {GROUP_EXAMPLE}"),
    (r"Exceeds the limit \((\d+) digits\) for integer", r"a number has more than \1 digits"),
)  # fmt: skip


def user_error(error: BaseException, arguments: Sequence[str] = ()) -> UserError | None:
    """Return the one line that says what is wrong, or None for what the user did not cause.

    An error without an explanation keeps its first line. `arguments`, the command line, are for
    hints about its keys.
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    if own := [link for link in chain if isinstance(link, UserError)]:
        return own[0]
    is_hydras = isinstance(error, HydraException | OmegaConfBaseException)
    # Some of Hydra's are both; one without a number is OmegaConf's, about a YAML.
    if isinstance(error, OSError) and not is_hydras and error.errno is not None:
        return UserError(_system_error(error))
    if not (is_hydras or _is_from_libraries(error)):
        return None
    text = "\n".join(map(str, chain))
    matches = ((re.search(pattern, text), sentence) for pattern, sentence in SENTENCES)
    sentence = (
        _missing_option(error)
        or _unknown_key(error, arguments)
        or _wrong_value(chain)
        or next((match.expand(sentence) for match, sentence in matches if match), None)
        or _group_value(error, arguments)
        or _first_line(chain)
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


def _system_error(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}{reason}; free some, also in the folder for temporary files (TMPDIR)"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{where}{reason}; raise the limit, as in ulimit -n 4096"
    if isinstance(error, PermissionError):
        return f"{where}{reason}; make it readable, and writable for a run, or give another folder"
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return f"the current folder is gone ({reason}); change to one that exists"
    return f"{where}{reason}; give folders that exist or can be made"


def _first_line(chain: Sequence[BaseException]) -> str:
    if isinstance(chain[0], OverrideParseException):
        reason = EVALUATING.sub(": ", " ".join(str(chain[0]).split("\nSee ")[0].split()))
        named = f"{chain[0].override} cannot be read: " if chain[0].override else ""
        return f"{named}{reason}; {DEFAULT_HINT}"
    if isinstance(chain[0], yaml.MarkedYAMLError):
        return f"{chain[0]}; correct the YAML there"
    found = next((one for one in chain if isinstance(one, OmegaConfBaseException)), None)
    lines = str(found or "\n".join(map(str, chain))).strip().splitlines()
    reason = RESOLVING.sub("the interpolation fails: ", [*lines, "the command cannot be read"][0])
    key = next(filter(None, (getattr(one, "full_key", None) for one in chain)), "")
    return reason if not key or key.startswith("_dummy_") else f"{key}: {reason}"  # Hydra's dummy


def _missing_option(error: BaseException) -> str | None:
    if not isinstance(error, MissingConfigException):
        return None
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    if not group:
        return None
    if group == "hydra/launcher":
        return (
            f"{group}={option} does not exist; write sweep.parallel_jobs=N for jobs side by side "
            f"on this machine, or {group}=slurm"
        )
    # Of an option in a list, as in metrics=[auc,top_k], Hydra does not say what there is.
    folders = group_folders(OWN_GROUPS)
    options = list(
        error.options
        or sorted({one.stem for root in folders for one in (root / group).glob("*.yaml")})
    )
    if not options:
        return f"{group}={option} does not exist, and a YAML's defaults name it"
    meant = nearest_key(option, options)
    hint = f"; did you mean {meant}?" if meant else ";"
    return f"{group}={option} does not exist{hint} options: {', '.join(options)}"


def _unknown_key(error: BaseException, arguments: Sequence[str]) -> str | None:
    match = re.match(r"Could not (?:override|delete from config\.) '([^']+)'", str(error))
    if match is None:
        return None
    key, _, package = match[1].partition("@")
    if key.startswith(("loop.", "user.")):  # the user's own, which Hydra adds with a plus only
        return f"{key} is a key of your own that no YAML gives; write +{key}=VALUE"
    if package:
        return f"{match[1]} puts {key} where no run reads it; write {key}=OPTION, without @"
    known = known_keys(arguments)
    if key in known:
        return f"{key} has no key of this name yet; write +{key}.KEY=VALUE"
    meant, (parent, _, last) = nearest_key(key, known), key.rpartition(".")
    if f"{parent}._target_" in known and last in taken_keys(arguments, parent):
        return (
            f"{key} is not a key of the chosen option, but its class takes it; write +{key}=VALUE"
        )
    siblings = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == parent]
    hint = "see --help for all keys"
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
    whole = re.sub(r"\[\d+\]$", "", key)
    if whole != key and _schema_type(whole) is list:
        if whole == "params.groups":
            return f"{key} must be a mapping; write {GROUP_EXAMPLE}"
        shown = " (null)" if "NoneType" in str(error) else ""
        return f"{key}{shown} must be a text; write {whole}=[ONE,OTHER]"
    if kind not in KINDS:
        return None
    return f"{key} ({in_yaml(error.value)}) must be {KINDS[kind]}"


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
    in_list = isinstance(error, TypeError) and str(error).endswith("is not iterable")
    if not (says_nothing or in_list or str(error).startswith("Config group override ")):
        return None
    groups = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}
    for argument in arguments:
        key, sign, value = argument.partition("=")
        name = key.lstrip("+~")
        if not sign or (name and (name not in groups or _names_options(argument))):
            continue
        if name in LIST_GROUPS:
            return f"{name} ({value}) must be a list of options; write {name}=[] for none of them"
        name = name or "the empty key"
        return f"{name} ({value}) must be the name of an option; see --help for the options"
    return "a group must be given the name of an option; see --help for the options"


def _names_options(override: str) -> bool:
    """Return whether the values of an override, in lists and sweeps, too, are texts."""
    values: list[Any] = [OverridesParser.create().parse_override(override).value()]
    for value in values:  # which grows
        if isinstance(value, list | ChoiceSweep):
            values += value.list if isinstance(value, ChoiceSweep) else value
        elif not isinstance(value, str | QuotedString | Glob):
            return False
    return True
