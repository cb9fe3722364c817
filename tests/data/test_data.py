"""The same global batch at every world size; each sample once; sources; caches."""

import json
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from configs import config_error
from orders import steps_of
from torch import Tensor
from torch.utils.data import DistributedSampler, TensorDataset

from ddp_runner.config.instantiate import make
from ddp_runner.data import batches as batching
from ddp_runner.data import load_dataset as prepared
from ddp_runner.data.batches import NumberedBatches, StepBatch
from ddp_runner.data.dataset import Dataset, splits
from ddp_runner.data.load_dataset import FORMAT_VERSION, load_dataset
from ddp_runner.data.sources.offline import FakeImages
from ddp_runner.data.splits import EpochShare, MicroBatch, TensorSplit
from ddp_runner.errors import UserError
from ddp_runner.seeds import derive

CONF = Path(__file__).parents[2] / "conf" / "dataset"
WORLD_SIZES = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's own dataset cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DDP_RUNNER_CACHE", str(folder))
    return folder


def numbered(num_samples: int) -> TensorSplit:
    """Return a split whose inputs and targets are the samples' positions."""
    return TensorSplit(torch.arange(num_samples).unsqueeze(1), torch.arange(num_samples))


def batches(num_samples: int, *, rank: int, world_size: int, **kwargs: int) -> NumberedBatches:
    """Return one rank's batches of a numbered split."""
    options = {"global_size": 8, "grad_accum_steps": 1, "seed": 3} | kwargs
    return NumberedBatches(
        split=numbered(num_samples), share=rank, num_shares=world_size, **options
    )


