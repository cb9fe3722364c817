"""Every mode of parallelism takes the same steps as one process: proven for each YAML of the group.

Float64 shows that only rounding differs; float32 shows how much that is in a real run.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from modes import MESHES, OF_ANY_MODEL, TENSOR_PARALLEL, has_stages, needs, smallest_world
from orders import samples_of, steps_of
from ranks import run_ranks
from tiers import first_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_states import (
    MNIST_NET,
    NO_DROPOUT,
    STEPS_PER_EPOCH,
    TOLERANCES,
    TOY,
    Trace,
    build,
    compose_config,
    flat_weights,
    take_steps,
)

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.train.state import forward

MODELS = {"toy": TOY, "mnist_net": (*MNIST_NET, *NO_DROPOUT)}
NUM_STEPS = 2 * STEPS_PER_EPOCH + 2
GROUPS = [
    (mode, num_replicas + needs(mode).get("num_servers", 0))
    for mode in OF_ANY_MODEL
    for num_replicas in (1, 2, 4)
    if needs(mode).get("min_ranks", 1) <= num_replicas <= needs(mode).get("max_ranks", 4)
]
GROUPS_OF_TWO = [mode for mode, size in GROUPS if size == 2 and not needs(mode).get("num_servers")]


def overrides(mode: str, model: str) -> tuple[str, ...]:
    """Return the command line that trains a model under a mode, cut in stages if it wants them."""
    cut = "_mp" if has_stages(mode) else ""
    return (*MODELS[model], f"model={model}{cut}", f"parallelism={mode}", "optimizer.momentum=0.9")


def trace(
    env: DistEnv, config: Config, dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64)
) -> dict[torch.dtype, Trace]:
    """Take the same steps in each precision."""
    traces = {}
    for dtype in dtypes:
        torch.set_default_dtype(dtype)
        traces[dtype] = take_steps(env, config, NUM_STEPS)
    return traces


@cache
def reference(model: str) -> dict[torch.dtype, Trace]:
    """Return the steps of one process without accumulation."""
    (traces,) = run_ranks(trace, 1, compose_config(*overrides("single", model)))
    return traces


def ways() -> list[Any]:
    """Return mode, ranks, model and micro-steps; what the mesh modes share is tested once.

    By default, train the toy model once in each mode that needs at most two ranks.
    """
    found = list[tuple[str, int, str, int]]()
    for mode, world_size in GROUPS:
        if mode not in MESHES:
            found += [(mode, world_size, "toy", steps) for steps in (1, 2)]
            found += [(mode, world_size, "mnist_net", 2)]
        elif (mode, world_size) != ("tp", 4):
            found += [(mode, world_size, "toy", 1 + world_size // 2 % 2)]
            if mode not in TENSOR_PARALLEL:
                found += [(mode, world_size, "mnist_net", 2 - world_size // 2 % 2)]
    quick = set[tuple[str, int, str, int]]()
    for mode in dict(GROUPS):
        several = [way for way in found if way[0] == mode and way[2] == "toy" and way[1] > 1]
        if smallest_world(mode) < 4:
            quick.add(next(iter(several or (way for way in found if way[0] == mode))))
    marks = {way: [] if way in quick else [pytest.mark.full] for way in found}
    # The larger model once in each mode of few ranks; all numbers of ranks train toy.
    for way in found:
        is_few = way[1] == smallest_world(way[0]) < 4
        if way not in quick and way[2] == "mnist_net" and not is_few:
            marks[way].append(pytest.mark.slow)
    return [pytest.param(*way, marks=marks[way]) for way in found]


@pytest.mark.parametrize(("mode", "world_size", "model", "grad_accum_steps"), ways())
def test_steps_equal_those_of_one_process(
    mode: str, world_size: int, grad_accum_steps: int, model: str
) -> None:
    """Losses and weights agree to rounding, through epochs that end with a batch of three."""
    keys = (*overrides(mode, model), f"train.grad_accum_steps={grad_accum_steps}")
    ranks = run_ranks(trace, world_size, compose_config(*keys, world_size=world_size))
    ranks = ranks[: needs(mode).get("num_servers")]  # where one rank has the parameters, it alone
    for dtype, expected in reference(model).items():
        for found in (traces[dtype] for traces in ranks):
            torch.testing.assert_close(found.losses, expected.losses, **TOLERANCES[dtype])
            torch.testing.assert_close(found.weights, expected.weights, **TOLERANCES[dtype])
            assert torch.equal(found.weights, ranks[0][dtype].weights)


def plain_steps(env: DistEnv, config: Config) -> tuple[list[float], Tensor]:
    """Take the reference's steps in a loop as anyone writes it; return losses and weights."""
    torch.set_default_dtype(torch.float64)
    state, losses = build(env, config), list[float]()
    model, split = state.module, state.batches.split
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer["lr"], momentum=0.9)
    epochs = [samples_of(state.batches, epoch).split(8) for epoch in range(3)]
    chosen = [indices for epoch in epochs for indices in epoch]
    for indices in chosen[:NUM_STEPS]:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(split.inputs[indices]), split.targets[indices])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, flat_weights(model)


