"""Checks of the data, the model, its evaluation, and that ranks wait for the mean of gradients.

Collective: every rank must call each check, and gets the same verdict.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.check.one_process import registered_tensors
from ddp_runner.check.rank_differences import (
    Verdict,
    differences,
    equality,
    largest_difference,
    with_other_stages,
)
from ddp_runner.checkpoint.between_ranks import digest_of
from ddp_runner.data.batches import NumberedBatches, StepBatch
from ddp_runner.data.splits import EpochShare, MicroBatch, TensorSplit
from ddp_runner.data.trees import tensors_of
from ddp_runner.device import synchronize
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import counted
from ddp_runner.train.evaluation import evaluate
from ddp_runner.train.loop import take_step
from ddp_runner.train.state import TrainState, forward
from ddp_runner.train.step import StepOutput
from ddp_runner.train.step_metrics import global_loss

MAX_BYTES = 16 * 2**20  # of a split's inputs to compare over ranks
MAX_LOADED = 64  # samples to compare in a split that loads each sample separately
WITHOUT_NUMBERS = "not checked: the samples of a stream have no numbers"
NUM_STEPS = 2  # after the step that is compared with one process's; see ``equal_parameters``
DELAY_S = 0.3  # by which the last rank delays its backward


def train_samples(state: TrainState) -> Verdict:
    """Check that the shares' micro-batches use each training sample once in an epoch."""
    batches, name = state.batches, "each training sample is used once an epoch"
    if not isinstance(batches, NumberedBatches):
        return Verdict(name, True, WITHOUT_NUMBERS)
    numbered, num_steps = _numbered(len(batches.split)), batches.steps_per_epoch
    steps = [step.micro_batches for step in islice(replace(batches, split=numbered), num_steps)]
    most = max(map(len, steps), default=0)
    how = f"in {num_steps} steps x {_shares(state, batches.num_shares)} x {most} micro-batches"
    return _used_once(name, len(numbered), chain.from_iterable(steps), how, state)


def eval_samples(state: TrainState) -> Verdict:
    """Check that the shares' evaluation batches hold each sample once."""
    count, name = state.work.dataset.eval.num_samples, "each evaluation sample counts once"
    if count is None:
        return Verdict(name, True, WITHOUT_NUMBERS)
    size, (own, num_shares) = state.work.config.batch.eval_size, state.work.layout.eval_shares
    batches = chain.from_iterable(
        _numbered(count).in_order(EpochShare(size, share, num_shares, seed=0)) for share in own
    )
    how = f"in batches of up to {size} on {_shares(state, num_shares)}"
    return _used_once(name, count, batches, how, state)


def _numbered(num_samples: int) -> TensorSplit:
    """Return a split in which each sample is its own index."""
    numbers = torch.arange(num_samples)
    return TensorSplit(numbers, numbers)


def _shares(state: TrainState, num_shares: int) -> str:
    model_ranks = state.work.layout.model_ranks
    if model_ranks == 1:
        kind = "ranks" if state.work.config.batch.virtual_ranks is None else "virtual ranks"
        return f"{num_shares} {kind}"
    return f"{counted(num_shares, 'share')} of {model_ranks} ranks each"


def _used_once(
    name: str, num_samples: int, batches: Iterable[MicroBatch], how: str, state: TrainState
) -> Verdict:
    """Check that each sample's weights add up to 1 over the batches of all shares.

    Ranks that compute a share together must have the same batches.
    """
    used = [(batch.data[0], batch.weight) for batch in batches]
    digests, size = gather_objects(digest_of(used)), state.work.layout.model_ranks
    for rank, digest in enumerate(digests):
        if digest != digests[first := rank - rank % size]:
            detail = f"rank {rank} has other batches than rank {first}, and both compute one share"
            return Verdict(name, False, f"{detail}, {how}")
    counts = torch.zeros(num_samples, dtype=torch.float64)
    for numbers, weight in used:
        counts.index_add_(0, numbers, torch.full(numbers.shape, weight, dtype=counts.dtype))
    dist.all_reduce(counts, group=state.work.data_group)
    faults = [
        f"{len(samples)} are {fault} (the first is sample {int(samples[0])})"
        for is_fault, fault in ((counts == 0, "in no batch"), (counts > 1, "in several"))
        if len(samples := is_fault.nonzero().flatten())
    ]
    if faults:
        return Verdict(name, False, f"of {num_samples} samples {' and '.join(faults)}, {how}")
    return Verdict(name, True, f"{num_samples} {how}")


def same_data(state: TrainState) -> Verdict:
    """Check that all ranks hold the same samples.

    A large split is compared at evenly spaced samples, a stream at its first samples.
    """
    tensors, sizes = dict[str, Tensor | None](), list[str]()
    splits = {"train": state.batches.split, "eval": state.work.dataset.eval}
    for name, split in splits.items():
        count = split.num_samples
        sizes.append(f"{f'the first {MAX_LOADED}' if count is None else count} {name}")
        if isinstance(split, TensorSplit):
            stride = max(1, math.ceil(split.inputs.nbytes / MAX_BYTES))
            data: Any = {"inputs": split.inputs[::stride], "targets": split.targets}
        else:
            last = (count or MAX_LOADED) - 1
            numbers = torch.linspace(0, last, MAX_LOADED).long().unique().tolist()
            data = split.first(numbers, seed=state.work.config.seed).data
        tensors |= {f"{name} {path}": tensor for path, tensor in tensors_of(data)}
    return equality("all ranks hold the same data", tensors, f"{' and '.join(sizes)} samples")


