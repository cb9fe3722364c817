"""Whether all ranks, and a resumed run, have the same data: told by a few samples of each split."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_runner.checkpoint.between_ranks import digest_of
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.splits import MicroPlan, NumberedSplit, Split
from ddp_runner.data.trees import inputs_of, shape_of, tensors_of
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError

# By split, then by the place of a tensor in its samples: shape and values in short.
Samples = Mapping[str, Mapping[str, Any]]
AGAIN = 6  # times: so often two flips of a coin fall alike once in 4,000 runs
NOUNS = {"train_samples": "training samples", "eval_samples": "evaluation samples"}
CLOSE = 1e-3  # relative: another processor may round what is decoded or resized


def agreed_samples(dataset: Dataset) -> Samples:
    """Return what tells the data of a run, equal on all ranks. Collective: every rank must call.

    Give it the splits that the run loads from: their workers, once started, are kept.

    Raises:
        UserError: a rank has other samples than rank 0, or gets them in another order; or only one
            split is normalised.
    """
    splits = {"train": dataset.train, "eval": dataset.eval}
    loaded = {name: _first_and_last(split) for name, split in splits.items()}
    own = {name: _in_short(data) for name, data in loaded.items()}
    drawn = {
        name
        for name, split in splits.items()
        for _ in range(AGAIN)
        if not are_same(own[name], _in_short(_first_and_last(split)))
    }
    by_rank = gather_objects((own, drawn))
    found = dict(by_rank[0][0])
    # Samples that are drawn from a generator that nobody seeds tell nothing.
    found |= {name: {} for _, of_rank in by_rank for name in of_rank}
    for rank, (samples, _) in enumerate(by_rank):
        for name, split in splits.items():
            if not found[name] or are_same(samples[name], found[name]):
                continue
            if split.num_samples is None:
                raise UserError(
                    f"the first sample of the {name} stream on rank {rank} is not rank 0's: it "
                    "splits itself by rank, or shuffles with a generator that is not seeded; let "
                    "it give every rank all samples, or offer shard(num_shards, index)"
                )
            raise UserError(
                f"the {name} samples of dataset={dataset.name} on rank {rank} are not rank 0's: "
                "its files are others, or it shuffles or splits them with a generator that is not "
                "seeded; sort the files, and draw from random, numpy.random or torch, which the "
                "run seeds, or give your own generator a fixed seed"
            )
    train, evaluation = (inputs_of(data[0]) if data else None for data in loaded.values())
    are_pixels = {getattr(one, "dtype", None) == torch.uint8 for one in (train, evaluation)}
    if dataset.mean is not None and evaluation is not None and len(are_pixels) == 2:
        raise UserError(
            f"the training inputs of dataset={dataset.name} are {shape_of(train)} and those of the "
            f"evaluation {shape_of(evaluation)}, and only uint8 is normalised by dataset.mean and "
            "dataset.std; let the transforms of both return uint8, or both floats, normalised"
        )
    return found


def are_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two splits have the same samples, as far as ``agreed_samples`` tells."""
    return one.keys() == other.keys() and all(_is_close(one[key], other[key]) for key in one)


def begins_alike(samples: Samples) -> bool:
    """Return whether the first sample of the evaluation is that of the training."""
    firsts = [
        {key: value for key, value in samples[name].items() if key.startswith("0 ")}
        for name in ("train", "eval")
    ]
    has_values = any(value[1] > 1 for value in firsts[0].values())
    return has_values and are_same(*firsts)


class RunData:
    """What a checkpoint knows of a run's data: a resumed run must have the same."""

    def __init__(self, dataset: Dataset, samples: Samples | None, *, seed: int) -> None:
        """Take what ``agreed_samples`` told; None: nobody has compared it."""
        self._name = dataset.name
        self._facts: dict[str, Any] = {
            "train_samples": dataset.train.num_samples,
            "eval_samples": dataset.eval.num_samples,
            "digest": dataset.digest,
            "samples": samples,
            "seed": seed,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the facts."""
        return self._facts

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Compare with the facts that a checkpoint has.

        Raises:
            UserError: the samples changed.
        """
        now = self._facts
        changed = [
            f"{_shown(saved[key])} {noun} then, {_shown(now[key])} now"
            for key, noun in NOUNS.items()
            if saved[key] != now[key]
        ]
        if not changed and self._is_other(saved):
            changed = [f"{_shown(now['train_samples'])} training samples, but different ones"]
        if changed:
            fix = f"put the data of dataset={self._name} back as it was"
            if saved["seed"] != now["seed"]:
                seed = saved["seed"]
                fix = f"the seed was {seed} and is {now['seed']} now; write seed={seed}"
            raise UserError(f"the data changed: {'; '.join(changed)}; {fix}, or start a new run")

    def _is_other(self, saved: Mapping[str, Any]) -> bool:
        """Return whether as many samples are others, by their digests or else by themselves."""
        digests = [one["digest"] for one in (saved, self._facts) if one["digest"] is not None]
        if digests:
            # A run whose pictures were prepared may go on with those in their files.
            kinds = {one.rpartition(":")[0] for one in digests}
            return len(kinds) == 1 and len(set(digests)) > 1
        then, now = saved["samples"] or {}, self._facts["samples"] or {}
        # Of samples that somebody draws anew each time nothing is known.
        known = [name for name in now if now[name] and then.get(name)]
        return not all(are_same(then[name], now[name]) for name in known)


def _shown(count: int | None) -> str:
    return "a stream of" if count is None else f"{count:,}"


def _first_and_last(split: Split) -> list[Any]:
    """Return two batches of one sample; of a stream only the first."""
    if not isinstance(split, NumberedSplit):
        return [split.first([0]).data]
    if not split.num_samples:
        return []
    places = [torch.tensor([one], device=split.device) for one in (0, len(split) - 1)]
    return list(split.load(map(MicroPlan, places)))


def _in_short(loaded: Sequence[Any]) -> dict[str, Any]:
    """Describe the tensors of some samples."""
    return {
        f"{number} {place}": _of_tensor(tensor)
        for number, data in enumerate(loaded)
        for place, tensor in tensors_of(data)
    }


def _of_tensor(tensor: Tensor) -> list[Any]:
    """Return shape, size and digest; of floats two sums in place of the digest."""
    values = tensor.detach().to_dense().cpu()
    if not values.is_floating_point():
        return [str(tuple(tensor.shape)), values.numel(), digest_of(values)]
    flat = values.double().flatten()
    weights = torch.linspace(-1, 1, len(flat), dtype=torch.float64)
    return [str(tuple(tensor.shape)), len(flat), float(flat.sum()), float(flat @ weights)]


def _is_close(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Compare the sums of floats up to rounding, and all else exactly."""
    if one[:2] != other[:2] or len(one) < 4 or len(other) < 4:
        return one == other
    return np.allclose(one[2:], other[2:], rtol=CLOSE, atol=CLOSE * one[1], equal_nan=True)
