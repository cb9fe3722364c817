"""``train.profile`` names steps of the run; what cannot happen is an error before it starts."""

from dataclasses import replace

import pytest
from configs import config_error, resolved

from ddp_runner.config.identity import config_hash, work_hash
from ddp_runner.config.rules import validate_steps
from ddp_runner.config.training import traced_steps
from ddp_runner.errors import UserError

TOY = ("model=toy", "dataset.num_samples=64", "batch.global_size=8", "world_size=2")


def test_a_number_counts_after_five_steps_of_warm_up() -> None:
    """From where the run starts or resumes, since each start compiles and allocates anew."""
    assert list(traced_steps(3)) == [6, 7, 8]
    assert list(traced_steps(3, done=100)) == [106, 107, 108]


def test_a_range_has_the_steps_of_the_run() -> None:
    """Both ends count, and a resume changes nothing."""
    assert list(traced_steps("20-22", done=7)) == [20, 21, 22]
    assert list(traced_steps("4-4")) == [4]


@pytest.mark.parametrize("asked", [0, -3, True, 2.5, "20-19", "0-3", "5-", "20..25", "5, 6", [5]])
def test_anything_else_is_an_error(asked: object) -> None:
    """The message shows both ways to write it."""
    with pytest.raises(UserError, match=r"write train\.profile=5, or train\.profile=20-25$"):
        traced_steps(asked)


@pytest.mark.parametrize("asked", [101, "1-101"])
def test_a_trace_has_an_end(asked: object) -> None:
    """A hundred steps fit in memory."""
    with pytest.raises(UserError, match="traces 101 steps, and a trace holds 100 at most"):
        traced_steps(asked)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ("train.profile=5", "train.max_steps=9"),
            "train.profile=5 traces steps up to 10, and the run has 9; train longer, or name "
            "earlier steps: train.profile=FIRST-LAST",
        ),
        (
            ("train.profile=20-25", "train.epochs=3"),
            "train.profile=20-25 traces steps up to 25, and the run has 24; train longer, or name "
            "earlier steps: train.profile=FIRST-LAST",
        ),
        (
            ("train.profile=5", "parallelism=ps"),
            "train.profile traces ranks of one loop, not parallelism=ps; write parallelism=ddp",
        ),
    ],
    ids=["number", "range", "server"],
)
def test_a_profile_that_cannot_happen_is_an_error(keys: tuple[str, ...], message: str) -> None:
    """Before anything starts."""
    assert config_error(*TOY, *keys) == message


def test_a_profile_does_not_make_another_run() -> None:
    """So that resume=auto and a sweep find the run that did the same without one."""
    plain, profiled = (resolved(*TOY, *keys)[0] for keys in ((), ("train.profile=5",)))
    assert profiled.train.profile == 5
    assert (config_hash(plain), work_hash(plain)) == (config_hash(profiled), work_hash(profiled))


def test_a_task_that_takes_a_runs_model_may_bring_its_key() -> None:
    """The run may have had more steps than the data that are evaluated; nothing is traced."""
    config, _ = resolved(*TOY, "train.profile=5")
    validate_steps(replace(config, task="evaluate", train=replace(config.train, max_steps=2)))
