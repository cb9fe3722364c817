"""How a rank computes the steps of its state: alone, or as its mode of parallelism needs."""

from ddp_runner.data.batches import StepBatch
from ddp_runner.job import Status
from ddp_runner.parallelism.mode import Engine, Sums
from ddp_runner.train.loop import accumulate_gradients
from ddp_runner.train.state import TrainState
from ddp_runner.train.torch_errors import torch_errors


class LocalEngine(Engine[TrainState, StepBatch]):
    """Computes this rank's share of a step."""

    def backward(self, state: TrainState, batch: StepBatch) -> Sums:
        """Accumulate over the micro-batches and reduce with the last micro-batch. Collective.

        Raises:
            UserError: DDP waits for gradients of parameters that the loss does not depend on, or
                the mode does not support sparse gradients.
        """
        mode = f"parallelism={state.work.config.parallelism.get('name')}"
        with torch_errors(state, mode, dense="parallelism=ddp"):
            return accumulate_gradients(state, batch)


def engage(state: TrainState) -> Status | None:
    """Let the state's mode compute its steps from here on. Collective: every rank must call.

    Returns:
        How the run ended, if this rank served the loop until the end; None if it runs the loop.
    """
    state.engine = state.work.mode.engine(state, LocalEngine())
    return state.engine.serve(state)
