"""What tags and trackers must be, and that the packages of trackers are installed. Torch-free."""

import importlib.util
import re
from collections.abc import Mapping

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError

MOST_CHARACTERS = 64  # of a tag: W&B's limit
# Of our own trackers: the module that each needs, which is also the name of our extra.
MODULES = {
    "ddp_runner.tracking.trackers.mlflow.MLflow": "mlflow",
    "ddp_runner.tracking.trackers.wandb.WandB": "wandb",
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


def validate_installed(config: Config) -> None:
    """Reject one of our trackers whose package is not installed.

    Raises:
        UserError: it says what to install.
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
