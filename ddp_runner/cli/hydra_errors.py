"""Hydra's many ways to refuse a command line, each as one plain line with the nearest valid key.

Called by ``__main__`` when composing has failed; torch-free.
"""

import errno
import re
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from ddp_runner.cli.known_keys import known_keys, nearest_key
from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError

KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}
HYDRAS_NAMES = {"Integer": int, "Float": float, "bool": bool}
LIBRARIES = ("hydra", "omegaconf", "antlr4", "yaml")
DEFAULT_HINT = "write key=value, and quote what the shell would change"
# How Hydra and OmegaConf name the class of an error, which tells a user nothing.
EVALUATING = re.compile(r" \w+ while evaluating ")
RESOLVING = re.compile(r"\w+ (?:raised )?while resolving interpolation: ")
# What Hydra says, as a pattern, and what is said instead; in order, the first that is found.
SENTENCES: tuple[tuple[str, str], ...] = (
    (r"Multiple values for ([\w/]+)\. To override a value use 'override [^:]+: (.+)'",
     r"\1 has a value already; write \1=\2, without +"),
    (r"force-add of config groups is not supported: '\+\+(.+)'", r"write \1, without ++"),
    (r"Ambiguous value for argument '((.+?)=.+)'",
     r"\1 has a comma; write -m for a sweep over its values, or \2=[ONE,OTHER] for a list"),
    (r"Sweep parameters '(.+?)'(?:, .+)? requires? --multirun", r"\1 is a sweep; write -m for it"),
    (r"does not support sweep type : (\w+)_SWEEP",
     r"this sweeper takes a list of values; write hydra/sweeper=optuna, which searches intervals"),
    (r"(?s)LexerNoViableAltException: (.+? = .+?)\s+\^",
     r"\1: write key=value without spaces around ="),
    (r"(?s)LexerNoViableAltException: (.*?)\s+\^\s*(?:See |$)",
     rf"\1 cannot be read; {DEFAULT_HINT}"),
    (r"Error parsing override '([^=]+)=(.*\$\{.*\$\{.*)'",
     r"""\1=\2: an interpolation inside another needs quotes; write '\1="\2"'"""),
    (r"(?s)Environment variable '(\w+)' not found.*full_key: (\S+)",
     r"\2: the environment variable \1 is not set; set it, or write ${oc.env:\1,DEFAULT}"),
    (r"(?s)(?:Invalid type assigned: \w+ is not a subclass of|Cannot merge DictConfig with "
     r"ListConfig).*full_key: (\S+)", r"\1 is a group of keys; write \1.KEY=VALUE"),
    (r"(?s)does not support deletion.*full_key: (\S+)",
     r"\1 cannot be removed; every run needs it: write \1=VALUE"),
    (r"(?s)is not a ListConfig.*full_key: (\S+)", r"\1 must be a list; write \1=[ONE,OTHER]"),
    (r"(?s)full_key: (\S+).*is not a ListConfig", r"\1 must be a list; write \1=[ONE,OTHER]"),
    (r"(?s)Interpolation key '(dataset\.\w+)' not found.*full_key: (\S+)",
     r"\2 comes from \1, which this dataset has not; choose another dataset, or give \2 itself"),
    (r"Only one of --run, --multirun, --cfg",
     "--cfg, --info, --shell-completion and -m exclude each other; leave -m out to see one job"),
    (r"Expecting one subcommand from",
     'write eval "$(ddp-runner --shell-completion install=bash)"'),
    (r"(?s)(?:Cannot find primary config|Primary config module|Unable to find or open|"
     r"Using config_path to)",
     "--config-name and --config-path are not for this program; give your own groups by "
     "--config-dir=FOLDER"),
    (r"Cannot merge DictConfig with ListConfig",
     "a YAML holds a list where keys belong; write KEY: VALUE in it"),
    (r"(codec can't decode .+)", r"a YAML of --config-dir is not in UTF-8 (\1); save it so"),
    (r"maximum recursion depth", "the defaults of a YAML lead back to itself; change them"),
    (r"Exceeds the limit \((\d+) digits\) for integer", r"a number has more than \1 digits"),
    (r"Additional config directory '(.+)' not found", r"--config-dir: there is no folder \1"),
)  # fmt: skip