def samples(step: StepBatch) -> list[int]:
    """Return the samples of one rank's step in order, without placeholders."""
    found: list[int] = []
    for batch in step.micro_batches:
        assert torch.equal(batch.data[0][:, 0], batch.data[1])
        count = len(batch.data[1]) * batch.weight
        assert count == int(count)
        found += batch.data[1][: int(count)].tolist()
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_samples", [5, 24, 27, 41])  # last batch of 5, 8, 3, 1
def test_global_batch_is_the_same_set_at_every_world_size(
    world_size: int, num_samples: int
) -> None:
    """The ranks' shares are disjoint and make up one process's global batch, remainder included."""
    reference = batches(num_samples, rank=0, world_size=1)
    ranks = [batches(num_samples, rank=r, world_size=world_size) for r in range(world_size)]
    seen: list[int] = []
    steps = list(zip(steps_of(reference, 2), *(steps_of(r, 2) for r in ranks), strict=True))
    for whole, *shares in steps:
        union = [sample for share in shares for sample in samples(share)]
        assert sorted(union) == sorted(samples(whole))
        assert {share.global_count for share in shares} == {len(union)}
        seen += union
    assert sorted(seen) == list(range(num_samples))
    assert len(steps) == reference.steps_per_epoch


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_without_shuffle_the_order_is_the_datasets(world_size: int) -> None:
    """In each epoch, and global batch k is the same at every world size."""
    shares = [
        replace(batches(41, rank=rank, world_size=world_size), shuffle=False)
        for rank in range(world_size)
    ]
    for epoch in (0, 1):
        steps = zip(*(steps_of(share, epoch) for share in shares), strict=True)
        found = [sorted(one for share in step for one in samples(share)) for step in steps]
        assert [one for batch in found for one in batch] == list(range(41))
        assert [len(batch) for batch in found[:-1]] == [shares[0].global_size] * (len(found) - 1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_order_is_that_of_distributed_sampler(world_size: int) -> None:
    """A rank gets its samples in the order of a plain PyTorch loop."""
    for rank in range(world_size):
        for epoch in (0, 1):
            # It adds the epoch to its seed: seed 3 in epoch 1 would have the order of seed 4 in
            # epoch 0.
            sampler: DistributedSampler[int] = DistributedSampler(
                TensorDataset(torch.arange(40)), world_size, rank, seed=derive(3, "order", epoch)
            )
            steps = steps_of(batches(40, rank=rank, world_size=world_size), epoch)
            assert [sample for step in steps for sample in samples(step)] == list(sampler)


def test_epochs_and_seeds_differ() -> None:
    """Another epoch or another seed gives another order."""
    orders = {
        tuple(samples(next(steps_of(batches(64, rank=0, world_size=1, seed=seed), epoch))))
        for seed, epoch in ((0, 0), (0, 1), (7, 0))
    }
    assert len(orders) == 3


def test_batches_of_similar_length_are_left_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch comes from one sorted pool of shuffled samples; the order of batches is random."""
    monkeypatch.setattr(batching, "POOL_BATCHES", 4)
    lengths = torch.arange(90) % 45
    ours = replace(batches(90, rank=0, world_size=1), lengths=lengths)
    shuffled = torch.randperm(90, generator=torch.Generator().manual_seed(derive(3, "order", 1)))
    pools = [set(pool.tolist()) for pool in shuffled.split(4 * 8)]
    *whole, last = [samples(step) for step in steps_of(ours, 1)]
    assert len(last) == 2
    found = [next(i for i, pool in enumerate(pools) if pool.issuperset(one)) for one in whole]
    assert sorted(found) == [0] * 4 + [1] * 4 + [2] * 3
    assert found != sorted(found)
    assert all(lengths[one].diff().min() >= 0 for one in whole)


def test_random_numbers_are_new_in_each_step() -> None:
    """Another step, epoch or seed gives other numbers; the same ones give the same."""

    def randoms(seed: int, epoch: int) -> list[Tensor | None]:
        ours = batches(16, rank=0, world_size=1, seed=seed, num_randoms=3)
        return [batch.randoms for step in steps_of(ours, epoch) for batch in step.micro_batches]

    drawn = [*randoms(3, 0), *randoms(3, 1), *randoms(4, 0)]
    numbers = [tuple(one.flatten().tolist()) for one in drawn if one is not None]
    assert {len(one) for one in numbers} == {8 * 3}
    assert len(set(numbers)) == len(drawn) == 6
    again = randoms(3, 1)[1]
    assert again is not None
    assert tuple(again.flatten().tolist()) == numbers[3]


def test_start_step_goes_on_where_the_epoch_stopped() -> None:
    """Step k starts the rest of the epoch."""
    ours = batches(41, rank=1, world_size=3)
    whole = [samples(step) for step in steps_of(ours, 1)]
    assert [samples(step) for step in steps_of(ours, 1, start=2)] == whole[2:]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("grad_accum_steps", [1, 2, 3, 8])
def test_accumulation_splits_a_share_evenly(world_size: int, grad_accum_steps: int) -> None:
    """Micro-batches keep the share's order, none is empty, every rank has the same number."""
    for num_samples in (32, 29, 25):
        counts = set()
        for rank in range(world_size):
            plain = batches(num_samples, rank=rank, world_size=world_size)
            split = batches(
                num_samples, rank=rank, world_size=world_size, grad_accum_steps=grad_accum_steps
            )
            pairs = zip(steps_of(plain), steps_of(split), strict=True)
            for index, (one, many) in enumerate(pairs):
                assert samples(many) == samples(one)
                sizes = [len(batch.data[0]) for batch in many.micro_batches]
                assert len(sizes) <= grad_accum_steps
                assert max(sizes) - min(sizes) <= 1
                assert min(sizes) >= 1
                # Rank 0 has the largest share: it sets the number, and needs no placeholder.
                assert rank > 0 or all(batch.weight for batch in many.micro_batches)
                counts.add((index, len(sizes)))
        assert len(counts) == plain.steps_per_epoch


def test_rank_without_samples_gets_one_placeholder() -> None:
    """DDP needs every rank in backward: weight 0 keeps the placeholder out of the gradient."""
    steps = [list(steps_of(batches(9, rank=rank, world_size=4), 0))[-1] for rank in range(4)]
    assert [len(samples(step)) for step in steps] == [1, 0, 0, 0]
    assert [len(step.micro_batches) for step in steps] == [1, 1, 1, 1]
    assert [step.micro_batches[0].weight for step in steps][1:] == [0.0, 0.0, 0.0]
    assert {step.global_count for step in steps} == {1}


@pytest.mark.parametrize(
    ("num_samples", "global_size", "grad_accum_steps", "world_size", "sizes"),
    [
        (44, 32, 8, 1, [4, 4, 4]),  # 12 are left over: three whole micro-batches of 4
        (33, 32, 1, 1, [2]),  # 1 is left over
        (33, 32, 1, 4, [2]),  # and three ranks have none
        (39, 32, 4, 2, [4]),  # 7 are left over, 4 and 3 a rank, in micro-batches of 4
        (35, 32, 8, 2, [2, 2]),  # 3 are left over, 2 and 1 a rank, in micro-batches of 2
        (3, 2, 2, 1, [1]),  # micro-batches of one sample, as configured
    ],
)
def test_what_is_left_over_makes_no_micro_batch_of_one_sample(
    num_samples: int, global_size: int, grad_accum_steps: int, world_size: int, sizes: list[int]
) -> None:
    """BatchNorm cannot train on one sample: it comes twice with half the weight."""
    for rank in range(world_size):
        ours = batches(
            num_samples,
            rank=rank,
            world_size=world_size,
            global_size=global_size,
            grad_accum_steps=grad_accum_steps,
            num_randoms=3,
        )
        last = list(steps_of(ours))[-1]
        found = [len(batch.data[0]) for batch in last.micro_batches]
        assert all(one <= most for one, most in zip(found, sizes, strict=False))
        assert ours.micro_size == 1 or min(found) > 1
        shapes = [None if one.randoms is None else one.randoms.shape for one in last.micro_batches]
        assert shapes == [(count, 3) for count in found]  # each copy has its numbers
        if rank == 0:
            assert found == sizes[: len(found)]
        assert len(samples(last)) == len(range(rank, last.global_count, world_size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_samples", [2, 12, 13])
def test_evaluation_counts_each_sample_once(world_size: int, num_samples: int) -> None:
    """The ranks' evaluation batches together are the split, without padding."""
    seen: list[MicroBatch] = []
    for rank in range(world_size):
        ours = numbered(num_samples)
        seen += ours.in_order(EpochShare(4, rank, world_size, seed=0))
    assert torch.cat([batch.data[1] for batch in seen]).tolist() == list(range(num_samples))
    assert all(1 <= len(batch.data[0]) <= 4 and batch.weight == 1.0 for batch in seen)


def test_normalize_scales_images_and_leaves_floats() -> None:
    """uint8 pixels get mean 0 and std 1; the original is unchanged."""
    split = numbered(1)
    dataset = Dataset("x", split, split, num_classes=None, mean=0.5, std=0.25)
    pixels = torch.tensor([0, 255], dtype=torch.uint8)
    torch.testing.assert_close(dataset.normalize(pixels), torch.tensor([-2.0, 2.0]))
    assert pixels.tolist() == [0, 255]
    floats = torch.randn(3)
    assert dataset.normalize(floats) is floats


@pytest.mark.parametrize(
    ("name", "train", "evaluation", "shape"),
    [
        ("random", 200, 40, (10,)),
        ("digits", 1437, 360, (1, 28, 28)),
        ("fake_images", 1000, 200, (1, 28, 28)),
    ],
)
def test_offline_yaml_builds_the_same_data_each_time(
    name: str, train: int, evaluation: int, shape: tuple[int, ...], tmp_path: Path, cache: Path
) -> None:
    """Sizes and types are right, statistics match the pixels, a second load is equal."""
    source = make("dataset", yaml.safe_load((CONF / f"{name}.yaml").read_text()))
    logged: list[str] = []
    first, second = (load_dataset(source, data_root=tmp_path, log=logged.append) for _ in range(2))
    assert first.train.inputs.shape == (train, *shape)
    assert first.eval.inputs.shape == (evaluation, *shape)
    assert len(first.train) == len(first.train.targets) == train
    for one, other in ((first.train, second.train), (first.eval, second.eval)):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
    normal = first.normalize(first.train.inputs)
    assert normal.dtype == torch.float32
    assert abs(float(normal.mean())) < 0.05
    assert abs(float(normal.std()) - 1) < 0.05
    if first.num_classes is None:  # cheap to draw: leaves nothing on disk
        assert (logged, cache.exists()) == ([], False)
    else:
        assert first.train.targets.dtype == torch.int64
        assert set(first.train.targets.tolist()) == set(range(first.num_classes))
        assert len(logged) == 1


def test_fake_images_can_be_learnt() -> None:
    """The nearest class mean of the train split classifies most of the eval split."""
    data = FakeImages("f", 200, 100, 3, 8, 8, 4, seed=0).build(Path())
    train, rest = data["train_inputs"].float(), data["eval_inputs"].float()
    means = torch.stack([train[data["train_targets"] == label].mean(0) for label in range(4)])
    nearest = torch.cdist(rest.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == data["eval_targets"]).float().mean() > 0.9


@pytest.mark.parametrize("key", ["num_samples", "height", "num_classes"])
def test_size_below_one_is_rejected(key: str) -> None:
    """The message names the key and the value."""
    answer = config_error("dataset=fake_images", f"dataset.{key}=0")
    assert answer.startswith(f"dataset.{key} (0) must be greater than 0")


@dataclass(frozen=True)
class Counting:
    """A source that counts its builds in a file, slowly enough for others to queue."""

    name: str

    def fingerprint(self, data_root: Path) -> dict[str, object]:
        """Nothing varies."""
        return {}

    def build(self, data_root: Path) -> dict[str, Tensor]:
        """Note the build, then take some time."""
        with (data_root / "builds").open("a") as file:
            file.write("x")
        threading.Event().wait(0.3)
        keys = ("train_inputs", "train_targets", "eval_inputs", "eval_targets")
        return {key: torch.arange(1000) for key in keys}

    def dataset(self, tensors: Mapping[str, Tensor]) -> Dataset:
        """As they are."""
        return Dataset(self.name, *splits(tensors), num_classes=None)


def num_builds(data_root: Path) -> int:
    """Return how often the counting source was built."""
    return len((data_root / "builds").read_text())


def test_processes_prepare_a_cache_once(tmp_path: Path) -> None:
    """Three processes at once: one builds, the others wait and load the same."""
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:  # leave by os._exit alone: pytest must not go on twice
            try:
                data = load_dataset(Counting("c"), data_root=tmp_path, log=lambda line: None)
                os._exit(0 if data.train.targets.tolist() == list(range(1000)) else 1)
            finally:
                os._exit(2)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert num_builds(tmp_path) == 1


def flip_a_byte(folder: Path) -> None:
    """Damage the tensors and keep their size."""
    data = bytearray((folder / "tensors.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "tensors.pt").write_bytes(data)


def truncate(folder: Path) -> None:
    """Cut the tensors in half."""
    data = (folder / "tensors.pt").read_bytes()
    (folder / "tensors.pt").write_bytes(data[: len(data) // 2])


def forget_manifest(folder: Path) -> None:
    """Leave what a kill before the manifest leaves."""
    (folder / "manifest.json").unlink()


def halve_manifest(folder: Path) -> None:
    """Leave what a kill during the manifest's write leaves."""
    (folder / "manifest.json").write_text('{"format_ver')


def age(folder: Path) -> None:
    """Leave what another version of the program left."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["format_version"] = FORMAT_VERSION - 1
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_byte, "sha256"),
        (truncate, "sha256"),
        (forget_manifest, "manifest.json"),
        (halve_manifest, "manifest.json or tensors.pt cannot be read"),
        (age, f"format_version is {FORMAT_VERSION}, manifest.json has {FORMAT_VERSION - 1}"),
    ],
)
def test_a_damaged_cache_is_rebuilt_and_reported(
    damage: object, reason: str, tmp_path: Path, cache: Path
) -> None:
    """A damaged cache is replaced, and one logged line has the reason."""
    assert callable(damage)
    load_dataset(Counting("c"), data_root=tmp_path, log=print)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    damage(folder)
    logged: list[str] = []
    data = load_dataset(Counting("c"), data_root=tmp_path, log=logged.append)
    assert data.train.targets.tolist() == list(range(1000))
    (line,) = logged
    assert "rebuilding" in line
    assert reason in line
    load_dataset(Counting("c"), data_root=tmp_path, log=logged.append)
    assert (len(logged), num_builds(tmp_path)) == (1, 2)


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list of the files that are read in full from now on."""
    found: list[Path] = []
    original = prepared.file_sha256

    def counting(path: Path) -> str:
        found.append(path)
        return original(path)

    monkeypatch.setattr(prepared, "file_sha256", counting)
    return found


def test_one_process_verifies_a_cache_and_the_others_trust_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in full once if it was copied, or if it has changed in any way."""
    load_dataset(Counting("c"), data_root=tmp_path, log=print)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    read = hashed(monkeypatch)
    for _ in range(3):
        load_dataset(Counting("c"), data_root=tmp_path, log=pytest.fail)
    assert read == []
    shutil.copyfile(folder / "tensors.pt", folder / "copy")
    (folder / "copy").replace(folder / "tensors.pt")
    for _ in range(3):
        load_dataset(Counting("c"), data_root=tmp_path, log=pytest.fail)
    assert read == [folder / "tensors.pt"]
    before = (folder / "tensors.pt").stat()
    flip_a_byte(folder)
    os.utime(folder / "tensors.pt", ns=(before.st_atime_ns, before.st_mtime_ns))
    logged: list[str] = []
    load_dataset(Counting("c"), data_root=tmp_path, log=logged.append)
    assert len(logged) == 1
    assert "sha256" in logged[0]


def test_a_cache_that_only_others_may_write_to_serves(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If intact, it is read without a lock, also where its stamp is another."""
    load_dataset(Counting("c"), data_root=tmp_path, log=print)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    os.utime(folder / "tensors.pt")

    def reject(self: object, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ddp_runner.data.load_dataset.locked", reject)  # root may write
    data = load_dataset(Counting("c"), data_root=tmp_path, log=pytest.fail)
    assert data.train.targets.tolist() == list(range(1000))
    flip_a_byte(folder)
    with pytest.raises(UserError, match="cannot be written"):
        load_dataset(Counting("c"), data_root=tmp_path, log=pytest.fail)


def test_cache_that_cannot_be_written_names_the_variable(tmp_path: Path, cache: Path) -> None:
    """The fix is another folder. Root ignores permissions, so the test puts a file in the way."""
    cache.write_text("a file")
    with pytest.raises(UserError, match="DDP_RUNNER_CACHE"):
        load_dataset(Counting("c"), data_root=tmp_path, log=print)


def test_a_step_may_change_the_batch_that_it_gets() -> None:
    """As in `labels = batch.pop("labels")`: the same samples are tried several times."""
    loaded = {"x": torch.ones(2), "labels": torch.zeros(2), "more": [torch.ones(2)]}
    dataset = cast(Any, SimpleNamespace(mean=None))
    of_user: Any = Dataset.prepare(dataset, loaded, torch.device("cpu"))
    of_user.pop("labels")
    of_user["more"].clear()
    assert loaded.keys() == {"x", "labels", "more"}
    assert len(loaded["more"]) == 1
