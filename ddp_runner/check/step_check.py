"""Compares an optimizer step of the run's mode with one process's, and names what is first wrong.

The real step is watched: what modules get and return, gradients after the backward and as the
optimizer gets them, the update, the buffers and the loss. What one process does with the gradients
begins with the real ones, so that a fault shows at its own place alone.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_runner.check.distances import (
    FORWARD,
    Distance,
    Key,
    Stage,
    first_fault,
    module_of,
    norm,
    wide,
)
from ddp_runner.check.one_process import FACTOR, Noise, OneProcess, rounding, watched
from ddp_runner.check.rank_differences import Verdict, split_everywhere, with_other_stages
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import counted, listed
from ddp_runner.parallelism.mode import Sums
from ddp_runner.parallelism.shards import full_tensor, has_shards, own_part
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.train.loop import build_engine, take_step
from ddp_runner.train.optimizers import build_optimizer
from ddp_runner.train.schedules import build_schedule
from ddp_runner.train.state import TrainState, Work
from ddp_runner.train.step import StepOutput
from ddp_runner.train.step_metrics import global_loss

NAME = "a step is one process's, within rounding"


class _EndlessError(Exception):
    """The backward would hang: a rank lacks gradients that another has."""


def used_in(loss: Tensor) -> set[int]:
    """Return the ids of the leaf tensors that a loss depends on."""
    found, seen, nodes = set[int](), set[Any](), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.add(id(node.variable))
            nodes += [function for function, _ in node.next_functions]
    return found


class StepCheck:
    """A step of the run's mode beside one process's. Collective: every rank must build it."""

    def __init__(self, state: TrainState) -> None:
        work, batch = state.work, next(iter(replace(state.batches)))
        self._state, self.expected = state, (expected := OneProcess(state, batch))
        self.distances = {key: Distance(bound) for key, bound in expected.bounds.items()}
        self.distances |= expected.start
        watching: AbstractContextManager[Work] = watched(work, state.module, self._add)
        if work.layout.has_stages:  # they call modules outside the training step
            self.distances = {
                key: one for key, one in self.distances.items() if key[0] not in FORWARD
            }
            watching = nullcontext(work)
        self._norm, self._norm_error, self._positions, self._endless = 0.0, 0.0, count(), ""
        # A mode's engine may hide gradients in a hook of its own, so this one comes first.
        hook = state.optimizer.register_step_pre_hook(self._before_update)
        state.module.train(work.layout.model_ranks == 1)
        try:
            state.engine = engine = build_engine(state)
            backward = partial(self._backward, engine.backward)
            with hook, patch.object(engine, "backward", backward), watching as work_watched:
                state.work = self._ending(work_watched, last=len(batch.micro_batches))
                sums = take_step(state, batch)
        except _EndlessError as error:
            self._endless = str(error)
            return
        finally:
            state.work = work
        self._compare_update()
        for name, buffer in state.module.named_buffers():
            self._add((Stage.BUFFER, name), full_tensor(buffer))
        self._add((Stage.LOSS, ""), torch.tensor(global_loss(state, sums)))
        whole = Stage.OUTPUT, ""
        # Relative difference of the model's outputs that rounding explains.
        self.output_rounding = expected.bounds[whole] / (norm(*expected.results[whole]) or 1.0)
        self._found_norm = None if sums.grad_norm is None else float(sums.grad_norm)

    def _ending(self, work: Work, *, last: int) -> Work:
        """Return work whose last micro-step raises where DDP would wait forever.

        DDP sends a bucket when the rank has all its gradients, and a rank without one never does.
        """
        ddp: Any = self._state.model
        calls, waits = count(1), isinstance(ddp, DistributedDataParallel)
        if not waits or ddp.find_unused_parameters or ddp.static_graph:
            return work

        def step_fn(model: nn.Module, data: Any) -> StepOutput:
            step = work.step_fn(model, data)
            if next(calls) == last:
                used = used_in(step.loss_sum)
                named = [*ddp.module.named_parameters()]
                by_rank = gather_objects({name for name, value in named if id(value) in used})
                anywhere = set().union(*by_rank) - {*ddp.parameters_to_ignore}
                for rank, here in enumerate(by_rank):
                    # From the end: what is close to the cause comes first.
                    missing = [name for name, _ in reversed(named) if name in anywhere - here]
                    if missing:
                        raise _EndlessError(
                            f"the backward would never end: on rank {rank} the loss does not "
                            f"depend on {listed(missing)}, and on another rank it does: is "
                            "something detached there? If layers are left out on purpose, write "
                            "parallelism.find_unused_parameters=true"
                        )
            return step

        return replace(work, step_fn=step_fn)

    def _add(self, key: Key, found: Tensor) -> None:
        distance, results = self.distances.get(key), self.expected.results.get(key, ())
        if distance is not None and distance.num_calls < len(results):
            expected, part = results[distance.num_calls], own_part(found)
            is_cast = key[0] == Stage.OUTPUT and not has_shards(self._state.module)
            distance.add(
                part,
                self._own_part(expected, part.shape),
                position=next(self._positions),
                dtypes=(part.dtype, expected.dtype) if is_cast else (),
            )

    def _own_part(self, whole: Tensor, shape: torch.Size) -> Tensor:
        """Return this rank's part of an output of a layer that several ranks compute together."""
        layout = self._state.work.layout
        sizes = zip(whole.shape, shape, strict=False)
        split = [dim for dim, (size, part) in enumerate(sizes) if size == part * layout.model_ranks]
        if layout.model_ranks == 1 or len(split) != 1 or whole.shape == shape:
            return whole
        return whole.chunk(layout.model_ranks, split[0])[layout.env.rank % layout.model_ranks]

    def _whole(self, *, gradients: bool) -> Iterator[tuple[str, Tensor | None, nn.Parameter]]:
        """Yield the whole parameters, or their gradients, beside one process's parameters."""
        tensors: dict[str, Tensor | None] = {
            name: parameter.grad if gradients else parameter.detach()
            for name, parameter in self._state.module.named_parameters()
            if parameter.requires_grad
        }
        tensors = with_other_stages(self._state.module, tensors)
        split = split_everywhere(tensors)
        for name, parameter in self.expected.model.named_parameters():
            tensor = tensors.get(name)
            if parameter.requires_grad:
                whole = full_tensor(tensor) if tensor is not None and name in split else tensor
                yield name, whole, parameter

    def _backward(self, backward: Callable[..., Sums], *arguments: Any) -> Sums:
        """Compare the gradients, and let one process scale and clip these very gradients."""
        sums = backward(*arguments)
        config, expected = self._state.work.config.train, self.expected
        for name, found, parameter in self._whole(gradients=True):
            total = expected.results[Stage.GRADIENT, name][0]
            self.distances[Stage.GRADIENT, name].add(found, total, own=expected.own[name])
            parameter.grad = None if found is None else found.to(parameter.device, copy=True)
        parameters = [*expected.model.parameters()]
        gradients = [value.grad for value in parameters if value.grad is not None]
        for gradient in gradients:
            gradient.mul_(expected.token_factor)
        if config.clip_norm is not None:
            exact = norm(*gradients)
            self._norm = float(nn.utils.clip_grad_norm_(parameters, config.clip_norm))
            self._norm_error = abs(self._norm / (exact or 1.0) - 1)
        if config.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, config.clip_value)
        return sums

    def _before_update(self, *_: Any) -> None:
        """Compare the scaled gradients, and give one process these very gradients and weights."""
        for name, found, parameter in self._whole(gradients=True):
            if (right := parameter.grad) is not None:
                bound = rounding(right.dtype) + FACTOR * self._norm_error
                self.distances[Stage.SCALED, name] = distance = Distance(bound * norm(right))
                distance.add(found, right)
            parameter.grad = None if found is None else found.to(parameter.device, copy=True)
        for name, found, parameter in self._whole(gradients=False):
            assert found is not None, name
            parameter.data.copy_(found)

    def _compare_update(self) -> None:
        """Compare the update with one process's, from the same gradients and weights."""
        model, noise = self.expected.model, Noise(self._state)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        noisy = copy.deepcopy(model)
        for parameter, source in zip(noisy.parameters(), model.parameters(), strict=True):
            parameter.grad = None if source.grad is None else noise(source.grad)
        state, config = self._state, self._state.work.config
        steps_per_epoch = state.batches.steps_per_epoch
        for one in (model, noisy):
            optimizer = build_optimizer(config, one)
            build_schedule(  # it sets the learning rate of the first step
                config, optimizer, total_steps=state.final_step, steps_per_epoch=steps_per_epoch
            )
            optimizer.step()
        with_errors = dict(noisy.named_parameters())
        for name, found, parameter in self._whole(gradients=False):
            assert found is not None
            least = rounding(parameter.dtype) * norm(parameter)
            error = norm(wide(with_errors[name]) - wide(parameter))
            self.distances[Stage.UPDATE, name] = distance = Distance(max(least, error))
            distance.add(wide(found) - wide(before[name]), wide(parameter) - wide(before[name]))

    def verdict(self) -> Verdict:
        """Return what is first wrong, the same on all ranks. Collective: every rank must call."""
        if self._endless:
            return Verdict(NAME, False, self._endless)
        results, model = self.expected.results, self.expected.model
        wrong, farthest = dict[Key, Distance](), dict.fromkeys(Stage, 0.0)
        for key, distance in self.distances.items():
            if key[0] == Stage.OUTPUT and distance.num_calls < len(results[key]):
                distance.problem = "is missing: it was computed less often than in one process"
            if not distance.is_right:
                wrong[key] = distance
            part = distance.apart / (distance.bound or 1.0)
            farthest[key[0]] = max(farthest[key[0]], part)
            log_to_file(
                f"{key[0]} {key[1] or 'of the model'}: off by {distance.apart:.2g} of "
                f"{distance.size:.2g}, {part:.2g} of its bound"
            )
        unused = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and self.expected.own[name] is None
        ]
        number = {key[1]: index for index, key in enumerate(results) if key[0] == Stage.OUTPUT}
        order = sorted(self.distances, key=lambda key: number.get(module_of(key), len(number)))
        by_rank = gather_objects((wrong, farthest, unused, self._found_norm))
        found = [one[0] for one in by_rank]
        numbers = {self._state.batches.num_shares, self._state.work.env.world_size} - {1}
        stage, fault = first_fault(found, order, numbers=numbers) or ("", "")
        unused = [*dict.fromkeys(chain.from_iterable(one[2] for one in by_rank))]
        hook = self._state.work.config.parallelism.get("comm_hook")
        if stage == Stage.GRADIENT and unused:
            fault += f"; the loss does not depend on {listed(unused)}"
            fault += "; write parallelism.find_unused_parameters=true"
        elif stage == Stage.GRADIENT and isinstance(hook, Mapping):
            fault += f"; the comm_hook {hook['_target_']} sent them"
        elif stage in (Stage.GRADIENT, Stage.LOSS) and self._state.work.layout.has_stages:
            fault += "; do embed, the blocks and head compute what forward computes?"
        elif stage == Stage.SCALED and (found_norm := by_rank[0][3]) is not None:
            fault += f"; the norm is {found_norm:.4g}, one process has {self._norm:.4g}"
        if fault:
            return Verdict(NAME, False, fault)
        sizes = Counter(key[0] for key in self.distances)
        worst = {stage: max(one[1][stage] for one in by_rank) for stage in Stage}
        parts = [
            f"{counted(sizes[stage], stage)} {worst[stage]:.2g}" for stage in Stage if sizes[stage]
        ]
        detail = f"off by these parts of their bounds at most: {', '.join(parts)}"
        return Verdict(NAME, True, detail)
