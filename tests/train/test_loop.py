"""The loop learns, accumulates, clips, evaluates and stops as its config says."""

import json
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from orders import steps_of
from ranks import run_ranks
from tiers import first_of
from torch import Tensor
from train_states import (
    MNIST_NET,
    NO_DROPOUT,
    STEPS_PER_EPOCH,
    TOLERANCES,
    TOY,
    Trace,
    build,
    compose_config,
    evaluated,
    flat_weights,
    loss_of,
    run_loop,
    take_steps,
    with_loss,
)

from ddp_runner.config.schema import Config
from ddp_runner.data.splits import TensorSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.job import Job
from ddp_runner.tracking.run_record import versions
from ddp_runner.train.loop import take_step
from ddp_runner.train.schedules import cosine
from ddp_runner.train.state import forward
from ddp_runner.train.step_metrics import reduce_step_metrics
from ddp_runner.worker import run_task

EACH_STEP = "train.log_every_steps=1"


def loop(env: DistEnv, config: Config, max_steps: int) -> Trace:
    """Run the training loop of a fresh state."""
    return run_loop(env, config, max_steps=max_steps)


def test_loss_falls_and_accuracy_rises() -> None:
    """Two ranks learn the patterns of ten classes within a few epochs."""
    keys = ("model=convnet", "dataset=fake_images", "dataset.num_samples=200", EACH_STEP)
    config = compose_config(*keys, "batch.per_rank=10", "optimizer.lr=0.05", world_size=2)
    for trace in run_ranks(loop, 2, config, 30):
        assert trace.status == "completed"
        assert trace.losses[-1] < 0.5 * trace.losses[0]
        accuracies = [line["eval/accuracy"] for line in trace.lines if "eval/accuracy" in line]
        assert len(accuracies) == trace.num_evaluations == 3  # one an epoch
        assert accuracies[-1] > 0.9


def test_accumulating_one_of_eight_equals_two_of_four() -> None:
    """However a batch is cut into micro-batches, the step is the same."""
    expected, *others = (
        run_ranks(
            take_steps,
            1,
            compose_config(*TOY, "parallelism=single", f"train.grad_accum_steps={parts}"),
            STEPS_PER_EPOCH,
        )[0]
        for parts in (1, 2, 8)
    )
    for found in others:
        torch.testing.assert_close(found.losses, expected.losses, **TOLERANCES[torch.float32])
        torch.testing.assert_close(found.weights, expected.weights, **TOLERANCES[torch.float32])


def skipped_syncs(env: DistEnv, config: Config) -> int:
    """Take a step; return how often its mode was asked not to reduce the gradients."""
    state = build(env, config)
    kind = type(state.work.mode)
    with patch.object(kind, "no_sync", autospec=True, side_effect=kind.no_sync) as no_sync:
        take_step(state, next(steps_of(state.batches)))
    return int(no_sync.call_count)


@pytest.mark.parametrize("parts", [1, 4])
def test_only_the_last_micro_batch_is_reduced(parts: int) -> None:
    """The sum would be the same, and cost as many exchanges."""
    keys = ("parallelism=single", f"train.grad_accum_steps={parts}")
    assert run_ranks(skipped_syncs, 1, compose_config(*TOY, *keys)) == [parts - 1]


def first_update(env: DistEnv, config: Config, scale: float | None = None) -> Tensor:
    """Return by how much the first step changes the weights; `scale` is that of the loss."""
    state = build(env, config)
    if scale is not None:
        state = replace(state, scaler=torch.amp.GradScaler("cpu", init_scale=scale))
    before = flat_weights(state.module)
    take_step(state, next(steps_of(state.batches)))
    return flat_weights(state.module) - before


def test_clipping_scales_the_whole_gradient_to_the_norm() -> None:
    """It is the reduced, accumulated gradient that is clipped, and only if it is longer."""

    def update(*keys: str) -> Tensor:
        config = compose_config(*TOY, "optimizer.lr=1.0", *keys, world_size=2)
        found, other = run_ranks(first_update, 2, config)
        assert torch.equal(found, other)
        return found

    free = update("train.grad_accum_steps=2")
    assert free.norm() > 0.2
    clipped = update("train.grad_accum_steps=2", "train.clip_norm=0.01")
    torch.testing.assert_close(clipped, free * (0.01 / free.norm()), rtol=1e-3, atol=1e-6)
    assert torch.equal(update("train.grad_accum_steps=2", "train.clip_norm=1e6"), free)


