"""The training step: the ordinary one, steps of a user's own, and what they count."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from configs import config_error
from own_steps import WORDS, Sentences, Tagger, padded
from ranks import run_ranks
from tiers import first_of
from torch import Tensor, nn
from torch.nn import functional as F
from train_states import TOLERANCES, TOY, build, compose_config, rejection, run_loop, take_steps

from ddp_runner.config.schema import Config
from ddp_runner.data.batches import NumberedBatches
from ddp_runner.data.splits import TensorSplit
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError
from ddp_runner.train.first_batch import try_first_batch, warnings_of
from ddp_runner.train.losses import cross_entropy, mse
from ddp_runner.train.step import supervised

OWN = "allowed_targets=[own_steps]"


def of(name: str, *keys: str) -> tuple[str, ...]:
    """Return the command line of a training step of the tests' own."""
    return (*(keys or TOY), f"train.step=own_steps.{name}", OWN)


class Sum(nn.Module):
    """Add the inputs, whatever their names."""

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Return the sum of all inputs."""
        return torch.stack([*inputs, *named.values()]).sum(dim=0)


@pytest.mark.parametrize(
    ("batch", "targets"),
    [
        ((torch.ones(3, 2), torch.zeros(3, 2)), None),
        ([(torch.ones(3, 2) / 2, torch.ones(3, 2) / 2), torch.zeros(3, 2)], None),
        (({"a": torch.ones(3, 2)}, torch.zeros(3, 2)), None),
        ({"a": torch.ones(3, 2), "goal": torch.zeros(3, 2)}, "goal"),
    ],
    ids=["tensor", "several", "by name", "a mapping"],
)
def test_the_ordinary_step_calls_the_model_with_its_inputs(batch: Any, targets: str | None) -> None:
    """One tensor, several, or by name; the loss is the sum over the samples."""
    step = supervised(Sum(), batch, loss=mse, targets=targets)
    assert (float(step.loss_sum), step.count) == (3.0, 3)
    assert step.outputs.equal(torch.ones(3, 2))
    assert step.targets.equal(torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("batch", "targets", "found"),
    [
        (
            torch.ones(3),
            None,
            "takes a pair (inputs, targets), and the dataset's batches are a Tensor",
        ),
        ((torch.ones(3),) * 3, None, "batches are a tuple of 3"),
        ({"image": torch.ones(3)}, None, "batches are a dict with image; write train.step="),
        ({"image": torch.ones(3)}, "label", "takes a mapping with label"),
        ((torch.ones(3), ["cat"]), None, "the targets of the dataset's batches are (a str)"),
    ],
)
def test_the_ordinary_step_says_what_a_batch_must_be(
    batch: Any, targets: str | None, found: str
) -> None:
    """The line names a batch of another form, and the fix."""
    with pytest.raises(UserError) as raised:
        supervised(Sum(), batch, loss=mse, targets=targets)
    assert found in str(raised.value)


# what is wrong: the step, and what the sentence says of it
INVALID = {
    "mean": ["train.step=own_steps.mean returns a mean over the samples, not a sum"],
    "a_tensor": ["returns a Tensor; return a ddp_runner.StepOutput(loss_sum, count)"],
    "each_sample": ["returns (2,) of float32 as loss_sum; return a tensor without dims"],
    "detached": ["returns a loss_sum that depends on no parameter"],
    "in_training": [
        "depends on no parameter in evaluation mode",
        "between model.train() and model.eval()",
    ],
    "of_elements": ["returns count=10 for 2 samples; write batch.count=tokens"],
    "number_as_scalar": ["returns a float as the scalar one; return a tensor of a single number"],
    "failing": ["train.step=own_steps.failing cannot take dataset=random", "KeyError: 'image'"],
}
KINDS = {"squares": "sum", "random": "sum", "of_pairs": "other"}


def attempts(env: DistEnv) -> dict[str, str]:
    """Try each step; return what is wrong, or what kind it is of."""
    found = {}
    for name in (*INVALID, *KINDS):
        state = build(env, compose_config(*of(name)))
        try:
            trial = try_first_batch(state)
            warned = any("not a sum" in one for one in warnings_of(trial, state))
            assert warned == (trial.kind == "other")
            found[name] = trial.kind
        except UserError as error:
            found[name] = str(error)
    by_tokens = build(env, compose_config(*of("of_one"), "batch.count=tokens"))
    try:
        try_first_batch(by_tokens)
    except UserError as error:
        found["of_one"] = str(error)
    return found


def test_a_step_is_tried_before_training() -> None:
    """A mistake is one sentence; a loss that depends on its batch is a warning."""
    (found,) = run_ranks(attempts, 1)
    for name, parts in INVALID.items():
        assert len(found[name].splitlines()) == 1
        for part in parts:
            assert part in found[name]
    assert {name: found[name] for name in KINDS} == KINDS
    assert "count=1 for 2 samples and 1 for the same samples twice" in found["of_one"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (of("squarse"), "did you mean own_steps.squares?"),
        (
            (*TOY, "train.step=3"),
            "train.step (3) is not a dotted name; write a name such as ddp_runner.train.step",
        ),
        ((*TOY, "train.step={factor:2}"), "must be a dotted name, or a mapping with _target_"),
        ((*TOY, "train.step={_target_:own_steps.squares,faktor:2}", OWN), "train.step.factor?"),
    ],
)
def test_a_wrong_name_of_a_step_is_one_sentence(keys: tuple[str, ...], expected: str) -> None:
    """Where the launcher can see it, before a rank starts."""
    try:
        found = config_error(*keys)
    except AssertionError:  # only a rank imports the user's package
        (found,) = run_ranks(rejection, 1, compose_config(*keys))
    assert expected in found


def lines(env: DistEnv, config: Config) -> list[dict[str, float]]:
    """Run the loop; return its lines."""
    trace = run_loop(env, config, max_steps=None)
    assert (trace.status, trace.error) == ("completed", "")
    return trace.lines


@pytest.mark.parametrize("world_size", [1, 3])
def test_scalars_are_logged_per_sample(world_size: int) -> None:
    """In training and in evaluation; the mean error is the loss itself."""
    config = compose_config(
        *of("squares"),
        "train.epochs=1",
        "train.log_every_steps=1",
        "batch.global_size=9",
        world_size=world_size,
    )
    for found in run_ranks(lines, world_size, config):
        training = [line for line in found if "train/loss" in line]
        evaluation = [line for line in found if "eval/loss" in line]
        assert training
        assert evaluation
        for line in training:
            assert line["train/mean_error"] == pytest.approx(line["train/loss"], rel=1e-5)
            assert line["train/worst"] >= line["train/loss"]
        for line in evaluation:
            assert line["eval/mean_error"] == pytest.approx(line["eval/loss"], rel=1e-5)


def by_names(env: DistEnv, config: Config, names: tuple[str, ...]) -> list[dict[str, float]] | str:
    """Run the loop of a step whose trial has shown these scalars; return its lines or its error."""
    trace = run_loop(env, config, max_steps=4, state=replace(build(env, config), scalars=names))
    return trace.error or [line for line in trace.lines if "train/loss" in line]


def test_ranks_add_up_scalars_by_the_names_that_the_trial_has_shown() -> None:
    """One that a rank's batch lacks counts 0 there; of a new one the other ranks know nothing."""
    config = compose_config(*of("by_sign"), "train.log_every_steps=1", world_size=2)
    of_ranks = run_ranks(by_names, 2, config, ("low", "high"))
    assert any(0 < line["train/low"] < 1 for line in of_ranks[0])
    for found in of_ranks:
        assert [line["train/low"] + line["train/high"] for line in found] == pytest.approx([1] * 4)
    (error,) = run_ranks(by_names, 1, compose_config(*of("by_sign")), ("low",))
    assert "train.step=own_steps.by_sign returned the scalar high for a batch, but not for" in error


