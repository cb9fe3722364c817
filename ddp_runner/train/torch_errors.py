"""Replaces the errors of torch that a user can fix with a line that says how."""

import re

from ddp_runner.errors import UserError, listed, one_line, typed
from ddp_runner.train.state import TrainState

MAX_REASON = 150  # characters of torch's own message
# Raised for sparse gradients, and for dense gradients where only sparse gradients are supported.
SPARSE = re.compile(r"(?i)sparse|dense gradients|and dense")
# DDP's error for unused parameters. It lists indices, not names.
UNUSED = re.compile(
    r"(?s)Expected to have finished reduction.*did not receive grad for rank \d+: ([\d ]+)"
)
PAST_END = "Tried to step"  # OneCycleLR's error after its total_steps


def explain(error: RuntimeError | ValueError, state: TrainState, name: str, *, dense: str) -> None:
    """Raise a ``UserError`` for an error of torch that the user can fix; else return.

    `name` is the config's choice that failed; `dense` is a choice that supports sparse gradients.
    """
    reason = str(error)
    if unused := UNUSED.search(reason):
        # DDP numbers the parameters that require a gradient, in the model's order.
        parameters = state.module.named_parameters()
        names = [name for name, parameter in parameters if parameter.requires_grad]
        indices = map(int, unused[1].split())
        unused_names = listed([names[index] for index in indices if index < len(names)])
        raise UserError(
            f"the loss does not depend on {unused_names}, and DDP waits for those gradients",
            "write parallelism.find_unused_parameters=true, or remove the parameters from the "
            "model",
        ) from error
    if isinstance(error, RuntimeError) and SPARSE.search(reason):
        raise UserError(
            f"{name} does not support this model's gradients, some of which are sparse "
            f"({typed(error)[:MAX_REASON]})",
            f"leave out sparse=True in it, or write {dense}",
        ) from error
    if reason.startswith(PAST_END):
        raise UserError(
            f"{type(state.schedule.scheduler).__name__}: {one_line(error)}",
            "set its steps to all steps of the run, or start a new run: a resumed run keeps "
            "its schedule",
        ) from error
