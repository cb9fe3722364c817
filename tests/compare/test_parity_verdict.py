"""The verdict separates rounding that training amplifies from steps that differ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_runs import SINGLE, lines_of, write_run

from ddp_runner.compare.analysis import compare
from ddp_runner.compare.formats import as_text
from ddp_runner.compare.parity import Parity
from ddp_runner.compare.run_reader import read_runs

NUM_STEPS = 60
LOSSES = [2.3 / (1 + step / 20) for step in range(NUM_STEPS)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, which is faster for small tensors, most of all on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def verdict(
    folder: Path,
    ours: Sequence[float],
    *,
    theirs: Sequence[float] = LOSSES,
    every: int = 1,
    precision: str = "fp32",
    record: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
) -> Parity:
    """Compare two runs that log every n-th loss.

    `record` is for run.json of the second, `reference` for that of the first.
    """
    two = {"world_size": 2, "batch.per_rank": 32}
    for name, losses, keys in (("single", theirs, SINGLE), ("ddp", ours, two)):
        lines = lines_of([1.0] * len(losses), losses=losses)
        for index, line in enumerate(lines):
            line["step"] = index + 1
        write_run(
            folder / name,
            config={**keys, "train.precision": precision},
            lines=lines[every - 1 :: every],
            record=record if name == "ddp" else reference,
        )
    (parity,) = compare(read_runs([folder])).parity
    return parity


def test_equal_weights_are_equal_bytes(tmp_path: Path) -> None:
    """Before any tolerance. A run that has not ended has no hash, and equals no other."""
    same, other = {"weights_sha256": "a" * 64}, {"weights_sha256": "b" * 64}
    equal = verdict(tmp_path / "equal", LOSSES, record=same, reference=same)
    assert (equal.verdict, equal.first_break) == ("equal bytes", None)
    text = as_text(compare(read_runs([tmp_path / "equal"])))
    assert "equal bit for bit, by their SHA-256" in text
    assert "what breaks loss parity" not in text
    assert "2 runs, aaaaaaaaaaaa (single, 1 rank; ddp, 2 ranks)" in text
    assert verdict(tmp_path / "other", LOSSES, record=other, reference=same).verdict == "ok"
    assert verdict(tmp_path / "none", LOSSES).verdict == "ok"


def changed(difference: Callable[[int], float]) -> list[float]:
    """Return LOSSES with a relative difference, a function of the step from 1 on."""
    return [loss * (1 - difference(step)) for step, loss in enumerate(LOSSES, start=1)]


def grown(step: int) -> float:
    """Return a difference that grows from 1e-7 to 1.1% with ups and downs, as real ones do."""
    return min(0.011, 1e-7 * 1.3**step * (0.1 if step % 3 else 1.0))


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (lambda _: 0.0, "ok"),
        (lambda _: 5e-4, "ok"),
        (grown, "ok, rounding grows to 1.1%"),
        (lambda step: 1e-7 if step < 12 else 0.2, "breaks at step {12}"),
        (lambda step: grown(step) if step < 25 else 0.3, "breaks at step {25}"),
        (lambda step: 1e-7 if step < 31 else float("nan"), "breaks at step {31}"),
    ],
)
def test_a_difference_is_judged_by_its_start_and_its_growth(
    tmp_path: Path, difference: Callable[[int], float], words: str, every: int
) -> None:
    """It stays small, grows slowly, or appears at once, as with another order in epoch 2."""
    parity = verdict(tmp_path, changed(difference), every=every)
    expected = words
    if "{" in words:
        before, _, number = words.strip("}").partition("{")
        first_line = -(-int(number) // every) * every
        expected = f"{before}{first_line}"
        assert parity.first_break == first_line
    assert parity.verdict == expected


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize(
    "difference",
    [
        lambda _: 2e-3,  # from step 1 on: dropout, BatchNorm, other weights or data
        lambda step: 5e-4 * step,  # from step 2 on: a learning rate 1% too large
        lambda step: 0.0 if step == 1 else 0.1,  # from step 2 on: gradients without their mean
    ],
)
def test_a_difference_from_the_first_step_on_is_a_break(
    tmp_path: Path, difference: Callable[[int], float], every: int
) -> None:
    """Even if the difference is small at first."""
    parity = verdict(tmp_path, changed(difference), every=every)
    assert parity.first_break in (every, 2)
    if parity.first_break == every:
        assert parity.verdict == f"differs from the first line on (step {every})"


def test_lines_that_are_far_apart_count_as_ten_steps(tmp_path: Path) -> None:
    """Otherwise any difference could have grown from one line to the next."""
    parity = verdict(tmp_path, changed(lambda _: 0.02), every=30)
    assert parity.verdict == "differs from the first line on (step 30)"


def test_thousands_of_steps_do_not_overflow(tmp_path: Path) -> None:
    """The bound of the growth stays within the range of a float."""
    losses = [1.0 - (1e-5 if step < 2000 else 0.011) for step in range(1, 3001)]
    parity = verdict(tmp_path, losses, theirs=[1.0] * 3000, every=1000)
    assert parity.verdict == "ok, rounding grows to 1.1%"


def test_half_precisions_may_differ_more(tmp_path: Path) -> None:
    """A difference that is a break in float32 is rounding in bfloat16."""
    losses = changed(lambda step: 2e-3 * 1.05**step)
    assert verdict(tmp_path / "fp32", losses).first_break == 1
    assert verdict(tmp_path / "bf16", losses, precision="bf16").first_break is None


def test_products_of_fewer_digits_may_differ_more(tmp_path: Path) -> None:
    """They ran on the same device."""
    losses = changed(lambda step: min(0.011, 7e-5 * 1.3**step))
    assert verdict(tmp_path / "fp32", losses).first_break == 1
    tf32 = verdict(tmp_path / "tf32", losses, precision="tf32")
    assert tf32.verdict == "ok, rounding grows to 1.1%"


def test_a_parallel_job_takes_the_same_steps(tmp_path: Path) -> None:
    """Other jobs on its machine cost time and change no loss."""
    assert verdict(tmp_path, LOSSES, record={"parallel_jobs": True}).verdict == "ok"


def test_how_often_a_run_saves_changes_no_step(tmp_path: Path) -> None:
    """A run that was resumed has more checkpoints than the one that it is compared with."""
    two = {"world_size": 2, "batch.per_rank": 32, "checkpoint.every_steps": 5}
    for name, keys in (("single", SINGLE), ("ddp", two | {"checkpoint.format": "sharded"})):
        write_run(tmp_path / name, config=keys, lines=lines_of([1.0] * NUM_STEPS, losses=LOSSES))
    assert [one.verdict for one in compare(read_runs([tmp_path])).parity] == ["ok"]


@pytest.mark.parametrize(("ours", "theirs"), [(1.0, 2.0), (2.0, 1.0), (0.0, 0.5), (-1.0, -0.5)])
def test_a_difference_is_relative_to_the_larger_loss(
    tmp_path: Path, ours: float, theirs: float
) -> None:
    """Whichever run is the reference."""
    parity = verdict(tmp_path, [ours, 0.0], theirs=[theirs, 0.0])
    assert parity.largest == (1.0 if ours == 0 else 0.5)
    assert parity.num_steps == 2


def test_the_reference_is_the_simplest_mode_on_the_fewest_ranks(tmp_path: Path) -> None:
    """It is a mode without communication, not the first mode in the alphabet."""
    two = {"world_size": 2, "batch.per_rank": 32}
    for name, config in {"ddp": {}, "single": SINGLE, "ddp_2": two}.items():
        write_run(tmp_path / name, config=config, lines=lines_of([1.0] * 3))
    parities = compare(read_runs([tmp_path])).parity
    assert {parity.run.folder.name for parity in parities} == {"ddp", "ddp_2"}
    assert {parity.reference.folder.name for parity in parities} == {"single"}


def test_verdicts_are_in_the_table_and_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the size of the difference, and hints at the cause of a break."""
    monkeypatch.setenv("COLUMNS", "400")
    verdict(tmp_path / "grows", changed(grown))
    text = as_text(compare(read_runs([tmp_path / "grows"])))
    assert "ok, rounding grows to 1.1%" in text
    assert "rounding grew slowly to this size" in text
    assert "loss parity broken" not in text
    verdict(tmp_path / "breaks", changed(lambda _: 2e-3))
    text = as_text(compare(read_runs([tmp_path / "breaks"])))
    assert "differs from the first line on (step 1), compared with single, 1 rank" in text
    assert "BatchNorm" in text


