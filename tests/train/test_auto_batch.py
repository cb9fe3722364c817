"""batch.per_rank=auto: the search, and a run that begins with it.

A model that raises torch.OutOfMemoryError above a number of samples takes the place of a GPU, so
the rule that asks for one is skipped.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from ranks import run_ranks
from run_folders import rank_log, record, reproducible_metrics
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from train_states import build, compose_config, with_setup

from ddp_runner.config.schema import AUTO, Config, config_hash
from ddp_runner.data.splits import TensorSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.models.toy import ToyModel
from ddp_runner.tracking.provenance import versions
from ddp_runner.train.auto_batch import largest_that_fits, step_fits, validate_independent
from ddp_runner.worker import work


class Hungry(ToyModel):
    """Runs out of memory above a number of samples, which differs between the ranks."""

    def __init__(self, limits: list[int]) -> None:
        super().__init__()
        self.limit = limits[dist.get_rank()]

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        if self.training and len(inputs) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(inputs)


@pytest.mark.parametrize(
    ("limit", "most", "expected"),
    [
        (0, 100, 0), (1, 100, 1), (2, 100, 2), (3, 100, 3), (7, 100, 7), (9, 100, 8),
        (23, 100, 16), (24, 100, 24), (100, 1000, 96), (1000, 10_000, 960), (10**9, 1, 1),
        (10**9, 3, 3), (10**9, 100, 96), (10**9, 128, 128), (5, 4, 4),
    ],
)  # fmt: skip
def test_the_search_ends_at_a_multiple_of_eight_below_the_limit(
    limit: int, most: int, expected: int
) -> None:
    """It tries no size twice, and few sizes that do not fit: each of them empties the memory."""
    tried = list[int]()

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert largest_that_fits(fits, most=most) == expected
    assert len(set(tried)) == len(tried) <= 20
    assert max(tried) <= most
    assert sum(size > limit for size in tried) <= 4


def config_of(*overrides: str, limits: list[int], folder: Path, world_size: int = 2) -> Config:
    """Return a config whose ranks have these limits and meet in a folder."""
    config = compose_config(
        "model=toy",
        "dataset.num_samples=200",
        "optimizer=adam",
        "train.epochs=2",
        "train.log_every_steps=1",
        f"allowed_targets=[{__name__}]",
        f"launch.init_method='{(folder / 'store').as_uri()}'",
        *overrides,
        world_size=world_size,
    )
    model = {**config.model, "_target_": f"{__name__}.Hungry", "limits": limits}
    return replace(config, model=model)


def auto(config: Config) -> Config:
    """Return a config as it is resolved on GPUs from batch.per_rank=auto."""
    batch = replace(config.batch, per_rank=AUTO, global_size=config.world_size)
    return replace(config, batch=batch)


def whole_run(env: DistEnv, config: Config, run_dir: Path) -> str:
    """Run as a worker does; return how it ended, or the error."""
    job = Job(config=config, started_at=time.time(), code={"versions": versions()}, run_dir=run_dir)
    try:
        status: str = work(job, replace(env, launcher="environment"))["status"]
    except UserError as error:
        return str(error)
    return status


def batch_of(run_dir: Path) -> dict[str, object]:
    """Return the batch sizes of a run's frozen config."""
    batch: dict[str, object] = yaml.safe_load((run_dir / ".hydra" / "config.yaml").read_text())[
        "batch"
    ]
    return batch


def run(config: Config, run_dir: Path, num_ranks: int = 2) -> list[str]:
    """Run a config on all ranks."""
    return run_ranks(whole_run, num_ranks, config, run_dir, backend=None)


