"""Validates that this program wrote a checkpoint, and that the data are still the same."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.data.dataset import Dataset
from ddp_runner.errors import UserError
from ddp_runner.train.state import Position


def data_facts(dataset: Dataset) -> dict[str, Any]:
    """Return what identifies the samples of a dataset: their numbers and digest."""
    return {
        "train_samples": len(dataset.train),
        "eval_samples": len(dataset.eval),
        "digest": dataset.digest,
    }


def read_position(state: Any, path: Path) -> Position:
    """Return the position in a checkpoint's state.

    Raises:
        UserError: ``snapshot`` did not make the state, even if its checksum is right.
    """
    parts = {"model", "optimizer", "scheduler", "scaler", "position", "rng", "made_of"}
    fault = None
    if not isinstance(state, dict) or not parts <= state.keys():
        fault = f"it is not a mapping with {', '.join(sorted(parts))}"
    elif not isinstance(state["made_of"], dict):
        fault = "its made_of is not a mapping"
    else:
        numbers = state["position"]
        known = {field.name: type(field.default) for field in fields(Position)}
        del known["metrics"]  # the manifest keeps them
        if (
            not isinstance(numbers, dict)
            or not numbers.keys() <= known.keys()
            or any(type(value) is not known[name] for name, value in numbers.items())
            or not all(
                type(number) is int and number >= 0
                for value in numbers.values()
                for number in (value if isinstance(value, tuple) else (value,))
            )
            or numbers.get("step") != read_manifest(path).step
        ):
            fault = f"its position is {str(numbers)[:200]}"
    if fault is not None:
        raise UserError(
            f"checkpoint {path} is not from a training run: {fault}; use a checkpoint that this "
            "program wrote"
        )
    return Position(**state["position"])


def validate_same_data(saved: Any, dataset: Dataset, path: Path) -> None:
    """Validate that the samples did not change: the order of an epoch depends on their number.

    Raises:
        UserError: the samples changed.
    """
    current = data_facts(dataset)
    if not isinstance(saved, dict):  # a version that did not save them yet
        return
    names = {"train_samples": "training samples", "eval_samples": "evaluation samples"}
    changed = [
        f"{saved.get(key):,} {name} then, {current[key]:,} now"
        for key, name in names.items()
        if saved.get(key) != current[key]
    ]
    known = saved.get("digest") is not None and current["digest"] is not None
    if not changed and known and saved["digest"] != current["digest"]:
        changed = [
            f"{current['train_samples']:,} training samples then and now, but different ones"
        ]
    if changed:
        raise UserError(
            f"the data changed since checkpoint {path}: {'; '.join(changed)}; put the data of "
            f"dataset={dataset.name} back as it was, or start a new run"
        )