def test_clipping_uses_the_unscaled_gradient() -> None:
    """Else fp16 would clip what is a thousand times as long, and leave next to nothing."""
    config = compose_config(*TOY, "optimizer.lr=1.0", "train.clip_norm=0.01")
    (expected,) = run_ranks(first_update, 1, config)
    (scaled,) = run_ranks(first_update, 1, config, 1024.0)
    torch.testing.assert_close(scaled, expected)


def test_bf16_stays_near_fp32() -> None:
    """It computes in bf16, which the losses show, while the weights stay in fp32."""
    keys = (*MNIST_NET, *NO_DROPOUT)
    traces = {}
    for precision in ("fp32", "bf16"):
        config = compose_config(*keys, f"train.precision={precision}", world_size=2)
        traces[precision] = run_ranks(take_steps, 2, config, STEPS_PER_EPOCH)[0]
    exact, found = traces["fp32"], traces["bf16"]
    assert found.losses != exact.losses
    assert found.weights.dtype == torch.float32
    torch.testing.assert_close(found.losses, exact.losses, rtol=0.02, atol=0)


def evaluation(env: DistEnv, config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """Return what evaluate says, and the same figures of the whole set as one batch."""
    state = build(env, config)
    found, confusion = evaluated(state)
    classes = state.work.dataset.num_classes
    assert [len(row) for row in confusion or []] == [classes] * (classes or 0)
    state.module.eval()
    with torch.no_grad():
        data = state.work.dataset.eval
        outputs = state.module(state.work.dataset.normalize(data.inputs))
        expected = {"eval/loss": float(loss_of(state)(outputs, data.targets)) / len(data)}
        if classes is not None:
            from sklearn.metrics import accuracy_score, precision_recall_fscore_support

            predicted = outputs.argmax(dim=1)
            expected["eval/accuracy"] = accuracy_score(data.targets, predicted)
            scores = precision_recall_fscore_support(
                data.targets, predicted, average="macro", zero_division=0, labels=range(classes)
            )
            names = ("eval/precision", "eval/recall", "eval/f1")
            expected |= dict(zip(names, scores[:3], strict=True))
    return found, expected


@pytest.mark.parametrize("world_size", first_of([3, 1, 2]))
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(
            ("model=mnist_net", "dataset=fake_images", "dataset.eval_samples=37"),
            marks=pytest.mark.full,
        ),
        ("model=toy", "dataset.eval_samples=2"),
        pytest.param(
            (
                "model=mnist_net",
                "dataset=fake_images",
                "dataset.eval_samples=37",
                "model.num_classes=1000",
            ),
            marks=pytest.mark.full,
        ),
    ],
    ids=["37 images", "fewer samples than ranks", "more outputs than classes"],
)
def test_evaluation_counts_each_sample_once(keys: tuple[str, ...], world_size: int) -> None:
    """At every world size the figures are those of the whole set, without dropout."""
    config = compose_config(*keys, "batch.per_rank=5", world_size=world_size)
    for found, expected in run_ranks(evaluation, world_size, config):
        assert found == pytest.approx(expected, rel=1e-5)


def multiplied(env: DistEnv, config: Config) -> torch.dtype:
    """Return the dtype of a loss that multiplies the outputs by a matrix in float32."""
    state = build(env, config)
    state = with_loss(state, lambda outputs, _: (outputs @ torch.eye(5)).diagonal())
    batch = next(steps_of(state.batches)).micro_batches[0]
    return forward(state.work, state.model, batch).loss_sum.dtype


def test_a_loss_may_compute_as_the_model_does() -> None:
    """Outside autocast torch would reject to multiply outputs in bf16 by anything in float32."""
    config = compose_config(*TOY, "train.precision=bf16")
    assert run_ranks(multiplied, 1, config) == [torch.bfloat16]


def evaluated_loss(env: DistEnv, config: Config, losses: list[float]) -> float:
    """Return the mean loss of an evaluation whose batches have these losses."""
    state, of_batches = build(env, config), iter(losses)
    state = with_loss(state, lambda *_: torch.tensor(next(of_batches)))
    return evaluated(state)[0]["eval/loss"]


