"""Checks of models that are split over ranks, and the whole copy that they are compared with.

Collective: every rank must call each check, and gets the same finding.
"""

import copy
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_runner.check.compare_ranks import Finding, in_words
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import counted, listed
from ddp_runner.parallelism.shards import gathered, has_shards, is_shard, like, own_part, whole
from ddp_runner.seeds import seed_all
from ddp_runner.train.build_model import one_process_model
from ddp_runner.train.state import TrainState


def whole_copy(state: TrainState) -> nn.Module:
    """Return a copy of the bare model that is not split, with equal parameters and buffers.

    Each rank holds all of it. Collective if the model is split.
    """
    if not has_shards(state.module):
        return copy.deepcopy(state.module)
    module = _one_process_model(state)
    module.load_state_dict(gathered(state.module.state_dict(), keep=True))
    return module


def one_process_start(state: TrainState) -> Finding:
    """Check that each rank's shards are parts of the weights with which one process begins."""
    name = "the shards are parts of the weights that one process begins with"
    if state.setup.config.model.get("weights") is not None:
        return Finding(name, True, "not compared: model.weights has replaced them")
    expected = dict(_one_process_model(state).named_parameters())
    differing = dict[str, float]()
    for key, own in state.module.named_parameters():
        found, wanted = (own_part(one.detach()) for one in (own, like(expected[key], own)))
        wanted = wanted.to(found.device)
        if found.shape != wanted.shape:
            differing[key] = float("nan")
        elif not torch.equal(found, wanted):
            differing[key] = float((found.double() - wanted.double()).abs().max())
    sentences = _of_ranks("is not one process's", gather_objects(differing))
    detail = f"{len(expected)} parameters, bit for bit"
    return Finding(name, not sentences, listed(sentences, separator="; ") or detail)


def shard_layout(state: TrainState) -> Finding:
    """Check that shards put together are the parameters: none is missing or on too many ranks."""
    name = "each element of a parameter is on as many ranks as the mode says"
    sizes = dict[str, str]()
    for key, own in state.module.named_parameters():
        expected, found = tuple(_numbers(own).shape), tuple(own_part(own).shape)
        if expected != found:
            sizes[key] = f"{found}, not {expected}"
    if wrong := [
        f"{key} on rank {rank} is {what}"
        for rank, of_rank in enumerate(gather_objects(sizes))
        for key, what in of_rank.items()
    ]:
        return Finding(name, False, listed(wrong, separator="; "))
    faults, held = list[str](), Counter[int]()
    allowed = _allowed_counts(state)
    for key, own in state.module.named_parameters():
        numbers = _numbers(own).flatten()
        part, full = own_part(own.detach()).flatten(), whole(own.detach()).flatten()
        is_part = torch.equal(full[numbers.to(full.device)], part)
        if others := [rank for rank, equal in enumerate(gather_objects(is_part)) if not equal]:
            faults.append(f"{key} on {in_words(others)} is no part of the whole {key}")
        on_all = () if is_shard(own) else (dist.get_world_size(),)
        faults += _miscounted(key, numbers, own.numel(), allowed=on_all or allowed, held=held)
    counts = [f"{held[count]} on {counted(count, 'rank')}" for count in sorted(held)]
    detail = f"of {sum(held.values())} parameters {', '.join(counts)} each; put together they fit"
    return Finding(name, not faults, listed(faults, separator="; ") or detail)


def _miscounted(
    key: str, numbers: Tensor, size: int, *, allowed: tuple[int, ...], held: Counter[int]
) -> Iterator[str]:
    """Yield what is wrong with the numbers of ranks that hold a parameter's elements. Collective.

    Args:
        key: the parameter's name.
        numbers: of the elements that this rank holds.
        size: number of its elements.
        allowed: on how many ranks an element may be.
        held: counts the parameter.
    """
    counts = torch.zeros(size, dtype=torch.int32)
    counts.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.int32))
    dist.all_reduce(counts)
    found = {int(count) for count in counts.unique()}
    if len(found) == 1 and found.issubset(allowed):
        held[found.pop()] += 1
        return
    expected = " or ".join(map(str, allowed))
    for count in sorted(found):
        number = int((counts == count).sum())
        if len(found) > 1 or count not in allowed:
            yield (
                f"{number} of {size} elements of {key} are on {counted(count, 'rank')}, "
                f"where each belongs on {expected}"
            )


def _allowed_counts(state: TrainState) -> tuple[int, ...]:
    """Return on how many ranks an element may be: of layers that are split, and of the others."""
    role, replicas = state.setup.role, state.setup.config.parallelism.get("num_replicas", 1)
    return tuple(dict.fromkeys((replicas, replicas * role.model_ranks)))


def _numbers(own: Tensor) -> Tensor:
    """Return the numbers of the elements that this rank is to hold, in the shape of its part."""
    numbers = torch.arange(own.numel()).view(own.shape)
    return own_part(like(numbers, own)).cpu()


def _of_ranks(what: str, by_rank: list[dict[str, float]]) -> list[str]:
    """Return a sentence for each tensor that is wrong on some ranks, with its difference."""
    keys = dict.fromkeys(key for of_rank in by_rank for key in of_rank)
    result = []
    for key in keys:
        ranks = [rank for rank, of_rank in enumerate(by_rank) if key in of_rank]
        largest = max(by_rank[rank][key] for rank in ranks)
        result.append(f"{key} on {in_words(ranks)} {what} (largest difference {largest:.3g})")
    return result


def _one_process_model(state: TrainState) -> nn.Module:
    """Return the whole model as a process on its own builds it."""
    setup = state.setup
    seed_all(setup.config.seed)
    return one_process_model(setup.config, setup.dataset.model_arguments, setup.devices[0])
