"""With batch.virtual_ranks, a run has the same bytes in every mode and at every world size."""

import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ranks import run_ranks
from tiers import named
from torch import Tensor, nn
from train_states import Trace, build, compose_config, run_loop, take_steps

from ddp_runner.checkpoint.between_ranks import weights_sha256
from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.parallelism.tree import Leaf, add_leaf
from ddp_runner.train.buffers import find_changing

# The last batch has 3 of 67 samples, so five of the eight parts have none.
SIZES = ("dataset.num_samples=67", "dataset.eval_samples=21", "batch.per_rank=2")
IMAGES = ("dataset=fake_images", "dataset.height=16", "dataset.width=16", *SIZES)
TOY = ("model=toy", *SIZES)
ROWS = {
    "convnet, clipped, in micro-batches, on a plateau": (
        *("model=convnet", *IMAGES, "train.clip_norm=0.5", "train.grad_accum_steps=2"),
        *("scheduler=plateau", "scheduler.patience=0", "train.eval_every_steps=2"),
    ),
    "mnist_net, dropout": ("model=mnist_net", *IMAGES[:1], *SIZES, "optimizer=adamw"),
    "resnet18, augmented, averaged": (
        *("model=resnet18", *IMAGES, "dataset.channels=3", "optimizer.momentum=0.9"),
        *("dataset.height=32", "dataset.width=32", "optimizer.lr=0.001"),  # with 0.01 bf16 diverges
        *("dataset.augmentation.crop_padding=2", "dataset.augmentation.horizontal_flip=true"),
        *("ema.decay=0.9", "ema.evaluate=true"),
    ),
    "gpt, tokens, dropout": (
        *("model=gpt", "batch.global_size=null", "batch.per_rank=1", "model.num_layers=2"),
        *("model.width=32", "model.num_heads=2", "model.dropout=0.1", "params.no_decay=true"),
        *("dataset.sequence_length=16", "dataset.eval_fraction=0.001", "train.clip_norm=1.0"),
        "train.eval_every_steps=5",
    ),
    "a codebook, an unused layer": (
        *(*TOY, f"model._target_={__name__}.Codebook", f"allowed_targets=[{__name__}]"),
        *("optimizer=adamw", "train.clip_value=0.01", "metrics=[rmse]"),
    ),
}
PLACES = (
    *(("single", 1), ("dp", 1), ("ddp", 2), ("ddp", 4), ("ddp", 8)),
    *(("fsdp", 2), ("fsdp", 4), ("fsdp", 8), ("hsdp", 4), ("hsdp", 8)),
)
FEW = (("single", 1), ("ddp", 4), ("fsdp", 2), ("hsdp", 4))
QUICK = (("single", 1), ("ddp", 2), ("fsdp", 2))


class Codebook(nn.Module):
    """A model that reads what it has written into a buffer, with a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.norm, self.net2 = nn.Linear(10, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)
        self.register_buffer("code", torch.zeros(5))
        self.code: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 10) to (batch, 5)."""
        outputs: Tensor = self.norm(self.net1(inputs)) + self.code
        if self.training:
            self.code.lerp_(outputs.detach().mean(dim=0), 0.3)
        return outputs


class Unseeded(Codebook):
    """A model with weights that follow from no seed."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.net1.weight, time.monotonic_ns() % 997 / 997)


class End(NamedTuple):
    """What a run leaves: equal for equal bytes."""

    sha256: str
    lines: list[dict[str, float]]  # as logged, without measurements
    error: str


def config_of(row: str, mode: str, world_size: int, *keys: str) -> Config:
    """Return the config of a row in a mode."""
    common = ("batch.virtual_ranks=8", "train.log_every_steps=1", f"parallelism={mode}")
    return compose_config(*ROWS[row], *common, *keys, world_size=world_size)


def trained(
    env: DistEnv,
    config: Config,
    max_steps: int,
    folder: Path | None = None,
    stop_after: int | None = None,
) -> End:
    """Run from the newest checkpoint, if any, to the last step or a stop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.train.num_threads or threads)
    state = build(env, config)
    find_changing(state)
    trace: Trace = run_loop(
        env, config, max_steps=max_steps, folder=folder, stop_after=stop_after, state=state
    )
    torch.set_num_threads(threads)
    lines = [
        {name: value for name, value in line.items() if not name.startswith("perf/")}
        for line in trace.lines
    ]
    return End(weights_sha256(state.module), lines, trace.error)


