"""Write the folders of runs that never ran, with chosen numbers."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ddp_runner.tracking.run_record import versions

CONFIG: dict[str, Any] = {
    "task": "train",
    "seed": 0,
    "name": None,
    "data_root": "data",
    "world_size": 1,
    "batch.global_size": 64,
    "batch.per_rank": 64,
    "train.epochs": 2,
    "launch.max_restarts": 0,
    "backend.name": "gloo",
    "model.name": "toy",
    "model._target_": "ddp_runner.models.toy.ToyModel",
    "dataset.name": "digits",
    "parallelism.name": "ddp",
    "parallelism._target_": "ddp_runner.parallelism.ddp.DDP",
    "parallelism.bucket_cap_mb": 25,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
}
SINGLE = {
    "parallelism.name": "single",
    "parallelism._target_": "ddp_runner.parallelism.single.Single",
    "parallelism.bucket_cap_mb": None,  # this mode does not have the key
}
Line = Mapping[str, Any]


def write_run(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    lines: Sequence[Line] = (),
    record: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder of a completed run, and return it.

    Args:
        folder: the new folder.
        config: dotted keys that differ from CONFIG; None removes a key of a group.
        lines: the lines of metrics.jsonl.
        record: additional or different fields of run.json.
    """
    keys = CONFIG | dict(config or {})
    keys = {key: value for key, value in keys.items() if value is not None or "." not in key}
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *groups, leaf = key.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[leaf] = value
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    last = {key: value for line in lines for key, value in line.items() if "/" in key}
    fields = {
        "status": "completed",
        "error": None,
        "task": "train",
        "config_hash": hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16],
        "git_revision": None,
        "versions": _versions(),
        "host": "here",
        "world_size": keys["world_size"],
        "num_devices": keys["world_size"],
        "started_at": folder.stat().st_ctime,
        "wall_s": 9.0,
        "startup_s": 1.5,
        "epoch": 2,
        "step": max((line["step"] for line in lines), default=0),
        "metrics": last,
    }
    (folder / "run.json").write_text(json.dumps(fields | dict(record or {})), encoding="utf-8")
    return folder


def lines_of(
    speeds: Sequence[float], *, losses: Sequence[float] = (), **more: Sequence[float]
) -> list[dict[str, Any]]:
    """Return lines of metrics, for every 10th step and every second.

    Args:
        speeds: samples per second of each line.
        losses: train/loss of each line; by default 1, 1/2, 1/3, …
        more: more metrics of each line, with __ for the slash in their names.
    """
    return [
        {
            "step": 10 * (index + 1),
            "epoch": 1,
            "time_s": float(index + 1),
            "train/loss": losses[index] if losses else 1 / (index + 1),
            "perf/samples_per_s": speed,
            "perf/step_time_ms": 64_000 / speed,
            "perf/peak_memory_gib": 0.5 + index / 10,
            **{name.replace("__", "/"): values[index] for name, values in more.items()},
        }
        for index, speed in enumerate(speeds)
    ]


@cache
def _versions() -> dict[str, str | None]:
    return versions()
