"""Turns errors of torch that a user's model causes into messages with a fix."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ddp_runner.errors import UserError

MOST_NAMES = 5
UNFINISHED = "Expected to have finished reduction in the prior iteration"
WITHOUT_GRADIENT = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


@contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """Name the parameters in DDP's error about missing gradients, which has only their numbers.

    Raises:
        UserError: DDP waited for gradients of parameters that the loss does not depend on.
    """
    try:
        yield
    except RuntimeError as error:
        match = WITHOUT_GRADIENT.search(str(error))
        if UNFINISHED not in str(error) or match is None:
            raise
        # DDP numbers the parameters that require a gradient, in the model's order.
        names = [name for name, value in module.named_parameters() if value.requires_grad]
        unused = [names[index] for index in map(int, match[1].split()) if index < len(names)]
        more = f" and {len(unused) - MOST_NAMES} more" if len(unused) > MOST_NAMES else ""
        raise UserError(
            f"the loss does not depend on {', '.join(unused[:MOST_NAMES])}{more}, and DDP "
            "waits for those gradients; write parallelism.find_unused_parameters=true, or remove "
            "the parameters from the model"
        ) from error
