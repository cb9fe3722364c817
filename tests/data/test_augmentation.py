"""Augmentation changes training images as configured, and the same way at every world size."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from configs import config_error, resolved
from ranks import run_ranks
from tiers import first_of
from torch import Tensor
from train_states import (
    MNIST_NET,
    NO_DROPOUT,
    TOLERANCES,
    Trace,
    build,
    compose_config,
    evaluated,
    take_steps,
)

from ddp_runner.config.instantiate import make
from ddp_runner.config.schema import Config
from ddp_runner.data.dataset import TensorSource
from ddp_runner.data.load_dataset import build_source, load_dataset
from ddp_runner.data.pictures import FlipAndCrop
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError

ON = ("dataset.augmentation.horizontal_flip=true", "dataset.augmentation.crop_padding=3")
IMAGES = (*MNIST_NET, *NO_DROPOUT, "dataset.channels=2", "dataset.width=30")
CHOICES = [(False, 0), (True, 0), (False, 3), (True, 3), (True, 9)]


def one_by_one(augmentation: FlipAndCrop, images: Tensor, randoms: Tensor) -> Tensor:
    """Return the expected result, computed by a plain loop over samples and pixels."""
    padding, results = augmentation.crop_padding, torch.zeros_like(images)
    for image, numbers, result in zip(images, randoms.tolist(), results, strict=True):
        flipped = augmentation.horizontal_flip and numbers[0] < 0.5
        down, right = (int(one * (2 * padding + 1)) - padding for one in [0.5, 0.5, *numbers][-2:])
        _, height, width = image.shape
        for row in range(height):
            for column in range(width):
                source = width - 1 - column if flipped else column
                if 0 <= row + down < height and 0 <= source + right < width:
                    result[:, row, column] = image[:, row + down, source + right]
    return results


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("flip", "padding"), CHOICES)
def test_a_batch_is_changed_as_a_plain_loop_would(
    flip: bool, padding: int, memory_format: torch.memory_format
) -> None:
    """Bit for bit, also for images that are not square and shifts past their edges."""
    augmentation = FlipAndCrop(flip, padding)
    images = torch.randn(9, 3, 6, 5).to(memory_format=memory_format)
    original, randoms = images.clone(), torch.rand(9, augmentation.num_randoms)
    changed = augmentation(images, randoms)
    assert torch.equal(changed, one_by_one(augmentation, images, randoms))
    assert torch.equal(images, original)
    assert torch.equal(changed, images) == (not flip and not padding)


def test_extreme_numbers_reach_the_farthest_shifts() -> None:
    """0 and the largest number below 1 shift by the full padding, and 0.5 not at all."""
    last = 1 - 2.0**-24
    images = torch.arange(25.0).reshape(1, 1, 5, 5)
    for padding in (1, 2, 4):
        augmentation = FlipAndCrop(horizontal_flip=True, crop_padding=padding)
        first = augmentation(images, torch.tensor([[0.5, 0.0, 0.0]]))
        assert torch.equal(first[0, 0, padding:, padding:], images[0, 0, :-padding, :-padding])
        end = augmentation(images, torch.tensor([[0.5, last, last]]))
        assert torch.equal(end[0, 0, :-padding, :-padding], images[0, 0, padding:, padding:])
        assert torch.equal(augmentation(images, torch.full((1, 3), 0.5)), images)
        assert torch.equal(augmentation(images, torch.tensor([[0.49, 0.5, 0.5]])), images.flip(3))


def test_random_numbers_are_drawn_only_for_what_is_on() -> None:
    """Switched off it takes none, so a run without augmentation draws none."""
    assert [FlipAndCrop(*choice).num_randoms for choice in CHOICES] == [0, 1, 2, 3, 3]


def steps(env: DistEnv, config: Config) -> Trace:
    """Take two epochs and a bit."""
    return take_steps(env, config, 10)


@pytest.mark.parametrize("grad_accum_steps", first_of([2, 1]))
def test_steps_with_augmentation_are_the_same_at_every_world_size(grad_accum_steps: int) -> None:
    """The same random numbers change a sample, whichever rank computes it."""
    keys = (*IMAGES, *ON)
    (expected,) = run_ranks(steps, 1, compose_config(*keys))
    (plain,) = run_ranks(steps, 1, compose_config(*IMAGES))
    assert not torch.allclose(expected.weights, plain.weights, rtol=1e-3, atol=1e-3)
    accumulated = f"train.grad_accum_steps={grad_accum_steps}"
    for found in run_ranks(steps, 2, compose_config(*keys, accumulated, world_size=2)):
        torch.testing.assert_close(found.losses, expected.losses, **TOLERANCES[torch.float32])
        torch.testing.assert_close(found.weights, expected.weights, **TOLERANCES[torch.float32])


def evaluation(env: DistEnv, config: Config) -> dict[str, float]:
    """Evaluate a run's initial model."""
    return evaluated(build(env, config))[0]


def test_evaluation_sees_the_images_as_they_are() -> None:
    """The metrics are equal bit for bit."""
    (expected,) = run_ranks(evaluation, 1, compose_config(*IMAGES))
    (found,) = run_ranks(evaluation, 1, compose_config(*IMAGES, *ON))
    assert found == expected


@pytest.mark.parametrize("name", ["digits", "fake_images", "mnist", "cifar10", "image_folder"])
def test_every_image_dataset_can_be_augmented(name: str) -> None:
    """Two keys switch it on, null switches it off, and the dataset gets it."""
    tensors = {
        f"{split}_{part}": torch.zeros(1)
        for split in ("train", "eval")
        for part in ("inputs", "targets")
    }
    found = []
    for words in (ON, ("dataset.augmentation=null",)):
        source = build_source(resolved(f"dataset={name}", *words)[0])
        assert isinstance(source, TensorSource)
        found.append(source.dataset(tensors))
    assert found[0].augmentation == FlipAndCrop(True, 3)
    assert found[1].augmentation is None


def test_the_prepared_cache_does_not_depend_on_it(tmp_path: Path) -> None:
    """Switching it on does not rebuild the cache."""
    source = make("dataset", resolved("dataset=fake_images", "dataset.seed=77")[0].dataset)
    logged: list[str] = []
    for augmentation in (source.augmentation, None, FlipAndCrop(True, 4)):
        one = replace(source, augmentation=augmentation)
        load_dataset(one, data_root=tmp_path, log=logged.append)
    assert len(logged) == 1


def test_a_negative_padding_is_rejected() -> None:
    """The line has the key of the nested object."""
    sentence = "dataset.augmentation.crop_padding (-1) must be 0 or greater"
    assert sentence in config_error("dataset.augmentation.crop_padding=-1")
    config, _ = resolved()
    augmentation = config.dataset["augmentation"] | {"crop_padding": -1}
    with pytest.raises(UserError, match=re.escape(sentence)):
        make("dataset", config.dataset | {"augmentation": augmentation})