def losses(env: DistEnv, config: Config) -> list[float]:
    """Take some steps; return their losses."""
    return take_steps(env, config, 6).losses


def test_a_step_may_be_a_module_with_keywords() -> None:
    """It gets the loss that the model names, and is not trained."""
    keys = (*TOY, OWN)
    doubled = "train.step={_target_:own_steps.Squares,factor:2.0}"
    plain = run_ranks(losses, 1, compose_config(*keys))[0]
    found = run_ranks(losses, 1, compose_config(*keys, doubled, "optimizer.lr=0.025"))[0]
    assert found == pytest.approx([2 * one for one in plain], rel=1e-5)


def by_hand(config: Config, num_steps: int) -> tuple[list[float], Tensor]:
    """Train on whole global batches, divided by their words; return losses and weights."""
    torch.manual_seed(config.seed)
    model, data = Tagger(), Sentences(27)
    optimizer = torch.optim.SGD(model.parameters(), **{
        key: value for key, value in config.optimizer.items() if key not in ("name", "_target_")
    })  # fmt: skip
    numbers = TensorSplit(torch.arange(27), torch.arange(27))
    batches = NumberedBatches(
        split=numbers, global_size=9, grad_accum_steps=1, share=0, num_shares=1, seed=config.seed
    )
    found = []
    for step in range(num_steps):
        indices = batches.step_at(step).micro_batches[0].data[0].tolist()
        words, classes = padded([data[index] for index in indices])
        loss = F.cross_entropy(model(words), classes)  # torch's mean over the words
        optimizer.zero_grad()
        loss.backward()
        if (clip_norm := config.train.clip_norm) is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        found.append(loss.item())
    return found, torch.cat([one.detach().flatten() for one in model.parameters()])


