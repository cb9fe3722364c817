"""Which rank the others wait for: wherever its delay comes, and also if ranks take turns."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_states
from ranks import run_ranks
from run_folders import metrics, record
from tiers import first_of
from train_states import TOY, build, compose_config, run_loop
from trainings import NUM_STEPS, run_training

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.train.step_timer import FEWEST_STEPS, Skew, lateness

NAP_S = 0.1


def test_a_rank_is_late_by_what_it_works_longer_than_the_median_rank() -> None:
    """Also where several ranks are late; nobody is where all take the same time."""
    steps = torch.tensor([[10.0, 60, 10, 12], [60, 10, 60, 10], [30, 30, 30, 30]])
    assert lateness(steps).tolist() == [[0, 50, 0, 2], [50, 0, 50, 0], [0, 0, 0, 0]]


def test_ranks_that_take_turns_are_late_by_half_each() -> None:
    """Their totals are equal, and still each step waits for one of them."""
    work, comm = torch.tensor([[[10.0, 60], [60, 10]] * 4, [[52.0, 2], [2, 52]] * 4])
    skew = Skew()
    assert skew.add(torch.stack([work, comm]), step_time_ms=80.0) == {
        "perf/comm_ms": 2.0,
        "perf/wait_ms": 25.0,
        "perf/comm_share": 2 / 80,
        "perf/skew_ms": 25.0,
        "perf/skew_rank": 0.0,
    }
    assert skew.fields() == {"skew_ms_by_rank": [25.0, 25.0], "skew_step_ms": 62.0}


def test_a_session_counts_each_step_once() -> None:
    """A line of four steps weighs four times as much as one of one step."""
    skew, step = Skew(), torch.tensor([[10.0, 50], [41, 1]], dtype=torch.float64)
    skew.add(step[:, None], step_time_ms=51.0)
    even = torch.tensor([[10.0, 10], [1, 1]], dtype=torch.float64)
    metrics = skew.add(even[:, None].expand(2, 4, 2), step_time_ms=11.0)
    assert metrics["perf/skew_ms"] == 0
    assert skew.fields() == {"skew_ms_by_rank": [0.0, 8.0], "skew_step_ms": 19.0}


def test_a_line_without_a_measured_step_has_no_figures() -> None:
    """The first steps are a warm-up; run.json says so, also if an earlier session had figures."""
    skew = Skew()
    assert skew.add(torch.zeros(2, 0, 4), step_time_ms=10.0) == {}
    assert skew.fields() == {"skew_ms_by_rank": None, "skew_step_ms": None}
    skew.add(torch.ones(2, FEWEST_STEPS - 1, 4), step_time_ms=10.0)
    assert skew.fields() == {"skew_ms_by_rank": None, "skew_step_ms": None}


def nap(*_: object, **__: object) -> None:
    """Sleep, in the place of a hook or of another function."""
    time.sleep(NAP_S)


def in_forward(state: Any) -> None:
    """Delay the forward."""
    state.module.register_forward_pre_hook(nap)


def in_backward(state: Any) -> None:
    """Delay the backward in its middle."""
    state.module.relu.register_full_backward_hook(nap)


def in_data(state: Any) -> None:
    """Delay the loading of each batch."""
    batches = state.batches
    load = batches.split.load

    def slowly(*arguments: Any, **named: Any) -> Any:
        for one in load(*arguments, **named):
            nap()
            yield one

    object.__setattr__(batches.split, "load", slowly)


def in_stream(state: Any) -> None:
    """Delay the loading of each batch of a stream, after which the ranks exchange its size."""
    split = state.batches.split
    split_open = split.open

    def slowly(*arguments: Any, **named: Any) -> Any:
        stream = split_open(*arguments, **named)
        taken = stream._batches
        stream._batches = (one for one in taken if nap() is None)
        return stream

    object.__setattr__(split, "open", slowly)


def in_optimizer(state: Any) -> None:
    """Delay the optimizer, after the exchange of one step and before that of the next."""
    state.optimizer.register_step_post_hook(nap)


def in_turns(state: Any) -> None:
    """Delay the forward of every other step of two micro-steps; rank 0 begins."""
    micro_steps = iter(range(2 * state.work.env.rank, 1000))
    state.module.register_forward_pre_hook(lambda *_: nap() if next(micro_steps) % 4 < 1 else None)


def in_checkpoints(_: Any) -> None:
    """Delay this rank's checkpoints and nothing else."""
    vars(train_states)["save_checkpoint"] = nap


Measured = tuple[list[dict[str, float]], list[float]]