def test_an_asynchronous_mode_promises_no_parity(tmp_path: Path) -> None:
    """It has no verdict and is never the reference; its row says `not promised`."""
    keys = {"parallelism.name": "ps", "parallelism.bucket_cap_mb": None}
    losses = changed(lambda _: 0.2)
    for name, mode in (("sync", "sync"), ("async", "async")):
        config = {**keys, "parallelism.mode": mode, "world_size": 2}
        lines = lines_of([1.0] * len(losses), losses=losses)
        write_run(tmp_path / name, config=config, lines=lines)
    lines = lines_of([1.0] * len(LOSSES), losses=LOSSES)
    write_run(tmp_path / "single", config=SINGLE, lines=lines)
    comparison = compare(read_runs([tmp_path]))
    assert [parity.run.folder.name for parity in comparison.parity] == ["sync"]
    assert "not promised" in as_text(comparison)


def test_runs_on_a_stream_promise_no_parity(tmp_path: Path) -> None:
    """Their ranks split it, so that each number of ranks takes other steps."""
    for name, keys in (("two", {"world_size": 2, "batch.per_rank": 32}), ("single", {})):
        lines = lines_of([1.0] * len(LOSSES), losses=changed(lambda _: 0.2) if keys else LOSSES)
        record = {"trains_on_stream": True}
        write_run(tmp_path / name, config={**SINGLE, **keys}, lines=lines, record=record)
    comparison = compare(read_runs([tmp_path]))
    assert not comparison.parity
    assert "loss parity broken" not in as_text(comparison)