@pytest.mark.parametrize(
    ("row", "precision", "steps", "places"),
    [
        ("convnet, clipped, in micro-batches, on a plateau", "fp32", 7, QUICK),
        *(
            pytest.param(row, precision, 12, FEW, marks=pytest.mark.full)
            for row in ROWS
            for precision in ("fp32", "bf16")
        ),
        *(
            pytest.param(row, precision, 200, PLACES, marks=[pytest.mark.full, pytest.mark.slow])
            for row in ROWS
            for precision in ("fp32", "bf16")
        ),
    ],
)
def test_every_place_gives_the_same_bytes(
    row: str, precision: str, steps: int, places: tuple[tuple[str, int], ...]
) -> None:
    """Weights, losses, norms, metrics, rates. Without the tree, each world size has its own."""
    ends = {}
    for mode, world_size in places:
        if row.startswith("a codebook") and mode in ("fsdp", "hsdp"):
            continue  # FSDP2 waits for the unused layer
        config = config_of(row, mode, world_size, f"train.precision={precision}")
        ends[mode, world_size] = run_ranks(trained, world_size, config, steps, timeout_s=1800)[0]
    first = ends["single", 1]
    assert not first.error
    assert len(first.lines) > steps
    assert ends == dict.fromkeys(ends, first)


@pytest.mark.parametrize("row", named(ROWS, quick=["mnist_net, dropout"]))
def test_a_resume_in_another_mode_gives_the_same_bytes(row: str, tmp_path: Path) -> None:
    """Stopped amid an epoch on 4 ranks, continued on 2 under another mode, then on one again.

    The first checkpoint is one file, the second has a file of each rank.
    """
    split, sharded = "ddp" if row.startswith("a codebook") else "fsdp", "checkpoint.format=sharded"
    (whole,) = run_ranks(trained, 1, config_of(row, "single", 1), 9)
    begun, *_ = run_ranks(trained, 4, config_of(row, "ddp", 4), 9, tmp_path, 3)
    further, *_ = run_ranks(trained, 2, config_of(row, split, 2, sharded), 9, tmp_path, 6)
    (ended,) = run_ranks(trained, 1, config_of(row, "single", 1, sharded), 9, tmp_path)
    assert begun.sha256 != whole.sha256
    assert ended.sha256 == whole.sha256
    assert [*begun.lines, *further.lines, *ended.lines] == whole.lines


def weights_of_all(env: DistEnv, config: Config) -> Tensor:
    """Return the weights after some steps."""
    return take_steps(env, config, 3).weights


def test_all_ranks_begin_with_the_weights_of_rank_zero() -> None:
    """As under DDP, which does not wrap the model here."""
    model = (f"model._target_={__name__}.Unseeded", f"allowed_targets=[{__name__}]")
    keys = ("batch.virtual_ranks=2", "parallelism=ddp", "dataset.num_samples=20")
    config = compose_config("model=toy", *model, *keys, world_size=2)
    first, second = run_ranks(weights_of_all, 2, config)
    assert torch.equal(first, second)


def without_tree(env: DistEnv, config: Config) -> Tensor:
    """Return the weights after some plain steps."""
    return take_steps(env, config, 4).weights


def test_equal_bytes_need_the_tree() -> None:
    """The test above could not fail if plain data parallelism gave equal bytes as well."""
    weights = []
    for mode, size in (("single", 1), ("ddp", 2)):
        batch = f"batch.per_rank={16 // size}"
        config = compose_config(
            "model=convnet", *IMAGES, batch, f"parallelism={mode}", world_size=size
        )
        weights.append(run_ranks(without_tree, size, config)[0])
    assert not torch.equal(*weights)


@pytest.mark.parametrize("count", [1, 2, 8, 16])
def test_partial_sums_have_the_order_of_the_tree(count: int) -> None:
    """Each level adds neighbours; None counts as nothing, and a sum of -0.0 keeps its sign."""
    values = torch.randn(count, 3, dtype=torch.float32) * 10.0 ** torch.arange(count).view(-1, 1)
    stack = list[Leaf]()
    for index, row in enumerate(values):
        present = torch.ones(1) if index % 3 == 1 else None
        add_leaf(stack, [row.clone(), torch.tensor(-0.0), present], index=index)
    (total,) = stack
    expected = values
    while len(expected) > 1:
        expected = torch.stack([expected[i] + expected[i + 1] for i in range(0, len(expected), 2)])
    num_present = len(range(1, count, 3))
    assert torch.equal(total[0], expected[0])
    assert total[1].signbit()
    assert total[2] is None if num_present == 0 else total[2].item() == num_present


def rejection(env: DistEnv, config: Config) -> str:
    """Return why no step can be taken."""
    try:
        take_steps(env, config, 1)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("SparseBag",
         "batch.virtual_ranks adds dense gradients, and this model has sparse ones; leave out "
         "sparse=True in the model, or write batch.virtual_ranks=null"),
        ("Synchronised",
         "batch.virtual_ranks adds everything in one order, and norm is a "
         "SyncBatchNorm, which adds over ranks itself; use BatchNorm in the model, or write "
         "batch.virtual_ranks=null"),
    ],
)  # fmt: skip
def test_a_model_that_adds_in_another_way_is_rejected(model: str, sentence: str) -> None:
    """Only the model tells, and sparse gradients only in the first backward."""
    keys = (f"model._target_=broken_models.{model}", "allowed_targets=[broken_models]")
    config = compose_config(*TOY, *keys, "batch.virtual_ranks=2", world_size=1)
    assert run_ranks(rejection, 1, config) == [sentence]