def test_the_losses_of_an_evaluation_are_added_in_float64() -> None:
    """In float32 a large sum stands still: 2**24 + 1 is 2**24."""
    config = compose_config(*TOY, "dataset.eval_samples=2", "batch.eval_per_rank=1")
    assert run_ranks(evaluated_loss, 1, config, [2.0**24, 1.0]) == [(2**24 + 1) / 2]


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_samples", "grad_accum_steps", "world_size"),
    first_of([(33, 1, 2), (33, 1, 1), (44, 8, 1)]),
)
def test_batchnorm_trains_on_what_an_epoch_leaves_over(
    num_samples: int, grad_accum_steps: int, world_size: int
) -> None:
    """One sample of 33 in batches of 32, and none for the other rank; 12 of 44."""
    config = compose_config(
        "model=resnet18",
        "dataset=fake_images",
        f"dataset.num_samples={num_samples}",
        "batch.global_size=32",
        f"train.grad_accum_steps={grad_accum_steps}",
        "dataset.eval_samples=4",
        "train.eval_every_epochs=0",
        world_size=world_size,
    )
    for trace in run_ranks(loop, world_size, config, 2):
        assert (trace.status, trace.error) == ("completed", "")


def overflowing(env: DistEnv, config: Config) -> tuple[int, int]:
    """Take steps whose scaled gradients overflow at first; return updates and schedule steps."""
    state = build(env, config)
    large = loss_of(state)
    state = with_loss(state, lambda *both: 2.0**20 * large(*both))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-30)
    state, updates = replace(state, scaler=scaler), 0
    for batch in steps_of(state.batches):
        before = flat_weights(state.module)
        take_step(state, batch)
        updates += not torch.equal(before, flat_weights(state.module))
    return updates, state.schedule.scheduler.last_epoch


@pytest.mark.parametrize("keys", [(), ("optimizer=adamw", "+optimizer.fused=true")])
def test_the_schedule_waits_for_steps_that_the_scaler_skipped(keys: tuple[str, ...]) -> None:
    """A step that overflowed changes no weight, and none of the warm-up is used up by it.

    Torch calls the step of a fused optimizer in any case.
    """
    config = compose_config(*TOY, *keys, "scheduler=cosine", "scheduler.warmup_steps=2")
    ((updates, scheduled),) = run_ranks(overflowing, 1, config)
    assert 0 < updates < STEPS_PER_EPOCH
    assert scheduled == updates


def test_a_large_seed_draws_augmentation() -> None:
    """Any seed that torch takes."""
    keys = ("model=mnist_net", "dataset=fake_images", "dataset.num_samples=20", "seed=4294967296")
    config = compose_config(*keys, "dataset.augmentation.horizontal_flip=true")
    assert run_ranks(loop, 1, config, 1)[0].status == "completed"


def diverge(env: DistEnv, config: Config, broken_sample: int | None) -> Trace:
    """Train on a sample that is no number, which one rank alone meets."""
    state = build(env, config)
    if broken_sample is not None:
        inputs = state.work.dataset.train.inputs.clone()
        inputs[broken_sample] = torch.nan
        split = TensorSplit(inputs, state.work.dataset.train.targets)
        state = replace(state, batches=replace(state.batches, split=split))
    return run_loop(env, config, max_steps=4 * STEPS_PER_EPOCH, state=state)


@pytest.mark.parametrize(
    ("keys", "broken_sample", "message"),
    [
        ((EACH_STEP, "optimizer.lr=1e20"), None, "UserError: train/loss became inf by step 2;"),
        ((EACH_STEP,), 5, "UserError: train/loss became nan by step "),
        (("train.log_every_steps=1000", "train.eval_every_epochs=0"), 5, "UserError: parameter "),
    ],
    ids=["rate too high", "bad sample", "bad sample, noticed only at the save"],
)
def test_broken_loss_stops_all_ranks_at_the_same_step(
    keys: tuple[str, ...], broken_sample: int | None, message: str
) -> None:
    """Every rank raises the one-line error, and nothing broken is ever saved."""
    config = compose_config(*TOY, "checkpoint.every_epochs=1", *keys, world_size=2)
    first, second = run_ranks(diverge, 2, config, broken_sample)
    assert first.error.startswith(message)
    assert "optimizer.lr" in first.error
    assert (first.error, first.progress) == (second.error, second.progress)
    assert first.progress.step <= STEPS_PER_EPOCH
    assert first.saved_steps == second.saved_steps == []


def test_same_seed_gives_the_same_bits() -> None:
    """Two runs with dropout and momentum agree in every bit; another seed gives another run."""
    keys = (*MNIST_NET, "train.deterministic=true")
    runs = [
        run_ranks(take_steps, 2, compose_config(*keys, f"seed={seed}", world_size=2), 3)[0]
        for seed in (7, 7, 8)
    ]
    assert runs[0].losses == runs[1].losses
    assert torch.equal(runs[0].weights, runs[1].weights)
    assert runs[0].losses != runs[2].losses