@cache
def real_losses(
    *,
    perturbation: float = 0.0,
    rate: float = 0.5,
    scale: float = 1.0,
    other_order_from: int = 1000,
) -> list[float]:
    """Train a small network in float32 with 8 steps per epoch; return the loss of each step.

    Args:
        perturbation: Relative change of the initial weights.
        rate: Learning rate.
        scale: Factor of the gradients.
        other_order_from: First step with another order of the batches.
    """
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 32, 20, generator=draws)  # (batches, samples, features)
    targets = torch.randint(10, (8, 32), generator=draws)
    shapes = ((20, 64), *[(64, 64)] * 4, (64, 10))
    weights = [1.4 * torch.randn(shape, generator=draws) / shape[0] ** 0.5 for shape in shapes]
    noise = [torch.randn(shape, generator=draws) for shape in shapes]
    weights = [(1 + perturbation * by) * weight for weight, by in zip(weights, noise, strict=True)]
    losses = []
    for step in range(1, 101):
        batch = (3 * step + 1 if step >= other_order_from else step) % 8
        weights = [weight.requires_grad_() for weight in weights]
        hidden = inputs[batch]
        for weight in weights[:-1]:
            hidden = torch.nn.functional.gelu(hidden @ weight)
        loss = torch.nn.functional.cross_entropy(hidden @ weights[-1], targets[batch])
        gradients = torch.autograd.grad(loss, weights)
        pairs = zip(weights, gradients, strict=True)
        weights = [weight.detach() - rate * scale * gradient for weight, gradient in pairs]
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize("perturbation", [1e-7, 5e-8, -1e-7])
def test_rounding_of_a_real_training_is_no_break(
    tmp_path: Path, perturbation: float, every: int
) -> None:
    """Weights that differ by one part in ten million lead to losses that differ by percents."""
    ours, theirs = real_losses(perturbation=perturbation), real_losses()
    parity = verdict(tmp_path, ours, theirs=theirs, every=every)
    assert parity.largest > 0.002, "the training is too stable to show anything"
    assert parity.first_break is None
    assert parity.verdict.startswith("ok, rounding grows to ")


@pytest.mark.parametrize("every", [1, 5, 10])
@pytest.mark.parametrize(
    ("fault", "first_step"),
    [
        ({"perturbation": 0.01}, 1),
        ({"scale": 2.0}, 2),
        ({"rate": 0.505}, 2),
        ({"other_order_from": 9}, 9),
        ({"other_order_from": 17}, 17),
    ],
)
def test_a_fault_of_a_real_training_is_a_break_where_it_begins(
    tmp_path: Path, fault: dict[str, Any], first_step: int, every: int
) -> None:
    """Other weights, a sum instead of a mean, a rate 1% too large, another order."""
    parity = verdict(tmp_path, real_losses(**fault), theirs=real_losses(), every=every)
    assert parity.first_break == -(-first_step // every) * every