def user_error(error: BaseException) -> UserError | None:
    """Return the one line that says what is wrong, or None for what the user did not cause.

    It never raises: what it cannot explain keeps the first line that it has.
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for link in chain:
        if isinstance(link, UserError):
            return link
    is_hydras = isinstance(error, HydraException | OmegaConfBaseException)
    if isinstance(error, OSError) and not is_hydras:  # some of Hydra's are both
        return UserError(_system_error(error))
    if not (is_hydras or _is_refusal(error)):
        return None
    sentence = _first_line(chain)
    for explain in (_missing_option, _unknown_key, _wrong_kind, _known_sentence, _group_value):
        if (found := explain(chain)) is not None:
            sentence = found
            break
    return UserError(" ".join(sentence.split()))


def _is_refusal(error: BaseException) -> bool:
    """Return whether Hydra, or what it reads configs with, raised this in code of its own.

    They refuse much by a plain ValueError or TypeError, and a broken YAML by errors of yaml.
    """
    trace, deepest = error.__traceback__, ""  # of ours and theirs; the standard library's apart
    while trace is not None:
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        deepest = package if package in (*LIBRARIES, __name__.partition(".")[0]) else deepest
        trace = trace.tb_next
    return isinstance(error, Exception) and deepest in LIBRARIES


def _system_error(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}{reason}; free some, also in the folder for temporary files (TMPDIR)"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{where}{reason}; raise the limit, as in ulimit -n 4096"
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return f"the current folder is gone ({reason}); change to one that exists"
    return f"{where}{reason}; give folders that exist or can be made"


def _first_line(chain: Sequence[BaseException]) -> str:
    if isinstance(chain[0], OverrideParseException):
        reason = " ".join(str(chain[0]).split("\nSee ")[0].split())
        return f"{EVALUATING.sub(': ', reason)}; {DEFAULT_HINT}"
    if isinstance(chain[0], yaml.MarkedYAMLError):
        return " ".join(str(chain[0]).split())
    text = "\n".join(str(link) for link in chain)
    reasons = [str(link) for link in chain if isinstance(link, OmegaConfBaseException)]
    reason = ((reasons or [text])[0].strip() or "the command cannot be read").splitlines()[0]
    reason = RESOLVING.sub("the interpolation fails: ", reason)
    key = re.search(r"full_key: (?!_dummy_)(\S+)", text)  # _dummy_: Hydra's own, for any group
    return f"{key[1]}: {reason}" if key else reason


def _known_sentence(chain: Sequence[BaseException]) -> str | None:
    text = "\n".join(str(link) for link in chain)
    found = ((re.search(pattern, text), sentence) for pattern, sentence in SENTENCES)
    return next((match.expand(sentence) for match, sentence in found if match), None)


def _missing_option(chain: Sequence[BaseException]) -> str | None:
    error = chain[0]
    if not isinstance(error, MissingConfigException):
        return None
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    if not group:
        return None
    if "optuna" in option:
        return f"{group}={option} needs Hydra's Optuna plugin; pip install 'ddp-runner[optuna]'"
    options = list(error.options or [])
    if not options:
        return f"{group}={option} does not exist, and a YAML's defaults name it"
    meant = nearest_key(option, options)
    hint = f"; did you mean {meant}?" if meant else ";"
    return f"{group}={option} does not exist{hint} options: {', '.join(options)}"


def _unknown_key(chain: Sequence[BaseException]) -> str | None:
    text = "\n".join(str(link) for link in chain)
    match = re.search(r"Could not (?:override|delete from config\.) '([^']+)'", text)
    if match is None:
        return None
    key, _, package = match[1].partition("@")
    if package:
        return f"{match[1]} puts {key} where no run reads it; write {key}=OPTION, without @"
    known = known_keys(sys.argv[1:])
    meant, parent = nearest_key(key, known), key.rpartition(".")[0]
    siblings = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == parent]
    if meant:
        hint = f"did you mean {meant}?"
    elif parent and siblings:
        hint = f"the keys of {parent} are {', '.join(siblings)}"
    else:
        hint = "see --help for all keys"
    return f"{key} is not a key of the config; {hint}"


def _wrong_kind(chain: Sequence[BaseException]) -> str | None:
    text = "\n".join(str(link) for link in chain)
    value = re.search(r"Error merging override ([^=\s]+)=(.*)", text)
    kind = re.search(r"(?:could not be converted to|is not a valid) (\w+)", text)
    if value and kind and kind[1] in HYDRAS_NAMES:
        wanted = KINDS[HYDRAS_NAMES[kind[1]]]
        return f"{value[1].lstrip('+')} ({value[2]}) must be {wanted}"
    value = re.search(r"Value '(.*)' of type '\w+' (?:could not be|is not a valid)", text)
    key = re.search(r"full_key: (\S+)", text)
    if key and value and kind and kind[1] in HYDRAS_NAMES:
        return f"{key[1]} ({value[1]}) must be {KINDS[HYDRAS_NAMES[kind[1]]]}"
    key = re.search(r"field '([\w.]+)' is not Optional", text)
    if key:
        return f"{key[1]} (null) must be {_kind_of(key[1])}"
    key = re.search(r"full_key: (\S+)", text)
    if key and re.search(r"Cannot convert '\w+' to string", text):
        return f"{key[1]} must be a text"
    return None


def _kind_of(key: str) -> str:
    """Return the kind of a key of the schema, in words."""
    kind: Any = Config
    for part in key.split("."):
        kind = next((one.type for one in fields(kind) if one.name == part), None)
    if isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]
    return "a group of keys" if is_dataclass(kind) else KINDS.get(kind, "a value of its own kind")


def _group_value(chain: Sequence[BaseException]) -> str | None:
    """Explain a group that is given what is no name of an option; Hydra does not say which."""
    says_nothing = isinstance(chain[0], AssertionError) and not str(chain[0])
    if not (says_nothing or str(chain[0]).startswith("Config group override ")):
        return None
    groups = {one.name for one in fields(Config) if one.name not in ("sweep", "train")}
    for argument in sys.argv[1:]:
        key, sign, value = argument.partition("=")
        if sign and (key.lstrip("+~") in groups or not re.match(r"[+~]*\w", key)):
            name = key.lstrip("+~") or "the empty key"
            return f"{name} ({value}) must be the name of an option; see --help for the options"
    return "a group must be given the name of an option; see --help for the options"
