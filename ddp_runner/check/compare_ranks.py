"""Compares ranks: their tensors bit for bit, and so their models, in training and in evaluation.

Ranks exchange digests. Where these differ, the minimum and maximum over ranks show by how much.
Nothing is gathered but a tensor that is split over ranks, one at a time, so a large model needs
little extra memory.

Collective: every rank must call each check, and gets the same finding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.checkpoint.digests import digest_of
from ddp_runner.data.trees import shape_of, tensors_of
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import listed
from ddp_runner.parallelism.shards import gathered, has_shards, is_shard, own_part, whole
from ddp_runner.train.evaluation import evaluate, forward
from ddp_runner.train.loop import train_step
from ddp_runner.train.metrics import global_loss
from ddp_runner.train.snapshot import snapshot
from ddp_runner.train.state import TrainState

# How far apart results may be if they differ only by rounding, relative to the largest value: a GPU
# adds in no fixed order.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
NUM_STEPS = 3  # optimizer steps; the parameters are compared after each
EVAL_STEPS = 2  # batches that a rank evaluates


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    name: str  # the guarantee
    ok: bool
    detail: str  # what was compared, and the numbers


def equality(name: str, tensors: Mapping[str, Tensor | None], detail: str) -> Finding:
    """Check that tensors are equal on all ranks; `detail` describes them if they are."""
    differing = listed(differences(tensors), separator="; ")
    return Finding(name, not differing, differing or detail)


def differences(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Return a sentence for each tensor that differs between ranks in any bit.

    Args:
        tensors: by name; a tensor that is None or missing on only some ranks differs, too.
    """
    present = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    split = split_everywhere(present)
    own = {name: _fingerprint(whole(present[name])) for name in split}
    for name in present.keys() - own.keys():
        own[name] = _fingerprint(own_part(present[name]))
    by_rank = gather_objects({name: own[name] for name in present})
    result = []
    for name in dict.fromkeys(name for prints in by_rank for name in prints):
        prints = [of_rank.get(name) for of_rank in by_rank]
        ranks = [rank for rank, mark in enumerate(prints) if mark != prints[0]]
        if not ranks:
            continue
        shapes = ["none" if mark is None else mark[0] for mark in prints]
        if len(set(shapes)) > 1:
            what = f"by rank: {'; '.join(shapes)}"
        else:
            one = present[name]
            one = whole(one) if name in split else own_part(one)
            what = f"largest difference {_largest_difference(one):.3g}"
        result.append(f"{name} on {in_words(ranks)} is not rank 0's ({what})")
    return result


def in_words(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks, for messages."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def split_everywhere(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Return the names of the tensors that are split over ranks; the same on every rank.

    One that is a shard on some ranks alone is not among them: to put it together would wait for
    the others. Collective.
    """
    split = [name for name, tensor in tensors.items() if is_shard(tensor)]
    first, *others = gather_objects(split)
    return [name for name in first if all(name in names for names in others)]


def tolerance(state: TrainState, dtype: torch.dtype) -> float:
    """Return the tolerance for a tensor's dtype, or for autocast's if that is on."""
    precision = state.setup.config.train.precision
    return TOLERANCES.get(dtype, 2e-2) if precision == "fp32" else 2e-2


def equal_start(state: TrainState) -> Finding:
    """Check that the parameters and buffers are equal after the mode has wrapped the model."""
    tensors = _registered_tensors(state.module)
    detail = f"{len(tensors)} parameters and buffers, bit for bit"
    return equality("all ranks begin with rank 0's weights", tensors, detail)


def equal_parameters(state: TrainState) -> Finding:
    """Check that the parameters are equal after each of a few optimizer steps."""
    state.model.train()
    losses = list[str]()
    for step, batch in enumerate(islice(replace(state.setup.batches), NUM_STEPS)):
        loss = train_step(state, batch)
        losses.append(f"{global_loss(state, loss):.4f}")
        found = equality("parameters stay equal", dict(state.module.named_parameters()), "")
        if not found.ok:
            return replace(found, detail=f"after step {step + 1} {found.detail}")
    detail = f"after each of {len(losses)} steps (loss {', '.join(losses)})"
    return replace(found, detail=detail)


def equal_buffers(state: TrainState) -> Finding:
    """Check that all ranks evaluate and save the same buffers, after some training steps."""
    setup, buffers = state.setup, dict(state.module.named_buffers())
    num_differed = len(differences(buffers))
    # Without metrics: some cannot be computed from a part.
    evaluate(replace(state, setup=replace(setup, metrics={})), most_batches=EVAL_STEPS)
    saved = snapshot(state)["objects"]["model"]
    if has_shards(state.module):  # only rank 0 keeps what it saves; the others have it, too
        own = gathered(state.module.state_dict(), keep=True)
        saved = {key: own[key] if value is None else value for key, value in saved.items()}
    detail = (
        f"{len(buffers)} of them and {len(saved.keys() - buffers.keys())} parameters, bit for bit; "
        f"{num_differed} differed while training, and rank 0's are used"
    )
    return equality("buffers are equal where evaluated and saved", {**buffers, **saved}, detail)


@torch.no_grad()
def equal_outputs(state: TrainState) -> Finding:
    """Check that all ranks compute the same outputs for the same samples."""
    setup = state.setup
    state.module.eval()
    split, size = setup.dataset.eval, setup.eval_batch_size
    numbers = range(min(size, split.num_samples or size))
    batch = split.first(numbers, seed=setup.config.seed)
    step = forward(state, state.module, batch)
    # A user's step need not return outputs.
    produced = [one for _, one in tensors_of(step.outputs)] or [step.loss_sum]
    outputs = torch.cat([one.double().flatten() for one in produced])
    name, detail = "all ranks evaluate a sample alike", f"outputs of {batch.num_samples} samples"
    found = equality(name, {"outputs": outputs}, f"{detail}, bit for bit")
    if found.ok:
        return found
    tensors = {**_registered_tensors(state.module), **_unregistered_values(state.module)}
    random = "no tensor of the model differs: evaluation draws random numbers"
    cause = equality(name, tensors, random)
    farthest = _largest_difference(outputs)
    largest = max(gather_objects(float(outputs.abs().max())))
    detail = f"outputs of up to {largest:.3g} differ by up to {farthest:.3g}"
    if cause.ok and farthest <= tolerance(state, produced[0].dtype) * largest:
        return Finding(name, True, detail)
    return Finding(name, False, f"{detail}; {cause.detail}")


def _fingerprint(tensor: Tensor) -> tuple[str, str]:
    """Return the tensor's shape and dtype in words, and its digest."""
    return shape_of(tensor), digest_of(tensor)


def _largest_difference(tensor: Tensor) -> float:
    """Return how far an element differs between ranks at most. Collective: every rank."""
    lowest = tensor.detach().to(dtype=torch.float64, copy=True).contiguous()
    highest = lowest.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return float((highest - lowest).max()) if lowest.numel() else 0.0


def _registered_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers, including those that are not saved."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _unregistered_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors and numbers that are plain attributes of a model's modules.

    They are in no state_dict, and no mode sends them to other ranks.
    """
    values = {}
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, float | int | Tensor):
                name = f"{prefix}.{key}".lstrip(".") + ", a plain attribute,"
                values[name] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return values
