"""What tags and trackers must be, and what our trackers need on this machine. Torch-free."""

import os
import re

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError

MOST_CHARACTERS = 64  # of a tag: W&B's limit
RESERVED = ("mlflow.", "ddp_runner.", "version.")  # MLflow's own tags, and our tracker's
# Of our own trackers: the module that each needs, which is also the name of our extra.
MODULES = {
    "ddp_runner.tracking.trackers.mlflow.MLflow": "mlflow",
    "ddp_runner.tracking.trackers.wandb.WandB": "wandb",
}


def validate_tracking(config: Config) -> None:
    """Reject tags that no run can be found by.

    Raises:
        UserError: naming the key.
    """
    for tag in config.tags:
        if not re.fullmatch(rf"[\w.:/-][\w .:/-]{{0,{MOST_CHARACTERS - 1}}}", tag) or (
            tag.startswith(RESERVED) or not {"", ".", ".."}.isdisjoint(tag.split("/"))
        ):
            raise UserError(
                f"tags ({tag}): a tag is up to {MOST_CHARACTERS} letters, digits and any of . _ - "
                f": / and spaces, begins with none of {', '.join(RESERVED)}, and has words between "
                "its slashes; write tags=[baseline,lr-study]"
            )
    if len(set(config.tags)) < len(config.tags):
        raise UserError(f"tags ({', '.join(config.tags)}) names one twice; leave one out")


def validate_servers(config: Config) -> None:
    """Reject MLflow without a server: its own default needs the whole package, with SQLAlchemy.

    Raises:
        UserError: it says what to write.
    """
    for name, keys in config.trackers.items():
        uri = keys.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or ""
        is_mlflow = MODULES.get(keys["_target_"]) == "mlflow"
        if is_mlflow and "://" not in uri and uri != "databricks":  # it may have a password
            raise UserError(
                f"trackers.{name}.tracking_uri, or else the variable MLFLOW_TRACKING_URI, "
                f"must name a server; write trackers.{name}.tracking_uri=http://HOST:PORT"
            )