def test_the_steps_of_one_process_are_those_of_a_plain_loop() -> None:
    """Every other test compares with these steps, so it could not see an error in them."""
    ((losses, weights),) = run_ranks(plain_steps, 1, compose_config(*overrides("single", "toy")))
    found = reference("toy")[torch.float64]
    torch.testing.assert_close(found.losses, losses, **TOLERANCES[torch.float64])
    torch.testing.assert_close(found.weights, weights, **TOLERANCES[torch.float64])


LETTERS = "".join(chr(97 + place * place % 26) for place in range(241))  # 27 samples to train on
BLOCKS = (
    *("parallelism=fsdp", "train.activation_checkpointing=true", "train.grad_accum_steps=2"),
    "parallelism.reshard_after_forward=false",
)
WAYS = {
    "ddp": (2, "parallelism=ddp"),
    "fsdp": (2, "parallelism=fsdp"),
    "blocks computed twice": (2, *BLOCKS),
    "hsdp": (4, "parallelism=hsdp"),
    "tp": (2, "parallelism=tp"),
    "split sequences": (2, "parallelism=tp", "parallelism.sequence_parallel=true"),
    "fsdp_tp": (4, "parallelism=fsdp_tp", "parallelism.sequence_parallel=true"),
    "replicas of tp": (4, "parallelism=fsdp_tp", "parallelism.num_replicas=2"),
    "ps": (3, "parallelism=ps"),
}


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, ...], Trace]:
    """Return the keys of a small language model with clipped gradients, and one process's steps."""
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text(LETTERS)
    keys = (
        *("model=gpt", f"dataset.path={path}", "dataset.sequence_length=8"),
        *("model.num_layers=2", "model.width=16", "model.num_heads=2", "batch.global_size=8"),
        *("optimizer=sgd", "optimizer.lr=0.5", "train.clip_norm=0.3"),
    )
    (steps,) = run_ranks(trace, 1, compose_config(*keys, "parallelism=single"), [torch.float64])
    return keys, steps[torch.float64]


QUICK = ("ddp",)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in QUICK else pytest.mark.full) for way in WAYS]
)
def test_a_language_model_takes_the_steps_of_one_process(
    way: str, of_one_process: tuple[tuple[str, ...], Trace]
) -> None:
    """Its loss is a mean over tokens; epochs end with a batch of three."""
    keys, expected = of_one_process
    assert expected.losses[-1] < expected.losses[0]
    world_size, *overrides = WAYS[way]
    config = compose_config(*keys, *overrides, world_size=world_size)
    ranks = run_ranks(trace, world_size, config, [torch.float64])
    for traces in ranks[: 1 if way == "ps" else None]:  # where rank 0 alone has the parameters
        found, close = traces[torch.float64], TOLERANCES[torch.float64]
        torch.testing.assert_close(found.losses, expected.losses, **close)
        torch.testing.assert_close(found.weights, expected.weights, **close)


