"""Computes gradients on this rank, for its own loop or for a loop on another rank."""

import re
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from ddp_runner.data.batches import StepBatch
from ddp_runner.errors import UserError, listed
from ddp_runner.job import Status
from ddp_runner.parallelism.mode import Duties
from ddp_runner.seeds import seed_all
from ddp_runner.train.loop import backward
from ddp_runner.train.optimizers import refuse_sparse
from ddp_runner.train.state import TrainState

# DDP's error about parameters that the loss does not depend on, which has only their numbers.
WITHOUT_GRADIENT = re.compile(
    r"(?s)Expected to have finished reduction.*did not receive grad for rank \d+: ([\d ]+)"
)


class OwnGradients:
    """Gradients from this rank's own backward; see ``GradientSource``."""

    def compute(self, state: TrainState, batch: StepBatch) -> Tensor:
        """Accumulate over the micro-batches and reduce with the last one. Collective.

        Raises:
            UserError: DDP waits for gradients of parameters that the loss does not depend on.
        """
        try:
            return backward(state, batch)
        except RuntimeError as error:
            mode = f"parallelism={state.setup.config.parallelism.get('name')}"
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

    def may_stop(self, is_asked: bool) -> bool:
        """Return whether it is asked: after a step nothing is under way."""
        return is_asked

    def metrics(self) -> Mapping[str, float]:
        """Return no metrics: there is no other rank to measure."""
        return {}

    def close(self, status: Status) -> None:
        """Do nothing: no other rank waits for the end of the run."""


def take_role(state: TrainState) -> Status | None:
    """Take this rank's role in its mode. Collective: every rank must call.

    Args:
        state: at the position from which the run continues. Its gradients come from the ranks that
            serve the loop, if the mode has them.

    Returns:
        The run's status if this rank has served the loop to its end; None if it runs the loop.
    """
    config, role = state.setup.config, state.setup.role
    if role.serve is None and role.gradients is None:
        return None  # all ranks do the same
    duties = Duties(
        module=state.module,
        compute=partial(backward_by_number, state),
        steps_ahead=partial(_steps_ahead, state),
        timeout_s=config.backend.timeout_s,
        mark=state.setup.timer.mark,
        sums=partial(_sums, state),
        scalars=state.setup.scalars or (),
    )
    if role.serve is not None:
        return role.serve(duties)
    if role.gradients is not None:
        state.gradients = role.gradients(duties)
    return None


def _steps_ahead(state: TrainState, number: int) -> int:
    """Return how many steps from batch `number` on come before the next save or evaluation.

    The run's last step ends them as well, and an epoch's.
    """
    config, step, batches = state.setup.config, state.step, state.setup.batches
    assert batches.steps_per_epoch is not None
    periods = config.checkpoint.every_steps, config.train.eval_every_steps
    steps_left = [every - step % every for every in periods if every]
    if config.train.max_steps is not None:
        steps_left.append(config.train.max_steps - step)
    return min([batches.steps_per_epoch - number % batches.steps_per_epoch, *steps_left])


def _sums(state: TrainState) -> list[float]:
    """Return this rank's parts of the last batch's sums, besides the loss; see ``Duties``."""
    tokens = 0.0 if state.tokens is None else float(state.tokens)
    return [tokens, *(float(state.scalars[name]) for name in state.setup.scalars or ())]


def backward_by_number(state: TrainState, number: int) -> Tensor:
    """Run backward on this rank's part of a batch of the run; return its part of the mean loss."""
    batches, seed = state.setup.batches, state.setup.config.seed
    seed_all(seed, "step", number, batches.share)
    return backward(state, batches.step_at(number))
