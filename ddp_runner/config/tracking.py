"""What tags and trackers must be, and what our trackers need on this machine. Torch-free."""

import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ddp_runner.config.instantiate import find, keywords, unknown_key
from ddp_runner.config.schema import KINDS, Config
from ddp_runner.errors import UserError, in_yaml

MOST_CHARACTERS = 64  # of a tag: W&B's limit
RESERVED = ("mlflow.", "ddp_runner.", "version.")  # MLflow's own tags, and our tracker's
# Of our own trackers: the module that each needs, which is also the name of our extra.
MODULES = {
    "ddp_runner.tracking.trackers.mlflow.MLflow": "mlflow",
    "ddp_runner.tracking.trackers.wandb.WandB": "wandb",
}
TOO_LONG_S = 3600  # for any time that a tracker may take
SECONDS = f"of seconds, more than 0 and less than {TOO_LONG_S}"
WORDS = {
    str: KINDS[str],
    int: f"{KINDS[int]} {SECONDS}",
    float: f"{KINDS[float]} {SECONDS}",
    type(None): "null",
}


def validate_tracking(config: Config) -> None:
    """Reject tags that no run can be found by, and trackers without a ``_target_``.

    Raises:
        UserError: naming the key.
    """
    for tag in config.tags:
        if not re.fullmatch(rf"[\w.:/-][\w .:/-]{{0,{MOST_CHARACTERS - 1}}}", tag):
            raise UserError(
                f"tags ({tag}): a tag is up to {MOST_CHARACTERS} letters, digits and any of . _ - "
                ": / and spaces; write tags=[baseline,lr-study]"
            )
        if tag.startswith(RESERVED):
            raise UserError(
                f"tags ({tag}): a tag must not begin with {' or '.join(RESERVED)}, which have a "
                "meaning in MLflow; give it another name"
            )
        if not {"", ".", ".."}.isdisjoint(tag.split("/")):
            raise UserError(
                f"tags ({tag}): between slashes a tag must not be empty, . or .. (MLflow's rule); "
                "give it another name"
            )
    if len(set(config.tags)) < len(config.tags):
        raise UserError(f"tags ({', '.join(config.tags)}) names one twice; leave one out")
    for name, keys in config.trackers.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII):
            raise UserError(
                f"trackers.{name}: the name of a tracker is letters, digits and _; give it another"
            )
        if not isinstance(keys, Mapping) or not isinstance(keys.get("_target_"), str):
            raise UserError(
                f"trackers.{name} has no _target_, the class of the tracker; write "
                f"trackers={name} for one that has a YAML, or "
                f"+trackers.{name}._target_=my_package.MyTracker"
            )
        if "wait_s" in keys:
            _validate_value(f"trackers.{name}.wait_s", keys["wait_s"], float)
        if keys["_target_"] in MODULES:
            _validate_keys(f"trackers.{name}", keys)


def _validate_keys(group: str, keys: Mapping[str, Any]) -> None:
    """Reject a key that one of our trackers does not take, or a value that it cannot use.

    A tracker of the user's own is not imported here: that may take seconds.
    """
    target = keys["_target_"]
    tracker: Any = find(target, key=f"{group}._target_")
    known, kinds = keywords(tracker) | {"wait_s"}, get_type_hints(tracker.__init__)
    for key, value in keys.items():
        if key not in known | {"_target_"}:
            raise unknown_key(str(key), group, target=target, known=known)
        if key in kinds:
            _validate_value(f"{group}.{key}", value, kinds[key])


def _validate_value(key: str, value: Any, kind: Any) -> None:
    """Reject a value that does not fit a type hint: a kind of WORDS, a Literal, or a union."""
    allowed = get_args(kind) or (kind,)
    if not any(_fits(value, one) for one in allowed):
        words = [
            " or ".join(get_args(one)) if get_origin(one) is Literal else WORDS[one]
            for one in allowed
        ]
        raise UserError(f"{key} ({in_yaml(value)}) must be {', or '.join(words)}")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a kind of WORDS, or one of a Literal."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        kinds = (int,) if kind is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < TOO_LONG_S
    return isinstance(value, kind)


def validate_installed(config: Config) -> None:
    """Reject one of our trackers whose package is not installed, and MLflow without a server.

    Raises:
        UserError: it says what to install, or to write.
    """
    for name, keys in config.trackers.items():
        module = MODULES.get(keys["_target_"])
        spec = importlib.util.find_spec(module) if module else None
        # A folder of that name, as W&B leaves one, is found as a package without a file.
        if module and (spec is None or spec.origin is None):
            raise UserError(
                f"trackers=[{name}] needs {module}; install it with pip install "
                f"'ddp-runner[{module}]'"
            )
        if module == "mlflow":
            # MLflow's own default is a database that needs the whole package, with SQLAlchemy.
            uri = keys.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or ""
            if "://" not in uri and uri != "databricks":  # not shown: it may have a password
                raise UserError(
                    f"trackers.{name}.tracking_uri, or else the variable MLFLOW_TRACKING_URI, "
                    f"must name a server; write trackers.{name}.tracking_uri=http://HOST:PORT"
                )
