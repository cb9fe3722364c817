"""How a rank computes the steps of its state: by itself, or as its mode of parallelism wants it."""

import re

from ddp_runner.data.batches import StepBatch
from ddp_runner.errors import UserError, listed
from ddp_runner.job import Status
from ddp_runner.parallelism.mode import Engine, Sums
from ddp_runner.train.loop import backward
from ddp_runner.train.optimizers import refuse_sparse
from ddp_runner.train.state import TrainState

# DDP's error about parameters that the loss does not depend on, which has only their numbers.
WITHOUT_GRADIENT = re.compile(
    r"(?s)Expected to have finished reduction.*did not receive grad for rank \d+: ([\d ]+)"
)


class LocalEngine(Engine):
    """Computes this rank's share of a step."""

    def backward(self, state: TrainState, batch: StepBatch) -> Sums:
        """Accumulate over the micro-batches and reduce with the last one. Collective.

        Raises:
            UserError: DDP waits for gradients of parameters that the loss does not depend on.
        """
        try:
            return backward(state, batch)
        except RuntimeError as error:
            mode = f"parallelism={state.work.config.parallelism.get('name')}"
            refuse_sparse(error, mode, instead="parallelism=ddp")
            match = WITHOUT_GRADIENT.search(str(error))
            if match is None:
                raise
            # DDP numbers the parameters that require a gradient, in the model's order.
            parameters = state.module.named_parameters()
            names = [name for name, parameter in parameters if parameter.requires_grad]
            unused = [names[index] for index in map(int, match[1].split()) if index < len(names)]
            raise UserError(
                f"the loss does not depend on {listed(unused)}, and DDP waits for those gradients; "
                "write parallelism.find_unused_parameters=true, or remove the parameters from the "
                "model"
            ) from error


def engage(state: TrainState) -> Status | None:
    """Let a state's mode compute its steps, from where it stands. Collective: every rank must call.

    Returns:
        How the run ended, if this rank has worked for the loop to its end; None if it runs it.
    """
    state.engine = state.work.mode.engine(state, LocalEngine())
    return state.engine.serve(state)
