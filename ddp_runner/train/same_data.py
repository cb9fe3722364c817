"""Checks that all ranks, and a resumed run, have the same data, by a few samples of each split."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_runner.checkpoint.between_ranks import digest_of
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.splits import MicroPlan, NumberedSplit
from ddp_runner.data.stream import Split
from ddp_runner.data.trees import inputs_of, shape_of, tensors_of
from ddp_runner.distributed import gather_objects
from ddp_runner.errors import UserError
from ddp_runner.tracking.start_block import count_of

# By split, then by a tensor's path in its samples: a summary of the tensor, see ``_summary``.
Samples = Mapping[str, Mapping[str, Any]]
NUM_REPEATS = 6  # two flips of a coin agree this often once in 4,000 runs
NOUNS = {"train_samples": "training samples", "eval_samples": "evaluation samples"}
CLOSE = 1e-3  # relative: another processor may round decoded or resized pixels differently


def agreed_samples(dataset: Dataset) -> Samples:
    """Return summaries of a few samples, equal on all ranks. Collective: every rank must call.

    Pass the splits that the run loads from: their worker processes are started and kept.

    Raises:
        UserError: a rank has other samples than rank 0, or another order; or only one split is
            normalised.
    """
    splits = {"train": dataset.train, "eval": dataset.eval}
    loaded = {name: _first_and_last(split) for name, split in splits.items()}
    own_samples = {name: _summaries(data) for name, data in loaded.items()}
    random_splits = {
        name
        for name, split in splits.items()
        for _ in range(NUM_REPEATS)
        if not are_same(own_samples[name], _summaries(_first_and_last(split)))
    }
    by_rank = gather_objects((own_samples, random_splits))
    samples = dict(by_rank[0][0])
    # Samples that differ each time they are loaded cannot be compared.
    samples |= {name: {} for _, names in by_rank for name in names}
    for rank, (rank_samples, _) in enumerate(by_rank):
        for name, split in splits.items():
            if samples[name] and not are_same(rank_samples[name], samples[name]):
                raise UserError(_mismatch(dataset, name, split, rank))
    _validate_normalisation(dataset, *loaded.values())
    return samples


def _validate_normalisation(
    dataset: Dataset, train_data: Sequence[Any], eval_data: Sequence[Any]
) -> None:
    """Reject a dataset of which only one split is normalised; the data may be empty."""
    train, evaluation = (inputs_of(data[0]) if data else None for data in (train_data, eval_data))
    are_pixels = {getattr(inputs, "dtype", None) == torch.uint8 for inputs in (train, evaluation)}
    if dataset.mean is not None and evaluation is not None and len(are_pixels) == 2:
        raise UserError(
            f"the training inputs of dataset={dataset.name} are {shape_of(train)}, the evaluation "
            f"inputs are {shape_of(evaluation)}, and only uint8 is normalised by dataset.mean and "
            "dataset.std",
            "let the transforms of both return uint8, or both floats, normalised",
        )


def _mismatch(dataset: Dataset, name: str, split: Split, rank: int) -> str:
    if split.num_samples is None:
        return (
            f"the first sample of the {name} stream on rank {rank} is not rank 0's: it "
            "splits itself by rank, or shuffles with a generator that is not seeded; let "
            "it give every rank all samples, or offer shard(num_shards, index)"
        )
    return (
        f"the {name} samples of dataset={dataset.name} on rank {rank} are not rank 0's: "
        "its files differ, or it shuffles or splits them with a generator that is not "
        "seeded; sort the files, and draw from random, numpy.random or torch, which the "
        "run seeds, or give your own generator a fixed seed"
    )


def are_same(split: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether the summaries of two splits are equal, up to rounding."""
    return split.keys() == other.keys() and all(_is_close(split[key], other[key]) for key in split)


def has_same_first_sample(samples: Samples) -> bool:
    """Return whether the splits begin with the same sample."""
    firsts = [
        {key: value for key, value in samples[name].items() if key.startswith("0 ")}
        for name in ("train", "eval")
    ]
    has_values = any(size > 1 for _, size, *_ in firsts[0].values())
    return has_values and are_same(*firsts)


class RunData:
    """The facts of a run's data in a checkpoint: a resumed run must have the same data."""

    def __init__(self, dataset: Dataset, samples: Samples | None, *, seed: int) -> None:
        """Take the dataset, and the samples of ``agreed_samples``; None if it was not called."""
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
        """Raise a ``UserError`` if a checkpoint's facts are those of other samples."""
        now = self._facts
        changes = [
            f"{count_of(saved[key])} {noun} then, {count_of(now[key])} now"
            for key, noun in NOUNS.items()
            if saved[key] != now[key]
        ]
        if not changes and self._differs(saved):
            changes = [f"{count_of(now['train_samples'])} training samples, but different ones"]
        if changes:
            fix = f"put the data of dataset={self._name} back as it was"
            if saved["seed"] != now["seed"]:
                seed = saved["seed"]
                fix = f"the seed was {seed} and is {now['seed']} now; write seed={seed}"
            raise UserError(f"the data changed: {'; '.join(changes)}", f"{fix}, or start a new run")

    def _differs(self, saved: Mapping[str, Any]) -> bool:
        """Return whether the same number of samples has other content."""
        digests = {saved["digest"], self._facts["digest"]} - {None}
        if digests:
            # The first part is the kind: a run may resume with images prepared, or in their files.
            kinds = {digest.rpartition(":")[0] for digest in digests}
            return len(kinds) == 1 and len(digests) > 1
        then, now = saved["samples"] or {}, self._facts["samples"] or {}
        # Splits with random samples are empty and cannot be compared.
        comparable = [name for name in now if now[name] and then.get(name)]
        return not all(are_same(then[name], now[name]) for name in comparable)


def _first_and_last(split: Split) -> list[Any]:
    """Return two batches of 1 sample; only the first sample of a stream."""
    if not isinstance(split, NumberedSplit):
        return [split.first([0]).data]
    if not split.num_samples:
        return []
    numbers = (0, len(split) - 1)
    plans = [MicroPlan(torch.tensor([number], device=split.device)) for number in numbers]
    return list(split.load(plans))


def _summaries(loaded: Sequence[Any]) -> dict[str, Any]:
    """Return a summary of each tensor in some batches."""
    return {
        f"{number} {path}": _summary(tensor)
        for number, data in enumerate(loaded)
        for path, tensor in tensors_of(data)
    }


def _summary(tensor: Tensor) -> list[Any]:
    """Return shape, size and digest; for floats two sums instead of the digest."""
    values = tensor.detach().to_dense().cpu()
    if not values.is_floating_point():
        return [str(tuple(tensor.shape)), values.numel(), digest_of(values)]
    flat = values.double().flatten()
    weights = torch.linspace(-1, 1, len(flat), dtype=torch.float64)
    return [str(tuple(tensor.shape)), len(flat), float(flat.sum()), float(flat @ weights)]


def _is_close(summary: Sequence[Any], other: Sequence[Any]) -> bool:
    """Compare the sums of floats up to rounding, and all else exactly."""
    if summary[:2] != other[:2] or len(summary) < 4 or len(other) < 4:
        return summary == other
    return np.allclose(summary[2:], other[2:], rtol=CLOSE, atol=CLOSE * summary[1], equal_nan=True)