def test_logged_rate_is_the_one_the_step_was_taken_with() -> None:
    """A schedule moves each optimizer step, and the line of a step has that step's rate."""
    num_steps = 2 * STEPS_PER_EPOCH
    keys = (*TOY, "scheduler=cosine", "scheduler.warmup_steps=2", f"train.max_steps={num_steps}")
    config = compose_config(*keys, EACH_STEP, world_size=2)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.optimizer["lr"])
    schedule = cosine(optimizer, total_steps=num_steps, warmup_steps=2)
    expected = []
    for _ in range(num_steps):
        expected += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    lines = run_ranks(loop, 2, config, num_steps)[0].lines
    assert [line["train/lr"] for line in lines if "train/lr" in line] == pytest.approx(expected)


def first_losses(env: DistEnv, config: Config) -> tuple[list[float], list[float]]:
    """Return the first loss that a run of two epochs logged, and each step's loss."""
    with patch.object(Trace, "first_loss", autospec=True) as began:
        trace = run_loop(env, config, max_steps=2 * STEPS_PER_EPOCH)
    return [call.args[1] for call in began.call_args_list], trace.losses


def test_a_run_begins_once_with_the_loss_over_all_ranks() -> None:
    """The last loss is compared with it: one of a later epoch would hide that the run diverged."""
    for began, losses in run_ranks(first_losses, 2, compose_config(*TOY, EACH_STEP, world_size=2)):
        assert began == losses[:1]


def whole_run(env: DistEnv, config: Config, run_dir: Path) -> str:
    """Run as a worker does, and return how it ended."""
    job = Job(
        config=config, started_at=time.time(), provenance={"versions": versions()}, run_dir=run_dir
    )
    # It meets the others at init_method, as under a plain launcher.
    status: str = run_task(job, replace(env, launcher="environment")).status
    return status


@pytest.mark.parametrize(("max_steps", "epochs"), [(5, 3), (9, 1)])
def test_max_steps_overrides_epochs(tmp_path: Path, max_steps: int, epochs: int) -> None:
    """A run takes exactly max_steps steps, be they fewer or more than its epochs have."""
    store = f"launch.init_method='{(tmp_path / 'store').as_uri()}'"
    keys = (*TOY, f"train.max_steps={max_steps}", f"train.epochs={epochs}", EACH_STEP, store)
    config = compose_config(*keys, world_size=2)
    assert run_ranks(whole_run, 2, config, tmp_path / "run", backend=None) == ["completed"] * 2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line["step"] for line in map(json.loads, lines) if "train/loss" in line]
    assert steps == list(range(1, max_steps + 1))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["step"] == max_steps


@pytest.mark.parametrize(
    ("monitor", "has_loss"), [("train/loss", [2, 4, 6, 8, 9]), ("eval/loss", [6, 9])]
)
def test_each_checkpoint_has_the_metric_of_training_that_judges_it(
    monitor: str, has_loss: list[int]
) -> None:
    """Whatever the steps that are logged: else it could never be the best."""
    keys = (f"checkpoint.monitor={monitor}", "checkpoint.mode=min", "checkpoint.every_steps=2")
    config = compose_config(*TOY, *keys, "train.log_every_steps=6", "checkpoint.every_epochs=3")
    (trace,) = run_ranks(loop, 1, config, 9)
    assert trace.saved_steps == [2, 4, 6, 8, 9]
    assert [step for step in trace.saved_steps if "train/loss" in trace.saved[step]] == has_loss


def clipped_gradients(env: DistEnv, config: Config) -> tuple[Tensor, float]:
    """Return the gradients of the first step, and the norm that is logged of them."""
    state = build(env, config)
    sums = take_step(state, next(steps_of(state.batches)))
    gradients = [one.grad for one in state.module.parameters() if one.grad is not None]
    state.timer.add(samples=8)
    norm = reduce_step_metrics(state, sums, lr=0.0)["train/grad_norm"]
    return torch.cat([one.flatten() for one in gradients]), norm


def test_clipping_by_value_limits_each_gradient() -> None:
    """The logged norm is the one before it, as with clip_norm."""
    ((free, norm),) = run_ranks(clipped_gradients, 1, compose_config(*TOY))
    limit = float(free.abs().max()) / 4
    config = compose_config(*TOY, f"train.clip_value={limit!r}")
    ((clipped, same_norm),) = run_ranks(clipped_gradients, 1, config)
    assert torch.equal(clipped, free.clamp(-limit, limit))
    assert norm == same_norm == pytest.approx(float(free.norm()))