def initial_weights(env: DistEnv, config: Config) -> Tensor:
    """Build with a seed of the rank's own."""
    return flat_weights(build(env, replace(config, seed=config.seed + env.rank)).module)


@pytest.mark.parametrize("mode", first_of(GROUPS_OF_TWO))
def test_weights_of_rank_zero_reach_all_ranks(mode: str) -> None:
    """Even ranks that drew different weights begin with those that a single process begins with."""
    config = compose_config(*overrides(mode, "toy"), world_size=2)
    (expected,) = run_ranks(initial_weights, 1, compose_config(*overrides("single", "toy")))
    for found in run_ranks(initial_weights, 2, config):
        assert torch.equal(found, expected)


def ddp_settings(env: DistEnv, configs: list[Config]) -> list[dict[str, int]]:
    """Return the settings that DDP got, for each config."""
    settings = []
    for config in configs:
        model = build(env, config).model
        assert isinstance(model, DistributedDataParallel)
        settings.append(model._get_ddp_logging_data())
    return settings


@pytest.mark.parametrize("mode", ["ddp", "ddp_mp"])
def test_each_setting_of_a_mode_reaches_ddp(mode: str) -> None:
    """None of them shows in the losses."""
    changes = {
        "bucket_cap_mb=3": ("bucket_cap_bytes", 3 * 2**20),
        "find_unused_parameters=true": ("find_unused_parameters", 1),
        "forward_sync_buffers=true": ("broadcast_buffers", 1),
        "static_graph=true": ("static_graph", 1),
    }
    keys = [(), *((f"parallelism.{change}",) for change in changes)]
    configs = [compose_config(*overrides(mode, "toy"), *key) for key in keys]
    ((plain, *changed),) = run_ranks(ddp_settings, 1, configs)
    names = [name for name, _ in changes.values()]
    for logged, expected in zip(changed, changes.values(), strict=True):
        assert [(name, logged[name]) for name in names if logged.get(name) != plain.get(name)] == [
            expected
        ]


def gradients(env: DistEnv, config: Config) -> dict[str, Tensor]:
    """Return this rank's own gradient, that of a skipped sync, and that of a sync after it."""
    state = build(env, config)
    batch = next(steps_of(state.batches)).micro_batches[0]
    parameters = list(state.module.parameters())

    def gradient() -> Tensor:
        return torch.cat([one.grad.flatten() for one in parameters if one.grad is not None])

    loss = forward(state.work, state.module, batch).loss_sum
    own = torch.autograd.grad(loss, parameters)  # leaves no trace in .grad, and calls no hook
    with state.work.mode.no_sync(state.model):
        forward(state.work, state.model, batch).loss_sum.backward()
    skipped = gradient().clone()
    forward(state.work, state.model, batch).loss_sum.backward()
    accumulated = gradient().clone()
    state.optimizer.zero_grad(set_to_none=True)
    forward(state.work, state.model, batch).loss_sum.backward()
    return {
        "own": torch.cat([one.flatten() for one in own]),
        "skipped": skipped,
        "accumulated": accumulated,
        "synced": gradient(),
    }


@pytest.mark.parametrize("mode", [mode for mode in GROUPS_OF_TWO if mode not in MESHES])
def test_gradients_are_the_mean_over_ranks_unless_the_sync_is_skipped(mode: str) -> None:
    """Inside no_sync each rank has its own gradient; after it, all have the mean, not the sum."""
    config = compose_config(*overrides(mode, "toy"), world_size=2)
    first, second = run_ranks(gradients, 2, config)
    mean = (first["own"] + second["own"]) / 2
    assert not torch.allclose(first["skipped"], second["skipped"])
    assert torch.equal(first["synced"], second["synced"])
    for found in (first, second):
        torch.testing.assert_close(found["skipped"], found["own"])
        torch.testing.assert_close(found["synced"], mean)
        torch.testing.assert_close(found["accumulated"], 2 * mean)