def test_a_run_is_the_one_with_the_number_that_was_found(tmp_path: Path) -> None:
    """The smallest of the ranks' numbers; the search leaves no trace in weights or metrics."""
    found, given = tmp_path / "found", tmp_path / "given"
    config = config_of(limits=[31, 23], folder=tmp_path)
    assert run(auto(config), found) == ["completed"] * 2
    config = config_of("batch.per_rank=16", limits=[99, 99], folder=given)
    given.mkdir()
    assert run(config, given) == ["completed"] * 2
    assert reproducible_metrics(found) == reproducible_metrics(given)
    weights = [load_file(folder / "model.safetensors") for folder in (found, given)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    batch = batch_of(found)
    assert (batch["per_rank"], batch["global_size"]) == (16, 32)
    expected = config_of("batch.per_rank=16", limits=[31, 23], folder=tmp_path)
    assert record(found)["config_hash"] == config_hash(expected)
    assert "batch.per_rank=auto: 16 samples a rank in each micro-step, of at most 100" in rank_log(
        found
    )


def test_a_resumed_run_keeps_its_number(tmp_path: Path) -> None:
    """Also one that asks for auto once more, as a restarted worker group does."""
    run_dir = tmp_path / "run"
    config = auto(config_of(limits=[9], folder=tmp_path, world_size=1))
    assert run(config, run_dir, 1) == ["completed"]
    (tmp_path / "store").unlink()
    model = {**config.model, "limits": [99]}
    train = replace(config.train, epochs=3)
    again = replace(config, model=model, train=train, resume=str(run_dir))
    assert run(again, run_dir, 1) == ["completed"]
    assert batch_of(run_dir)["per_rank"] == 8
    assert rank_log(run_dir).count("batch.per_rank=auto") == 1
    assert record(run_dir)["step"] == 3 * 25


@pytest.mark.parametrize(
    ("limit", "key", "expected"),
    [(10**9, "batch.max_per_rank=20", 16), (10**9, "train.epochs=1", 192), (0, "seed=0", None)],
)
def test_the_number_is_at_most_what_is_allowed_or_there(
    tmp_path: Path, limit: int, key: str, expected: int | None
) -> None:
    """By the key, by the training set; and it is an error if a single sample is too much."""
    config = config_of(key, limits=[limit], folder=tmp_path, world_size=1)
    (answer,) = run(auto(config), tmp_path / "run", 1)
    if expected is None:
        assert "batch.per_rank=auto: a step of one sample needs more than 90% of the" in answer
    else:
        assert answer == "completed"
        assert batch_of(tmp_path / "run")["per_rank"] == expected


class Ones(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream of equal samples; without a size it never ends."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from repeat(
            (torch.ones(10), torch.ones(5)), *[] if self.size is None else [self.size]
        )


@pytest.mark.parametrize("most", [None, 20])
def test_a_stream_needs_a_limit(tmp_path: Path, most: int | None) -> None:
    """It may have no length, and then the key alone says how many samples to try."""
    config = auto(config_of("train.max_steps=2", limits=[10**9], folder=tmp_path, world_size=1))
    dataset = {
        "name": "ones",
        "_target_": "ddp_runner.data.sources.torch_dataset.TorchDataset",
        "train": {"_target_": f"{__name__}.Ones"},
        "eval": {"_target_": f"{__name__}.Ones", "size": 8},
    }
    config = replace(config, dataset=dataset, batch=replace(config.batch, max_per_rank=most))
    (answer,) = run(config, tmp_path / "run", 1)
    if most is None:
        assert answer == (
            "batch.per_rank=auto needs a limit, since dataset=ones is a stream of unknown length; "
            "write batch.max_per_rank"
        )
    else:
        assert answer == "completed"
        assert batch_of(tmp_path / "run")["per_rank"] == 16


def rejection(env: DistEnv, config: Config) -> str:
    """Return how a rank answers to a model whose BatchNorm waits for the other ranks."""
    state = build(env, config)
    validate_independent(state)
    with pytest.raises(UserError) as error:
        validate_independent(replace(state, module=nn.SyncBatchNorm(3)))
    return str(error.value)


def test_a_step_that_waits_for_other_ranks_is_rejected() -> None:
    """A rank that has run out of memory would leave the others waiting."""
    for answer in run_ranks(rejection, 2, compose_config("model=toy", world_size=2)):
        assert "under parallelism=ddp this model's ranks wait for each other" in answer


def lengths_tried(env: DistEnv, config: Config) -> list[int]:
    """Return the sums of the samples that a trial takes; sample i is i ones, then padding."""
    state = build(env, config)
    inputs = torch.ones(10, 10).tril()
    split = TensorSplit(inputs, torch.zeros(10, 5))
    setup = state.setup
    state = with_setup(
        state,
        dataset=replace(setup.dataset, train=split, padding_id=0),
        batches=replace(setup.batches, split=split),
    )
    tried = list[int]()
    state.model.register_forward_pre_hook(
        lambda _, given: tried.extend(given[0].sum(dim=1).int().tolist())
    )
    assert step_fits(state, 3)
    assert state.optimizer.state
    return tried


def test_the_longest_sequences_are_tried() -> None:
    """Twice: only the second step has the optimizer's state beside the activations."""
    config = compose_config("model=toy", "optimizer=adam")
    assert run_ranks(lengths_tried, 1, config) == [[10, 9, 8] * 2]
