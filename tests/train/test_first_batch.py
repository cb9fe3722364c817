"""Before the first step: mistakes in a model, a loss or the data are one sentence, or a warning."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiers import first_of
from torch import nn
from train_states import MNIST_NET, TOY, build, compose_config, with_work

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.job import Job
from ddp_runner.tracking.run_record import versions
from ddp_runner.train.first_batch import try_first_batch, warnings_of
from ddp_runner.worker import run_task

CONVNET = ("model=convnet", "dataset=fake_images", "dataset.num_samples=40", "batch.per_rank=20")
OURS = "allowed_targets=[broken_models]"


def of(name: str, *keys: str) -> tuple[str, ...]:
    """Return the command line of a model of the tests' own."""
    return (*(keys or TOY), f"model._target_=broken_models.{name}", OURS)


def loss(name: str, *keys: str) -> tuple[str, ...]:
    """Return the command line of a loss."""
    return (*(keys or CONVNET), f"model.loss={name}", OURS)


F = "torch.nn.functional"
# what is wrong: the command line, and what the sentence says of it
INVALID: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "mean": (
        loss(f"{F}.cross_entropy"),
        ["a mean over the samples", "write model.loss=ddp_runner.train.losses.cross_entropy"],
    ),
    "mean of squares": (
        loss(f"{F}.mse_loss", *TOY),
        ["write model.loss=ddp_runner.train.losses.mse"],
    ),
    "mean in bf16": (loss(f"{F}.cross_entropy", *CONVNET, "train.precision=bf16"), ["a mean"]),
    "mean of equal samples": (
        # All logits are zero: each sample's loss is log(10), and so is every mean of them.
        (*of("ZeroLogits", *CONVNET), f"model.loss={F}.cross_entropy"),
        ["a mean over the samples"],
    ),
    "own mean": (loss("broken_models.mean_of_squares", *TOY), ["reduction='sum'"]),
    "a loss for each sample": (
        loss("broken_models.each_square", *TOY),
        ["returns (2,) of float32, not a single number"],
    ),
    "not a tensor": (loss("broken_models.a_float", *TOY), ["returns a float, not a single number"]),
    "constant": (
        loss("broken_models.constant", *TOY),
        ["model.loss=broken_models.constant returns a number that depends on no output of model="],
    ),
    "too few outputs": (
        of("SevenOutputs", *CONVNET),
        ["returns (2, 7) for 2 samples of dataset=fake_images with 10 classes"],
    ),
    "outputs in a dict": (of("DictOutputs"), ["model=toy returns a dict of logits, not a tensor"]),
    "foreign inputs": (
        ("model=toy", "dataset=fake_images"),
        ["model=toy cannot take dataset=fake_images", "(2, 1, 28, 28) of uint8: RuntimeError: "],
    ),
    "foreign targets": (
        loss("ddp_runner.train.losses.cross_entropy", *TOY, "dataset.target_size=3"),
        ["the outputs of model=toy, (2, 5) of float32, with the targets of dataset=random"],
    ),
    "loss with its own words": (
        (*TOY, "dataset.target_size=3"),
        ["mse needs outputs and targets of the same shape"],
    ),
    "an error in the model": (of("Cursed"), ["KeyError: 'no such layer'"]),
    "nothing to train": (
        (*TOY, "model._target_=torch.nn.Identity"),
        ["model=toy has no parameter that requires a gradient", "unfreeze some"],
    ),
    "a partial": (
        (*TOY, "+model._partial_=true"),
        ["builds an object of type partial, not Module; leave out its _partial_"],
    ),
    "another thing for a dataset": (
        (*TOY, "dataset._target_=torch.nn.Identity"),
        [
            "dataset=random (torch.nn.Identity)",
            "Identity, not Source or TensorSource; name another",
        ],
    ),
    "another thing for a mode": (
        (*TOY, "parallelism._target_=torch.nn.Identity"),
        ["parallelism=ddp (torch.nn.Identity) builds an object of type Identity, not Mode"],
    ),
    "another thing for an optimizer": (
        (*TOY, "optimizer._target_=torch.nn.Identity"),
        ["(torch.nn.Identity) builds an object of type Identity, not Optimizer; name another"],
    ),
    "another thing for a scheduler": (
        (*TOY, "scheduler._target_=torch.nn.Identity"),
        ["scheduler=constant (torch.nn.Identity) builds an object of type Identity, not Scheduler"],
    ),
}
# Each is accepted, and reported as a sum or as neither.
TAKEN: dict[str, tuple[tuple[str, ...], str]] = {
    "ours": (CONVNET, "sum"),
    "dropout": (MNIST_NET, "sum"),
    "bf16": ((*CONVNET, "train.precision=bf16"), "sum"),
    "more outputs than classes": ((*CONVNET, "model.num_classes=1000"), "sum"),
    "zero": (loss("broken_models.zero", *TOY), "sum"),
    "of the worst sample": (loss("broken_models.worst_square", *TOY), "other"),
    "of pairs": (loss("broken_models.of_pairs", *TOY), "other"),
    "one sample": ((*TOY, "dataset.num_samples=1"), "sum"),
}


