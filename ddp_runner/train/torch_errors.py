"""Plain sentences for errors of torch that a user's model causes; used by ``worker``."""

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
    """Name the parameters of which DDP tells the numbers alone.

    Raises:
        UserError: DDP has waited for gradients that the loss does not depend on.
    """
    try:
        yield
    except RuntimeError as error:
        told = WITHOUT_GRADIENT.search(str(error))
        if UNFINISHED not in str(error) or told is None:
            raise
        # DDP counts what requires a gradient, in the model's order.
        names = [name for name, one in module.named_parameters() if one.requires_grad]
        unused = [names[index] for index in map(int, told[1].split()) if index < len(names)]
        more = f" and {len(unused) - MOST_NAMES} more" if len(unused) > MOST_NAMES else ""
        raise UserError(
            f"the loss does not depend on {', '.join(unused[:MOST_NAMES])}{more}, for whose "
            "gradients DDP waits; write parallelism.find_unused_parameters=true, or leave them out "
            "of the model"
        ) from error
