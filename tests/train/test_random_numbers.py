"""What a step, an evaluation and a sample draw follows from the seed and the step alone."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from train_states import MNIST_NET, Trace, at, build, compose_config, evaluated, run_loop

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.seeds import GENERATORS, generator_states, moved, seed_all, seed_generators
from ddp_runner.train.step import StepOutput

# Six steps of dropout, and of a step that draws from each generator.
DRAWING = (
    *MNIST_NET,
    "dataset.num_samples=24",
    f"train.step={__name__}.drawing",
    f"allowed_targets=[{__name__}]",
    "train.epochs=2",
    "train.log_every_steps=1",
    "checkpoint.every_steps=1",
)
SOURCES = ("python", "numpy", "torch")


def drawing(model: nn.Module, batch: Any) -> StepOutput:
    """Return a loss with noise of each generator, and the noise."""
    inputs, targets = batch
    drawn = {
        "python": torch.tensor(random.random()),
        "numpy": torch.tensor(np.random.rand()).float(),
        "torch": torch.rand(()),
    }
    count = len(targets)
    outputs = model(inputs + 0.1 * sum(drawn.values()))
    loss = F.nll_loss(outputs, targets, reduction="sum")
    scalars = {name: count * value for name, value in drawn.items()}
    return StepOutput(loss, count, outputs=outputs, targets=targets, scalars=scalars)


def loop(
    env: DistEnv, config: Config, folder: Path | None = None, stop_after: int | None = None
) -> Trace:
    """Run from the newest checkpoint to the end or a stop."""
    return run_loop(env, config, max_steps=None, folder=folder, stop_after=stop_after)


def drawn(*traces: Trace) -> dict[int, list[float]]:
    """Return the loss and the noise of each step."""
    names = ("train/loss", *(f"train/{name}" for name in SOURCES))
    return {
        int(line["step"]): [line[name] for name in names]
        for trace in traces
        for line in trace.lines
        if "train/loss" in line
    }


@pytest.mark.full
def test_evaluations_change_nothing_that_a_run_learns() -> None:
    """However many there are: they draw dropout's numbers, too, and read the same generators."""
    traces = [
        run_ranks(loop, 2, compose_config(*DRAWING, *keys, world_size=2))[0]
        for keys in (
            ("train.eval_every_epochs=0",),
            ("train.eval_every_steps=1",),
            ("train.eval_every_steps=2",),
        )
    ]
    assert len(drawn(traces[0])) == 6
    for trace in traces[1:]:
        assert drawn(trace) == drawn(traces[0])
        assert torch.equal(trace.weights, traces[0].weights)


@pytest.mark.full
def test_a_step_draws_its_own_numbers_after_any_resume(tmp_path: Path) -> None:
    """Two ranks, one, and two again: what two ranks draw is what they always draw in that step."""
    whole, _ = run_ranks(loop, 2, compose_config(*DRAWING, world_size=2))
    parts = [
        run_ranks(loop, world_size, compose_config(*DRAWING, world_size=world_size), tmp_path, stop)
        for world_size, stop in ((2, 1), (1, 4), (2, None))
    ]
    (first, _), (second,), (third, _) = parts
    assert [list(drawn(one)) for one in (first, second, third)] == [[1, 2], [3, 4], [5, 6]]
    assert drawn(first) == {step: drawn(whole)[step] for step in (1, 2)}
    noise = [{step: of[1:] for step, of in drawn(one).items()} for one in (whole, second, third)]
    assert noise[2] == {step: noise[0][step] for step in (5, 6)}
    assert all(noise[1][step] != noise[0][step] for step in (3, 4)), "one share, other numbers"
    again, _ = run_ranks(loop, 2, compose_config(*DRAWING, "seed=1", world_size=2))
    assert all(drawn(again)[step][1:] != noise[0][step] for step in noise[0])


def evaluations(env: DistEnv, config: Config) -> list[dict[str, float]]:
    """Evaluate at step 0, once more after other draws, and as at step 3."""
    state = build(env, config)
    found = [evaluated(state)[0]]
    random.random()
    torch.rand(3)
    return [*found, evaluated(state)[0], evaluated(at(state, step=3))[0]]


def test_the_same_weights_evaluate_to_the_same_digits() -> None:
    """Of a model that draws, such as a VAE: at its step, whatever was drawn before."""
    for first, again, later in run_ranks(evaluations, 2, compose_config(*DRAWING, world_size=2)):
        assert first == again
        assert first["eval/torch"] != later["eval/torch"]


def test_every_generator_of_the_process_is_seeded() -> None:
    """All differ between labels, and none depends on what was drawn before."""
    outside = generator_states()
    try:
        found = []
        for labels in (("step", 1, 0), ("step", 1, 1), ("step", 1, 0)):
            seed_all(0, *labels)
            found.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
        assert found[0] == found[2]
        assert not set(found[0]) & set(found[1])
        before = generator_states()
        draws = {"random": random.random, "torch": partial(torch.rand, 1), "numpy": np.random.rand}
        for name, draw in draws.items():
            draw()
            assert moved(before) == {name}
            seed_generators(7, [name])
            before = generator_states()
        assert draws.keys() == GENERATORS.keys()
    finally:
        for name, state in outside.items():
            GENERATORS[name].restore(state)