def attempts(env: DistEnv) -> dict[str, str]:
    """Try the first batch of each row; return the rejection, or what kind the loss is of."""
    found = {}
    rows = {name: keys for name, (keys, _) in (INVALID | TAKEN).items()}
    for name, keys in rows.items():
        config = compose_config(*keys)
        try:
            state = build(env, config)
            trial = try_first_batch(state)
            warnings = " ".join(warnings_of(trial, state))
            assert ("not a sum" in warnings) == (trial.kind == "other")
            found[name] = trial.kind
        except UserError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """Return what each row came to."""
    (found,) = run_ranks(attempts, 1, timeout_s=240)
    answers: dict[str, str] = found
    return answers


@pytest.mark.parametrize("name", INVALID)
def test_a_mistake_is_one_sentence(name: str, answers: dict[str, str]) -> None:
    """It names the keys, the shapes and the exception."""
    assert len(answers[name].splitlines()) == 1
    for part in INVALID[name][1]:
        assert part in answers[name]


@pytest.mark.parametrize("name", TAKEN)
def test_what_can_be_trained_is_taken(name: str, answers: dict[str, str]) -> None:
    """A loss that is neither sum nor mean is warned of."""
    assert answers[name] == TAKEN[name][1]


def draw_and_count(module: nn.Module, _: object) -> None:
    """Draw from each generator, and count in a buffer that is assigned anew."""
    assert random.random() + np.random.rand() >= 0
    module.seen = module.get_buffer("seen") + 1


def modes_of(module: nn.Module) -> list[bool]:
    """Return whether each part trains."""
    return [part.training for part in module.modules()]


def traces(env: DistEnv) -> dict[str, bool]:
    """Compare buffers, gradients and the mode before and after."""
    found = {}
    for keys in (CONVNET, MNIST_NET, of("Counting"), of("Dropping"), of("Averaging")):
        config = compose_config(*keys)
        state = build(env, config)
        state.module.register_buffer("seen", torch.zeros(1))
        state.module.register_forward_pre_hook(draw_and_count)
        state.module.train()
        [*state.module.modules()][-1].eval()  # a frozen part
        modes = modes_of(state.module)
        before = {name: one.clone() for name, one in state.module.state_dict().items()}
        try_first_batch(state)
        after = state.module.state_dict()
        found[" ".join(keys)] = (
            all(torch.equal(before[name], after[name]) for name in before)
            and all(one.grad is None for one in state.module.parameters())
            and modes == modes_of(state.module)
        )
    return found


def test_the_trial_leaves_no_trace() -> None:
    """BatchNorm's statistics and buffers that are assigned are as if it had not been."""
    (found,) = run_ranks(traces, 1, timeout_s=240)
    assert found == dict.fromkeys(found, True)


def whole_run(env: DistEnv, config: Config, run_dir: Path) -> str:
    """Run as a worker does; return the rejection, if it is rejected."""
    # The ranks meet by a file of this run's own.
    launch = replace(config.launch, init_method=(run_dir.parent / f"{run_dir.name}.store").as_uri())
    config = replace(config, launch=launch)
    job = Job(
        config=config, started_at=time.time(), provenance={"versions": versions()}, run_dir=run_dir
    )
    try:
        return str(run_task(job, replace(env, launcher="environment")).status)
    except UserError as error:
        return str(error)


def test_all_ranks_of_a_run_reject_alike(tmp_path: Path) -> None:
    """Before the first step; the log has the traceback behind the sentence."""
    config = compose_config(*of("Cursed"), world_size=2)
    first, second = run_ranks(whole_run, 2, config, tmp_path / "run", backend=None, timeout_s=240)
    assert first == second
    assert first.startswith("model=toy cannot take dataset=random")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    for rank in (0, 1):
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert "in forward" in log
        assert "KeyError: 'no such layer'" in log


