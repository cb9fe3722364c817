"""Compares a model that is split over ranks with what a process on its own has."""

import copy

import torch
from torch import nn

from ddp_runner.check.compare_ranks import Finding, in_words
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import listed
from ddp_runner.parallelism.shards import gathered, has_shards, like, own_part
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
    """Check that each rank's shards are parts of the weights with which one process begins.

    Collective: every rank must call, and gets the same finding.
    """
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
    by_rank = gather_objects(differing)
    sentences = list[str]()
    for key in dict.fromkeys(key for of_rank in by_rank for key in of_rank):
        ranks = [rank for rank, of_rank in enumerate(by_rank) if key in of_rank]
        largest = max(by_rank[rank][key] for rank in ranks)
        what = f"is not one process's (largest difference {largest:.3g})"
        sentences.append(f"{key} on {in_words(ranks)} {what}")
    detail = f"{len(expected)} parameters, bit for bit"
    return Finding(name, not sentences, listed(sentences, separator="; ") or detail)


def _one_process_model(state: TrainState) -> nn.Module:
    """Return the whole model as a process on its own builds it."""
    setup = state.setup
    seed_all(setup.config.seed)
    return one_process_model(setup.config, setup.dataset.model_arguments, setup.devices[0])
