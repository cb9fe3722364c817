"""How a rank takes part in a mode where some ranks compute gradients for the training loop."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from ddp_runner.dist_env import DistEnv
from ddp_runner.train.loop import Position
from ddp_runner.train.step import Trainee, backward


def take_part(
    trainee: Trainee,
    env: DistEnv,
    *,
    seed: int,
    position: Position,
    num_steps: int,
    timeout_s: float,
    ended: Callable[[], Collection[int]],
    log: Callable[[str], None],
) -> Trainee | str:
    """Return what runs the loop on this rank; where it serves the loop, do so to its end.

    Collective: every rank must call.

    Args:
        trainee: of this rank, at the place where the run goes on.
        env: this rank among all.
        seed: of the run.
        position: where the run goes on.
        num_steps: how many steps the loop will take.
        timeout_s: after so long without an answer a rank counts as lost.
        ended: tells which ranks' processes are known to have ended.
        log: into this rank's log.

    Returns:
        The trainee; or, for a rank that has served the loop, the run's status.
    """
    role = trainee.mode.role(env)
    if role.serving is None:
        if not position.outstanding:
            return trainee
        # An asynchronous run left them out; they come first, and their places catch up with it.
        first = position.epoch * trainee.batches.steps_per_epoch + position.step_in_epoch
        instead = dict(enumerate(position.outstanding, start=first))
        return replace(trainee, batches=replace(trainee.batches, instead=instead))
    links = role.serving.connect(env, timeout_s=timeout_s)
    if role.loop is not None:
        gradients = role.serving.serve(
            trainee.module,
            links,
            num_steps=num_steps,
            outstanding=position.outstanding,
            timeout_s=timeout_s,
            ended=ended,
            log=log,
        )
        return replace(trainee, gradients=gradients)
    order = lru_cache(maxsize=2)(trainee.batches.order)

    def compute(step: int) -> Tensor:
        epoch, index = divmod(step, trainee.batches.steps_per_epoch)
        return backward(trainee, trainee.batches.step(epoch, index, order=order(epoch)))

    return role.serving.follow(trainee.module, links, seed=seed, compute=compute)
