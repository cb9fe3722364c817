"""What tags and trackers must be, and what our trackers need on this machine. Torch-free."""

import importlib.util
import inspect
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from ddp_runner.config.instantiate import find
from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError, nearest

MOST_CHARACTERS = 64  # of a tag: W&B's limit
RESERVED = ("mlflow.", "ddp_runner.", "version.")  # MLflow's own tags, and our tracker's
# Of our own trackers: the module that each needs, which is also the name of our extra.
MODULES = {
    "ddp_runner.tracking.trackers.mlflow.MLflow": "mlflow",
    "ddp_runner.tracking.trackers.wandb.WandB": "wandb",
}
WORDS = {
    str: "a text",
    int: "a whole number of seconds, more than 0 and less than 3600",
    float: "a number of seconds, more than 0 and less than 3600",
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
                f"tags ({tag}): MLflow takes no tag with nothing, . or .. beside a /; give it "
                "another name"
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
        wait_s = keys.get("wait_s", 1.0)
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 < wait_s < 3600:
            raise UserError(
                f"trackers.{name}.wait_s ({wait_s}) must be a number of seconds, more than 0 and "
                "less than 3600"
            )
        if keys["_target_"] in MODULES:
            _validate_keys(f"trackers.{name}", keys)


def _validate_keys(group: str, keys: Mapping[str, Any]) -> None:
    """Reject a key that one of our trackers does not take, or a value that it cannot use."""
    tracker = find(keys["_target_"], key=f"{group}._target_")
    kinds = {
        name: one.annotation
        for name, one in inspect.signature(tracker, eval_str=True).parameters.items()
    }
    for key in (one for one in keys if one not in ("_target_", "wait_s")):
        if key not in kinds:
            meant = nearest(str(key), kinds)
            hint = f"did you mean {meant}?" if meant else f"its keys are {', '.join(kinds)}, wait_s"
            raise UserError(f"{group}.{key} is not a key of this tracker; {hint}")
        allowed = get_args(kinds[key]) or (kinds[key],)
        if not any(_fits(keys[key], kind) for kind in allowed):
            words = [
                " or ".join(get_args(kind)) if get_origin(kind) is Literal else WORDS[kind]
                for kind in allowed
            ]
            raise UserError(f"{group}.{key} ({keys[key]}) must be {', or '.join(words)}")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a kind of WORDS, or one of a Literal."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        kinds = (int,) if kind is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < 3600
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
