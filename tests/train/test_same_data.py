"""Ranks and resumes have the same data, or say so in one line before the first step."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from orders import steps_of
from pictures import write_folders
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, random_split
from train_states import at, build, compose_config

from ddp_runner.checkpoint.between_ranks import digest_of
from ddp_runner.checkpoint.store import save_checkpoint
from ddp_runner.config.schema import Config
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.train.first_batch import warnings_of
from ddp_runner.train.same_data import agreed_samples
from ddp_runner.train.snapshot import restore, snapshot
from ddp_runner.train.step_trial import Trial

SIZE = 80


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are their own numbers, in the order of a list of files."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = float(self.numbers[index])
        return torch.full((10,), value), torch.full((5,), value)


def shuffled(size: int = SIZE, offset: int = 0) -> Numbers:
    """Shuffle the files as torch's own pages do: by the global generator."""
    numbers = [*range(offset, offset + size)]
    random.shuffle(numbers)
    return Numbers(numbers)


def part(name: str) -> Subset[tuple[Tensor, Tensor]]:
    """Return one side of a random split, written once for both."""
    train, evaluation = random_split(Numbers([*range(100)]), [SIZE, 20])
    return train if name == "train" else evaluation


def unseeded(size: int = SIZE) -> Numbers:
    """Shuffle with a generator of its own, which nobody can seed."""
    return Numbers(np.random.default_rng().permutation(size).tolist())


class Augmented(Numbers):
    """Samples with noise of a generator that nobody seeds."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        return inputs + float(np.random.default_rng().standard_normal()), targets


def augmented() -> Augmented:
    """Return noisy samples."""
    return Augmented([*range(SIZE)])


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream of numbers that, as webdataset's split_by_node, gives each rank others."""

    def __init__(self, *, splits: bool) -> None:
        self.splits = splits

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first, step = (dist.get_rank(), dist.get_world_size()) if self.splits else (0, 1)
        for number in range(first, SIZE, step):
            yield torch.full((10,), float(number)), torch.full((5,), float(number))


def config_of(train: str, evaluation: str, *keys: str, world_size: int = 2) -> Config:
    """Return the config of two datasets."""
    return compose_config(
        "model=toy",
        "dataset=torch_dataset",
        f"dataset.train={{_target_:{__name__}.{train}}}",
        f"dataset.eval={{_target_:{__name__}.{evaluation}}}",
        f"allowed_targets=[{__name__}]",
        "batch.global_size=20",
        *keys,
        world_size=world_size,
    )


def used(env: DistEnv, config: Config) -> tuple[list[int], list[int]]:
    """Return the numbers of a rank's samples: of a training epoch, and of its evaluation split."""
    random.seed(env.rank)  # as a forked process is
    torch.manual_seed(env.rank)
    state = build(env, config)
    agreed_samples(state.work.dataset)
    batches = [micro for step in steps_of(state.batches) for micro in step.micro_batches]
    evaluated: Any = state.work.dataset.eval
    numbers = [int(one) for micro in batches for one in micro.data[0][:, 0]]
    return numbers, [int(evaluated.dataset[index][0][0]) for index in range(len(evaluated))]


def test_a_dataset_that_shuffles_in_its_constructor_gives_each_sample_once() -> None:
    """On all ranks in the same order, and in a second run in the same order again."""
    config = config_of("shuffled", "shuffled,size:5,offset:200")
    runs = [run_ranks(used, 2, config) for _ in range(2)]
    for (first, evaluated), (second, others) in runs:
        assert sorted(first + second) == [*range(SIZE)]
        assert evaluated == others
        assert evaluated != sorted(evaluated)
    assert runs[0] == runs[1]


def test_both_sides_of_a_random_split_belong_to_one_split() -> None:
    """Training and evaluation are built from the same random numbers, so nothing leaks."""
    config = config_of("part,name:train", "part,name:eval")
    (first, evaluated), (second, _) = run_ranks(used, 2, config)
    assert sorted(first + second + evaluated) == [*range(100)]


def agreement(env: DistEnv, config: Config) -> str:
    """Return the rejection of the ranks' data; empty if they agree."""
    try:
        agreed_samples(build(env, config).work.dataset)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("train", "evaluation", "expected"),
    [
        ("unseeded", "shuffled", "the train samples of dataset=torch_dataset on rank 1 are not"),
        ("shuffled", "unseeded", "the eval samples of dataset=torch_dataset on rank 1 are not"),
        ("augmented", "shuffled", ""),  # what nobody can compare tells nothing
        ("Streamed,splits:true", "shuffled", "offer shard(num_shards, index)"),
        ("Streamed,splits:false", "Streamed,splits:false", ""),
    ],
)
def test_ranks_with_other_data_say_so(train: str, evaluation: str, expected: str) -> None:
    """All alike, in one line with what to do."""
    first, second = run_ranks(agreement, 2, config_of(train, evaluation))
    assert first == second
    assert expected in first
    assert bool(first) == bool(expected)
    assert "\n" not in first


def as_floats(picture: Any) -> Tensor:
    """Scale a PIL picture to 0..1."""
    return torch.from_numpy(np.array(picture.resize((8, 8)), dtype=np.float32) / 255).movedim(2, 0)


