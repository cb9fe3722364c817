"""Compare a disturbed run with an undisturbed one: what the campaigns in benchmarks/ share."""

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from run_folders import checkpoint_dir, checkpoint_steps, last_step, record, reproducible_metrics
from safetensors import safe_open
from safetensors.torch import load_file

from ddp_runner.checkpoint.manifest import verify
from ddp_runner.checkpoint.optimizer_state import in_memory
from ddp_runner.checkpoint.store import load_checkpoint, newest_first
from ddp_runner.errors import UserError


class WrongError(Exception):
    """A run broke a guarantee."""


def assert_whole(run_dir: Path) -> None:
    """Assert that every checkpoint with its final name is undamaged."""
    for path in newest_first(run_dir / "checkpoints"):
        try:
            verify(path)
        except UserError as error:
            raise WrongError(f"a checkpoint does not load: {error}") from error


def assert_equal(
    run_dir: Path,
    expected: Path,
    *,
    num_steps: int,
    same_saves: bool = True,
    tolerance: float = 0.0,
) -> None:
    """Assert that a training ended as the undisturbed run: metrics, weights and checkpoints.

    Args:
        run_dir: of the run to check.
        expected: the folder of the undisturbed run.
        num_steps: of the whole training.
        same_saves: whether both keep checkpoints of the same steps; a stop saves another step. If
            not, only the last ones are compared.
        tolerance: relative and absolute, of numbers, for a run that continued in another mode; 0
            means equal bits.
    """
    if (status := record(run_dir)["status"]) != "completed" or last_step(run_dir) != num_steps:
        raise WrongError(f"the run is {status} at step {last_step(run_dir)}")
    logged, wanted_lines = _metrics(run_dir), _metrics(expected)
    steps, wanted_steps = ([line["step"] for line in one] for one in (logged, wanted_lines))
    if steps != wanted_steps:
        raise WrongError(f"metrics.jsonl has the steps {steps}, not {wanted_steps}")
    difference_of = partial(_difference, tolerance=tolerance)
    if difference := difference_of(logged, wanted_lines, "line"):
        raise WrongError(f"metrics.jsonl differs in {difference}")
    saved, wanted = checkpoint_steps(run_dir), checkpoint_steps(expected)
    if (saved if same_saves else saved[-1:]) != (wanted if same_saves else wanted[-1:]):
        raise WrongError(f"the run has the checkpoints {saved}, not {wanted}")
    for step in saved if same_saves else saved[-1:]:
        states = [
            in_memory(load_checkpoint(checkpoint_dir(run, step))) for run in (run_dir, expected)
        ]
        if tolerance:
            states = [_trained(state) for state in states]
        if difference := difference_of(*states):
            raise WrongError(f"the checkpoint of step {step} differs in {difference}")
    exported = [_exported(run / "model.safetensors") for run in (run_dir, expected)]
    if tolerance:  # metrics are compared above
        exported = [one["tensors"] for one in exported]
    if difference := difference_of(*exported, "model.safetensors"):
        raise WrongError(f"the run differs in {difference}")


def rank_pids(launcher_pid: int) -> Iterator[int]:
    """Yield the ranks below a launcher, which are the children of its fork server."""
    with suppress(psutil.Error):
        for child in psutil.Process(launcher_pid).children():
            yield from (rank.pid for rank in child.children())


def _exported(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return {"tensors": load_file(path), "metadata": _without_clock(file.metadata())}


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [_without_clock(line) for line in reproducible_metrics(run_dir)]


def _without_clock(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if not key.startswith(("perf/", "ps/"))}


def _trained(state: dict[str, Any]) -> Any:
    """Return what no mode sets of a checkpoint's content."""
    objects = state["objects"]
    return [objects["model"], objects["optimizer"]["state"], objects["batches"]]


def _difference(actual: Any, expected: Any, name: str = "state", *, tolerance: float = 0.0) -> str:
    """Return the name of the first difference between two trees; empty if they are equal."""
    if type(actual) is not type(expected):
        return name
    if isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return name
        pairs = [(f"{name}.{key}", actual[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            return name
        pairs = [
            (f"{name}[{i}]", *both) for i, both in enumerate(zip(actual, expected, strict=True))
        ]
    elif isinstance(expected, torch.Tensor):
        if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
            return name
        is_equal = actual.equal(expected)
        if tolerance and actual.is_floating_point():
            is_equal = torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)
        return "" if is_equal else name
    elif isinstance(expected, float):
        is_equal = math.isclose(actual, expected, rel_tol=tolerance, abs_tol=tolerance)
        return "" if is_equal else name
    else:
        return "" if actual == expected else name
    found = (_difference(*values, key, tolerance=tolerance) for key, *values in pairs)
    return next(filter(None, found), "")
