"""What must hold between the keys of a run whose task is a function of the user's. Torch-free.

Such a function builds what it likes, so the groups need not fit each other.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ddp_runner.config.inference import INFERENCE
from ddp_runner.config.schema import RUNNER_KEYS, Config, leaves, mode_needs
from ddp_runner.config.training import TrainConfig
from ddp_runner.errors import UserError, listed
from ddp_runner.metric_names import is_lower_better

TASKS = ("train", *INFERENCE, "collectives", "check")  # of this package


def has_own_loop(task: str) -> bool:
    """Return whether a task is a function of the user's own: those have dotted names."""
    return "." in task


def only_used(keys: Mapping[str, Any], *, uses: Any) -> dict[str, Any]:
    """Return dotted keys without those that the user's own loop has left as they were.

    It trains nothing by itself, so a default under train says nothing about it, nor does a group
    that it did not build from.

    Args:
        keys: of a config, with their values.
        uses: the groups that it used, as run.json has them; anything else for another task.
    """
    if not isinstance(uses, list) or not has_own_loop(str(keys.get("task"))):
        return dict(keys)
    unused = RUNNER_KEYS.keys() - {"parallelism", *map(str, uses)}
    defaults = dict(leaves({"train": asdict(TrainConfig())}))
    return {
        key: value
        for key, value in keys.items()
        if key.partition(".")[0] not in unused and (key not in defaults or value != defaults[key])
    }


def validate_own_loop(config: Config) -> None:
    """Reject keys that do not fit the user's own loop, and arguments for it without such a task.

    Raises:
        UserError: a rule is broken.
    """
    task, checkpoint = config.task, config.checkpoint
    if not has_own_loop(task):
        if config.loop:
            raise UserError(
                f"loop.{next(iter(config.loop))} is an argument of a function of your own and task "
                f"is {task}; write task=PACKAGE.MODULE.FUNCTION, or leave it out"
            )
        return
    wrong = [str(key) for key in config.loop if not str(key).isidentifier()]
    if wrong:
        raise UserError(
            f"loop ({listed(wrong)}) holds the arguments of {task}, whose names are Python's; "
            "write loop.NAME=VALUE"
        )
    if mode_needs(config.parallelism).num_servers:
        raise UserError(
            f"task={task} runs one loop on equal ranks, and parallelism="
            f"{config.parallelism.get('name')} has a server; write parallelism=ddp"
        )
    if mode_needs(config.parallelism).model_ranks != 1:
        raise UserError(
            f"task={task} takes samples of its own on each rank, and under parallelism="
            f"{config.parallelism.get('name')} several ranks compute the same ones; write "
            "parallelism=fsdp"
        )
    if checkpoint.load_best:
        raise UserError(
            f"checkpoint.load_best=true evaluates the model of task=train, and task is {task}; "
            "leave it out: your function loads and evaluates what it wants"
        )
    if checkpoint.export:
        raise UserError(
            f"checkpoint.export writes the model of task=train, and task is {task}; leave it out: "
            "your function exports what it wants"
        )
    monitor = checkpoint.monitor
    if monitor is not None and is_lower_better(monitor) and checkpoint.mode == "max":
        raise UserError(
            f"checkpoint.monitor={monitor} with checkpoint.mode=max would keep the worst; write "
            "checkpoint.mode=min"
        )