def as_bytes(picture: Any) -> Tensor:
    """Keep the pixels of a PIL picture."""
    return (as_floats(picture) * 255).round().to(torch.uint8)


@pytest.mark.parametrize(
    ("transforms", "is_rejected"),
    [
        (("as_floats", None), True),
        ((None, "as_floats"), True),
        (("as_floats", "as_floats"), False),
        (("as_bytes", None), False),
        (("as_bytes", "as_bytes"), False),
    ],
)
def test_both_splits_are_normalised_or_neither_is(
    transforms: Sequence[str | None], tmp_path: Path, *, is_rejected: bool
) -> None:
    """Pixels of 8 bits are, floats are not: a model would be evaluated on other pixels."""
    write_folders(tmp_path / "pets", num_train=4, num_eval=4)
    sides = [
        f"dataset.{split}.transform.transforms=[{{_target_:{__name__}.{one},_partial_:true}}]"
        for split, one in zip(("train", "eval"), transforms, strict=True)
        if one is not None
    ]
    config = compose_config(
        *("model=convnet", "dataset=image_folder", "dataset.folder=pets", f"data_root={tmp_path}"),
        *("dataset.num_classes=3", "dataset.height=8", "dataset.width=8", "dataset.num_workers=0"),
        *(*sides, f"allowed_targets=[{__name__}]", "batch.global_size=4", "model.in_channels=3"),
        world_size=1,
    )
    (answer,) = run_ranks(agreement, 1, config)
    assert ("only uint8 is normalised by dataset.mean and dataset.std" in answer) == is_rejected
    assert bool(answer) == is_rejected


def resumed(env: DistEnv, configs: list[Config], folder: Path) -> list[str]:
    """Save amid the first config's run; return how each resume goes."""
    answers = []
    for number, config in enumerate(configs):
        state = build(env, config)
        samples = agreed_samples(state.work.dataset)
        state.samples = samples
        if not number:
            content = snapshot(at(state, step=1, in_epoch=1))
            settings = CheckpointConfig(keep=1)
            save_checkpoint(folder, content, step=1, metrics={}, config=settings, log=print)
        try:
            answers.append(f"step {restore(state, folder, log=print)}")
        except UserError as error:
            answers.append(str(error))
    return answers


def test_a_resume_with_other_samples_is_rejected(tmp_path: Path) -> None:
    """Some would be used twice, and trained on after they were evaluated."""
    keys = ("shuffled", "shuffled,size:5,offset:200")
    same, drawn = config_of(*keys, world_size=1), config_of("unseeded", keys[1], world_size=1)
    reseeded = config_of(*keys, "seed=1", world_size=1)
    (answers,) = run_ranks(resumed, 1, [same, same, drawn, reseeded], tmp_path)
    assert answers[:2] == ["step 1"] * 2
    changed = "does not fit data: the data changed: 80 training samples, but different ones; "
    assert f"{changed}put the data of dataset=torch_dataset back as it was" in answers[2]
    assert f"{changed}the seed was 0 and is 1 now; write seed=0" in answers[3]


def warned(env: DistEnv, config: Config) -> list[str]:
    """Return the warnings about the data."""
    state = build(env, config)
    state.samples = agreed_samples(state.work.dataset)
    return warnings_of(Trial(1.0, 2.0, "sum"), state)


def test_an_evaluation_that_begins_with_the_training_samples_is_warned_of() -> None:
    """Both draw the same numbers, so two datasets of random samples begin alike."""
    alike = config_of("shuffled", "shuffled", world_size=1)
    other = config_of("shuffled", "shuffled,offset:200", world_size=1)
    ((warning,),) = run_ranks(warned, 1, alike)
    assert "the first evaluation sample is the first training sample" in warning
    assert run_ranks(warned, 1, other) == [[]]


class Flipped(Numbers):
    """Samples of which a coin, which nobody can seed, turns every second one over."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        is_turned = random.SystemRandom().random() < 0.5
        return (-inputs - 1 if is_turned else inputs), targets


def flipped() -> Flipped:
    """Return samples that are flipped at random."""
    return Flipped([*range(SIZE)])


def resumes_of_flips(env: DistEnv, config: Config, folder: Path) -> list[str]:
    """Return how often runs of such samples agree with each other."""
    return [answer for k in range(8) for answer in resumed(env, [config] * 3, folder / str(k))]


def test_samples_that_a_coin_turns_over_are_the_same_data(tmp_path: Path) -> None:
    """Which samples were drawn shows only if two loads differ, so several are compared."""
    config = config_of("flipped", "shuffled,size:5,offset:200", world_size=1)
    (answers,) = run_ranks(resumes_of_flips, 1, config, tmp_path)
    assert answers == ["step 1"] * 24


def test_the_digest_of_samples_is_that_of_earlier_versions() -> None:
    """Checkpoints hold it: with another one, a resume would say that the samples changed."""
    assert digest_of(torch.arange(6)) == "dde87ceae7543e8b18e818a85b606921"
    assert digest_of({"a": [1, torch.zeros(2)]}) == "6eaacd40cfa6e3cf54f2a2e02508026d"