def train_with_delay(
    env: DistEnv,
    config: Config,
    delay: Callable[[Any], None],
    slow_ranks: tuple[int, ...],
    folder: Path | None = None,
) -> Measured:
    """Train nine steps with a delay on some ranks; return the lines, and the skew by rank."""
    state = build(env, config)
    if env.rank in slow_ranks:
        delay(state)
    trace = run_loop(env, config, max_steps=9, state=state, folder=folder)
    lines = [line for line in trace.lines if "perf/skew_ms" in line]
    return lines, list(state.skew.fields()["skew_ms_by_rank"])


def config_of(world_size: int, *keys: str) -> Config:
    """Return a config of the toy model without evaluations, unless the keys ask for them."""
    return compose_config(
        *(*TOY, "batch.global_size=12", "dataset.num_samples=240", *keys), world_size=world_size
    )


@pytest.mark.parametrize("delay", first_of([in_forward, in_backward, in_data, in_optimizer]))
@pytest.mark.parametrize(("world_size", "every"), first_of([(3, 4), (2, 1)]))
def test_the_late_rank_is_named(delay: Callable[[Any], None], world_size: int, every: int) -> None:
    """Wherever the delay comes, however many ranks wait, and however often a line is logged."""
    config = config_of(world_size, f"train.log_every_steps={every}")
    measured = run_ranks(train_with_delay, world_size, config, delay, (1,))
    lines, by_rank = measured[0]
    assert all(other == by_rank for _, other in measured)
    most = max(lines, key=lambda line: line["perf/skew_ms"])
    assert most["perf/skew_rank"] == 1
    assert most["perf/skew_ms"] > 0.8 * 1000 * NAP_S  # a busy machine may delay the others, too


@pytest.mark.full
def test_the_late_rank_of_a_stream_is_named() -> None:
    """The others already wait for its data, before the step."""
    config = compose_config(
        *("dataset=torch_dataset", "dataset.eval={_target_:own_streams.Plain,size:7}"),
        *("dataset.train={_target_:own_streams.Plain,size:200}", "allowed_targets=[own_streams]"),
        *("model=toy", "model._target_=torch.nn.Linear", "+model.in_features=4"),
        *("+model.out_features=1", "train.step=own_streams.numbered", "optimizer.lr=0.01"),
        *("batch.per_rank=2", "train.log_every_steps=1", "dataset.num_workers=0"),
        world_size=2,
    )
    (lines, by_rank), _ = run_ranks(train_with_delay, 2, config, in_stream, (1,))
    assert by_rank[1] > 0.8 * 1000 * NAP_S
    data_ms = [line["perf/data_ms"] for line in lines]
    assert min(data_ms) < 0.8 * 1000 * NAP_S  # the mean of both: rank 0's own is short


@pytest.mark.full
def test_ranks_that_take_turns_are_both_named() -> None:
    """Their mean times are equal, so only the single steps tell."""
    config = config_of(2, "train.log_every_steps=3", "train.grad_accum_steps=2")
    (_, by_rank), _ = run_ranks(train_with_delay, 2, config, in_turns, (0, 1))
    assert min(by_rank) > 0.5 * 1000 * NAP_S / 2


@pytest.mark.full
def test_a_checkpoint_makes_nobody_late(tmp_path: Path) -> None:
    """Rank 0 alone writes one after each step, for which the others wait in the next step."""
    config = config_of(2, "checkpoint.every_steps=1", "train.log_every_steps=1")
    (lines, _), _ = run_ranks(train_with_delay, 2, config, in_checkpoints, (0,), tmp_path)
    assert len(lines) == 7
    # A busy machine may delay rank 0, but hardly in each step.
    late_ms = [(1 - line["perf/skew_rank"]) * line["perf/skew_ms"] for line in lines]
    assert min(late_ms) < 1000 * NAP_S / 2
    waited_ms = [line["perf/wait_ms"] for line in lines]
    assert max(waited_ms) > 0.5 * 1000 * NAP_S / 2  # the mean of both ranks: rank 1 did wait


@pytest.mark.full
def test_the_skew_has_no_traced_step(tmp_path: Path) -> None:
    """After the trace four steps are left, too few; the line that ends with them has 16 in all."""
    end = run_training(tmp_path, args=("train.profile=3-14", f"train.log_every_steps={NUM_STEPS}"))
    assert (end.exit_code, end.stderr) == (0, "")
    assert record(end.run_dir)["skew_ms_by_rank"] is None
    assert "perf/skew_ms" in [line for line in metrics(end.run_dir) if "train/loss" in line][-1]
