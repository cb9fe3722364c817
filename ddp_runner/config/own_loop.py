"""What must hold between the keys of a run whose task is a function of the user's. Torch-free.

Such a function builds what it likes, so the groups need not fit each other.
"""

from collections.abc import Collection, Mapping
from typing import Any

from ddp_runner.config.schema import RUNNER_KEYS, Config, mode_needs
from ddp_runner.errors import UserError, listed
from ddp_runner.metric_names import is_lower_better

TASKS = ("train", "collectives", "check")  # of this package


def has_own_loop(task: str) -> bool:
    """Return whether a task is a function of the user's own: those have dotted names."""
    return "." in task


def only_used(config: Mapping[str, Any], *, uses: Collection[str] | None) -> dict[str, Any]:
    """Return a config without the groups that the user's own loop did not build from.

    Args:
        config: top-level keys and their values, or dotted keys and theirs.
        uses: the groups that it used, as run.json has them; anything else for another task.
    """
    if not isinstance(uses, list | tuple) or not has_own_loop(str(config.get("task"))):
        return dict(config)
    unused = RUNNER_KEYS.keys() - {"parallelism", *uses}
    return {key: value for key, value in config.items() if key.partition(".")[0] not in unused}


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
    if checkpoint.load_best:
        raise UserError(
            f"checkpoint.load_best=true evaluates the model of task=train, and task is {task}; "
            "leave it out: your function loads and evaluates what it wants"
        )
    monitor = checkpoint.monitor
    if monitor is not None and is_lower_better(monitor) and checkpoint.mode == "max":
        raise UserError(
            f"checkpoint.monitor={monitor} with checkpoint.mode=max would keep the worst; write "
            "checkpoint.mode=min"
        )
