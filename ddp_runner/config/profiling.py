"""Which steps ``train.profile`` traces, and what must hold for them. Torch-free."""

import re
from collections.abc import Collection
from typing import Any

from ddp_runner.config.inference import INFERENCE
from ddp_runner.config.schema import RunConfig, mode_needs
from ddp_runner.errors import UserError

# Not traced, after each start: memory, torch.compile and DDP's buckets settle in them.
WARMUP_STEPS = 5
MOST_STEPS = 100  # more fill the memory, and no page opens such a trace


def traced_steps(asked: Any, *, done: int = 0) -> range:
    """Return the steps that a value of ``train.profile`` names, counted from 1.

    Args:
        asked: a number of steps, or FIRST-LAST, which both count.
        done: the steps that the run has taken when it starts or resumes; a number counts from
            there.

    Raises:
        UserError: it is neither, or it names too many steps.
    """
    if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0:
        first = done + WARMUP_STEPS + 1
        steps = range(first, first + asked)
    else:
        found = re.fullmatch(r"([1-9]\d{0,17})-([1-9]\d{0,17})", str(asked))
        first, last = map(int, found.groups()) if found else (1, 0)
        steps = range(first, last + 1)
    if not steps:
        raise UserError(
            f"train.profile ({asked}) must be a number of steps, or the first and the last one; "
            "write train.profile=5, or train.profile=20-25"
        )
    if len(steps) > MOST_STEPS:
        raise UserError(
            f"train.profile={asked} traces {len(steps)} steps, and {MOST_STEPS} are the most that "
            "a trace can hold; a handful shows what a step does: write train.profile=5"
        )
    return steps


def validate_profile(config: RunConfig, *, num_steps: int | None, chosen: Collection[str]) -> None:
    """Reject a profile that would never happen.

    Args:
        config: resolved.
        num_steps: optimizer steps of the run; None if they are not known.
        chosen: the keys given on the command line. Other tasks may bring the key from a run.

    Raises:
        UserError: a rule is broken.
    """
    asked, task = config.train.profile, config.task
    if asked is None:
        return
    steps = traced_steps(asked)
    if task != "train" and (task not in INFERENCE or "train.profile" in chosen):
        raise UserError(
            f"train.profile={asked} traces the steps of task=train, and task is {task}; leave it "
            "out: a function of your own can use torch.profiler itself"
        )
    if task != "train":
        return
    if mode_needs(config.parallelism).num_servers:
        raise UserError(
            f"train.profile={asked} traces ranks that all run the loop, and the trainers of "
            f"parallelism={config.parallelism.get('name')} do not; write parallelism=ddp"
        )
    if num_steps is not None and steps[-1] > num_steps:
        raise UserError(
            f"train.profile={asked} traces the steps {steps[0]} to {steps[-1]}, and the run has "
            f"{num_steps}; train longer, or name earlier steps: train.profile=FIRST-LAST"
        )