def equal_start(state: TrainState) -> Verdict:
    """Check that the parameters and buffers are equal after the mode has wrapped the model."""
    tensors = with_other_stages(state.module, registered_tensors(state.module))
    detail = f"{len(tensors)} parameters and buffers, bit for bit"
    return equality("all ranks begin with rank 0's weights", tensors, detail)


def wait_for_mean(state: TrainState, batch: StepBatch) -> Verdict:
    """Delay the last rank, and time when the others have the mean. Collective: every rank."""
    name, work = "no rank reads a gradient before all have computed theirs", state.work
    env, layout = work.env, work.layout
    if layout.num_shares == 1:
        return Verdict(name, True, "not measured: the ranks compute one share, so there is no mean")
    if layout.has_stages:
        return Verdict(name, True, "not measured: only last stages compute a loss")
    if env.num_nodes > 1:
        return Verdict(name, True, f"not measured: {env.num_nodes} machines have no common clock")
    late, began = env.world_size - 1, 0

    def late_step(model: nn.Module, data: Any) -> StepOutput:
        nonlocal began
        step = work.step_fn(model, data)
        synchronize(work.devices)
        gather_objects(None)  # every rank is about to begin its backward
        if env.rank == late:
            time.sleep(DELAY_S)
        began = time.monotonic_ns()  # all processes on a machine share this clock
        return step

    state.work = replace(work, step_fn=late_step)
    if layout.shares_per_rank == 1:
        # Only the last micro-batch reduces. No other collective may follow: it would wait.
        batch = batch._replace(micro_batches=batch.micro_batches[-1:])
    state.module.zero_grad(set_to_none=True)
    state.engine.backward(state, batch)
    synchronize(work.devices)
    state.work, times = work, gather_objects((began, time.monotonic_ns()))
    # The ranks that take a mean with the late rank; other ranks hold other parts of layers.
    peers = range(late % layout.model_ranks, late, layout.model_ranks)
    lead_ms = (times[late][0] - max(times[rank][0] for rank in peers)) / 1e6
    readable, earliest = min((times[rank][1], rank) for rank in peers)
    wait_ms = (readable - times[late][0]) / 1e6
    when = f"{abs(wait_ms):.1f} ms {'after' if wait_ms >= 0 else 'before'}"
    detail = (
        f"rank {late} began its backward {lead_ms:.0f} ms after the others; the first of them, "
        f"rank {earliest}, could read its gradients {when} that"
    )
    return Verdict(name, wait_ms >= 0, detail)


def equal_parameters(state: TrainState) -> Verdict:
    """Check that the parameters are equal after each of a few more optimizer steps."""
    name, losses, batches = "parameters stay equal", list[str](), replace(state.batches)
    state.model.train()
    for batch in islice(batches, NUM_STEPS):
        losses.append(f"{global_loss(state, take_step(state, batch)):.4f}")
        parameters = dict(state.module.named_parameters())
        verdict = equality(name, with_other_stages(state.module, parameters), "")
        if not verdict.ok:
            return Verdict(name, False, f"after step {1 + len(losses)} {verdict.detail}")
        if batch.is_last and batches.steps_per_epoch is None:  # a stream may have only one epoch
            break
    return Verdict(name, True, f"after each of {len(losses)} more steps (loss {', '.join(losses)})")


def equal_buffers(state: TrainState) -> Verdict:
    """Check that all ranks evaluate and save the same buffers, after some training steps."""
    buffers = with_other_stages(state.module, dict(state.module.named_buffers()))
    num_differed = len(differences(buffers))
    evaluate(state.work, state.module, step=state.step, most_batches=2)
    buffers = with_other_stages(state.module, dict(state.module.named_buffers()))
    saved = with_other_stages(state.module, state.module.state_dict())
    detail = (
        f"{len(buffers)} of them and {len(saved.keys() - buffers.keys())} parameters, bit for bit; "
        f"{num_differed} differed while training, and rank 0's are used"
    )
    return equality("buffers are equal where evaluated and saved", {**buffers, **saved}, detail)


@torch.no_grad()
def equal_outputs(state: TrainState, *, rounding: float) -> Verdict:
    """Check that all ranks evaluate the same outputs, up to this part of the largest."""
    name, work = "all ranks compute the same outputs", state.work
    split, size = work.dataset.eval, work.config.batch.eval_size
    state.module.eval()
    batch = split.first(range(min(size, split.num_samples or size)), seed=work.config.seed)
    step = forward(state.work, state.module, batch)
    # A user's step need not return outputs.
    tensors = [tensor for _, tensor in tensors_of(step.outputs)] or [step.loss_sum]
    outputs = torch.cat([tensor.double().flatten() for tensor in tensors])
    same = f"outputs of {batch.num_samples} samples, bit for bit"
    if (verdict := equality(name, {"outputs": outputs}, same)).ok:
        return verdict
    held = with_other_stages(state.module, registered_tensors(state.module))
    held |= unregistered_values(state.module)
    random = "no tensor of the model differs: does its evaluation draw random numbers?"
    cause, difference = equality(name, held, random), largest_difference(outputs)
    largest = max(gather_objects(float(outputs.abs().max())))
    detail = f"outputs of up to {largest:.3g} differ from rank 0's by up to {difference:.3g}"
    if cause.ok and difference <= rounding * largest:
        return Verdict(name, True, detail)
    return Verdict(name, False, f"{detail}; {cause.detail}")


def unregistered_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors and numbers in plain attributes of modules: no mode synchronises them."""
    return {
        f"{prefix}.{key}".lstrip(".") + ", a plain attribute,": value
        if isinstance(value, Tensor)
        else torch.tensor(float(value))
        for prefix, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, float | int | Tensor)
    }