def rejected(env: DistEnv, config: Config) -> str:
    """Return why the trial rejects a run."""
    try:
        try_first_batch(build(env, config))
    except UserError as error:
        return str(error)
    return ""


def rejection(env: DistEnv, config: Config) -> str:
    """Return the type of what the trial raises."""
    try:
        try_first_batch(build(env, config))
    except Exception as error:
        return type(error).__name__
    return ""


def test_a_peer_that_is_lost_in_the_trial_is_no_fault_of_the_model() -> None:
    """The launcher then names the rank that ended, or restarts the group."""
    assert run_ranks(rejection, 1, compose_config(*of("Bereft"))) == ["RuntimeError"]
    assert run_ranks(rejection, 1, compose_config(*of("Cursed"))) == ["UserError"]


@pytest.mark.parametrize("at_random", first_of(["true", "false"]))
def test_a_layer_that_only_some_batches_use_is_named_where_ranks_gather_it(at_random: str) -> None:
    """Else a rank waits for one that leaves it out, until the timeout."""
    keys = (*of("Choosing"), f"+model.at_random={at_random}")
    for found in run_ranks(rejected, 2, compose_config(*keys, "parallelism=fsdp", world_size=2)):
        assert found.startswith("model=toy uses extra for some samples only, and parallelism=fsdp ")
    assert run_ranks(rejected, 1, compose_config(*keys, "parallelism=single")) == [""]


def test_a_model_without_gradients_is_told_so(tmp_path: Path) -> None:
    """In place of what autograd says of an element 0."""
    config = compose_config(*of("Detached"), world_size=2)
    for message in run_ranks(whole_run, 2, config, tmp_path / "run", backend=None, timeout_s=240):
        assert message.startswith("the loss of a batch depends on no parameter of the model; ")


def test_unused_parameters_are_named(tmp_path: Path) -> None:
    """In place of the numbers that DDP gives, and with the whole key that helps."""
    config = compose_config(*of("Idle"), world_size=2)
    for message in run_ranks(whole_run, 2, config, tmp_path / "run", backend=None, timeout_s=240):
        assert message.startswith("the loss does not depend on idle.weight, idle.bias, ")
        assert "write parallelism.find_unused_parameters=true" in message
    config = compose_config(*of("Idle"), "parallelism.find_unused_parameters=true", world_size=2)
    assert (
        run_ranks(whole_run, 2, config, tmp_path / "b", backend=None, timeout_s=240)
        == ["completed"] * 2
    )


def test_a_batch_larger_than_the_training_set_and_a_diverged_loss_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As warnings: at the start and among the last words of a run that completes."""
    keys = ("model=toy", "batch.global_size=1000", "optimizer.lr=1e5", "train.max_steps=2")
    config = compose_config(*keys)
    assert run_ranks(whole_run, 1, config, tmp_path / "run", backend=None, timeout_s=240) == [
        "completed"
    ]
    message = capfd.readouterr().out
    size = "batch.global_size (1000) is larger than the training set: 1 step an epoch of 200 "
    assert f"warning: {size}samples" in message
    assert "warning: the run diverged: train/loss began at 1." in message
    assert json.loads((tmp_path / "run" / "run.json").read_text())["warnings"] == [f"{size}samples"]
    calm = compose_config("model=toy", "train.max_steps=2")
    assert run_ranks(whole_run, 1, calm, tmp_path / "calm", backend=None, timeout_s=240) == [
        "completed"
    ]
    assert "warning" not in capfd.readouterr().out


def unscaled(env: DistEnv, config: Config) -> str:
    """Return how a trial answers whose dataset leaves pixels as they are."""
    state = build(env, config)
    dataset = replace(state.work.dataset, mean=None)
    try:
        try_first_batch(with_work(state, dataset=dataset))
    except UserError as error:
        return str(error)
    return ""


def test_pixels_that_nothing_scales_are_told() -> None:
    """Torch says only that an input is not of the weights' type."""
    (sentence,) = run_ranks(unscaled, 1, compose_config(*CONVNET))
    assert sentence.endswith(
        "; scale pixels by dataset.mean=0 dataset.std=1, or choose a dataset or a model that fits"
    )