def traced(env: DistEnv, config: Config) -> tuple[list[float], Tensor]:
    """Take some steps; return losses and weights."""
    trace = take_steps(env, config, 6)
    return trace.losses, trace.weights


@pytest.mark.parametrize("clip_norm", first_of([0.05, None]))
@pytest.mark.parametrize(
    ("world_size", "grad_accum_steps", "workers", "step"),
    [(1, 1, 0, "own"), (1, 3, 0, "own"), (3, 1, 0, "own"), (3, 1, 1, "own"), (3, 1, 0, "ordinary")],
)
def test_every_token_weighs_the_same(
    world_size: int, grad_accum_steps: int, workers: int, step: str, clip_norm: float | None
) -> None:
    """However sentences of 1 to 7 words are split over ranks and micro-batches.

    A clipped gradient is that of the mean over the words, not over the sentences.
    """
    ordinary = (
        "train.step=ddp_runner.train.step.supervised",
        "model.loss=ddp_runner.train.losses.cross_entropy",
    )
    config = compose_config(
        *WORDS,
        *(ordinary if step == "ordinary" else ()),
        "batch.global_size=9",
        f"train.grad_accum_steps={grad_accum_steps}",
        f"dataset.num_workers={workers}",
        f"train.clip_norm={'null' if clip_norm is None else clip_norm}",
        world_size=world_size,
    )
    expected, weights = by_hand(config, 6)
    for found, its_weights in run_ranks(traced, world_size, config):
        assert found == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(its_weights, weights, **TOLERANCES[torch.float32])


def test_an_evaluation_divides_by_the_tokens() -> None:
    """The loss and the scalars of all ranks, over the words of all sentences."""
    config = compose_config(
        *WORDS, "batch.global_size=9", "train.epochs=1", "batch.eval_per_rank=2", world_size=3
    )
    first, *others = (found[-1] for found in run_ranks(lines, 3, config))
    assert all(one["eval/loss"] == first["eval/loss"] for one in others)
    assert 0.0 <= first["eval/hits"] <= 1.0
    words = sum(len(Sentences(10)[index][0]) for index in range(10))
    assert first["eval/hits"] * words == pytest.approx(round(first["eval/hits"] * words), abs=1e-6)


@pytest.mark.parametrize("kind", ["module", "function", "named module"])
@pytest.mark.parametrize("count", ["samples", "tokens"])
def test_what_a_loss_ignores_does_not_count(kind: str, count: str) -> None:
    """Whatever its index, such as 255 of a segmentation; the metrics see -100 there."""
    images, masks = torch.randn(2, 1, 3, 3), torch.arange(18).reshape(2, 3, 3) % 4
    masks[0, 0, 0] = masks[1, 2, 2] = 255
    usual = masks.masked_fill(masks == 255, -100)
    settings: dict[str, Any] = {"reduction": "sum", "ignore_index": 255}
    loss: Any = torch.nn.CrossEntropyLoss(**settings)
    if kind == "function":
        loss = partial(torch.nn.functional.cross_entropy, **settings)
    elif kind == "named module":  # a config names an object of the user's
        loss = partial(loss)
    model = torch.nn.Conv2d(1, 4, 1)
    ours = supervised(model, (images, masks), loss=loss, count=count)
    expected = supervised(model, (images, usual), loss=cross_entropy, count=count)
    assert int(ours.count) == int(expected.count) == (2 if count == "samples" else 16)
    assert torch.equal(ours.loss_sum, expected.loss_sum)
    assert torch.equal(ours.targets, usual)


def test_a_class_that_is_none_is_one_line() -> None:
    """Also where it comes later than the first batch, in data that are loaded sample by sample."""
    batch = (torch.zeros(3, 2), torch.tensor([0, 1, 2]))
    with pytest.raises(UserError, match="targets go from 0 to 2; number 2 classes from 0 to"):
        supervised(nn.Linear(2, 2), batch, loss=cross_entropy)
    own = torch.nn.CrossEntropyLoss(reduction="sum", ignore_index=255)
    with pytest.raises(UserError, match="targets go from 0 to 7"):  # 255 is not at fault
        supervised(nn.Linear(2, 2), (torch.zeros(3, 2), torch.tensor([0, 255, 7])), loss=own)
    batch = (torch.zeros(3, dtype=torch.int64) + 9, torch.tensor([0, 1, 0]))
    with pytest.raises(IndexError):  # of the inputs: no fault of the classes
        supervised(nn.Embedding(2, 2), batch, loss=cross_entropy)
