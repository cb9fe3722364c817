"""What each value of a config must be by itself: finite, of its kind, in its range. Torch-free.

What must hold between several keys is in ``validate``.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import yaml

from ddp_runner.config.schema import CONFIG_DIR, DTYPES, OPS, REDUCE_OPS, Config, leaves
from ddp_runner.errors import UserError, nearest

GROUPS = ("model", "dataset", "parallelism", "optimizer", "scheduler")
MOST = 2**63 - 1  # the largest whole number of torch and NumPy, seeds included
YEAR_S = 365 * 86_400.0  # longer times overflow in the libraries
POSITIVE = (
    "train.epochs", "train.max_steps", "train.log_every_steps", "train.grad_accum_steps",
    "train.clip_norm", "train.num_threads", "batch.global_size", "batch.per_rank",
    "batch.eval_per_rank", "launch.nnodes", "launch.nproc_per_node", "launch.shutdown_timeout_s",
    "sweep.max_failures", "sweep.parallel_jobs", "optimizer.lr", "dataset.num_samples",
)  # fmt: skip
NOT_NEGATIVE = (
    "seed", "train.eval_every_epochs", "launch.max_restarts", "launch.node_rank",
    "optimizer.weight_decay", "optimizer.momentum",
)  # fmt: skip
RANGES: Mapping[str, tuple[float, float]] = {
    "backend.timeout_s": (1, YEAR_S),  # less is too short for ranks that share a core
    "launch.shutdown_timeout_s": (0, YEAR_S),
    "launch.nnodes": (1, 2**16),
    "train.num_threads": (1, 2**12),
    "train.grad_accum_steps": (1, 2**16),
    "batch.global_size": (1, 2**40),
    "batch.per_rank": (1, 2**40),
}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def validate_values(config: Config) -> None:
    """Refuse a value that no run can use, whatever the other keys are.

    Raises:
        UserError: a value is infinite, of another kind, or out of its range.
    """
    for group in GROUPS:
        if not isinstance(getattr(config, group).get("_target_"), str):
            raise UserError(
                f"{group} has no _target_, the name of what is built; choose an option, as in "
                f"{group}=NAME: see --help"
            )
    values = dict(leaves(asdict(config)))
    for key, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{key} ({value}) must be a finite number")
            if isinstance(number, int) and abs(number) > MOST:
                raise UserError(f"{key} ({value}) must be {MOST} or less")
    for key in POSITIVE:
        if (value := _number(key, values.get(key))) is not None and not value > 0:
            raise UserError(f"{key} ({value}) must be greater than 0")
    for key in NOT_NEGATIVE:
        if (value := _number(key, values.get(key))) is not None and value < 0:
            raise UserError(f"{key} ({value}) must be 0 or greater")
    for key, (least, most) in RANGES.items():
        if (value := values.get(key)) is not None and not least <= value <= most:
            rule = f"{least:g} or greater" if value < least else f"{most:.0f} or less"
            raise UserError(f"{key} ({value}) must be {rule}")
    for group in GROUPS:
        _validate_kinds(group, getattr(config, group))
    _ensure_memory(config)


def validate_collectives(config: Config, *, num_ranks: int) -> None:
    """Refuse values that the collectives benchmark cannot measure.

    Raises:
        UserError: a number is out of range, a name is unknown, or there is only one rank.
    """
    asked = config.collectives
    for key, value, least in (
        ("min_bytes", asked.min_bytes, 1),
        ("max_bytes", asked.max_bytes, 1),
        ("size_factor", asked.size_factor, 2),
        ("steps", asked.steps, 1),
        ("warmup_steps", asked.warmup_steps, 0),
    ):
        if value < least:
            raise UserError(f"collectives.{key} ({value}) must be {least} or greater")
    if asked.min_bytes > asked.max_bytes:
        raise UserError(
            f"collectives.min_bytes ({asked.min_bytes}) is greater than collectives.max_bytes "
            f"({asked.max_bytes}); give both, the smaller as min_bytes"
        )
    _validate_names("ops", asked.ops, OPS)
    _validate_names("dtypes", asked.dtypes, DTYPES)
    _validate_names("reduce_ops", asked.reduce_ops, REDUCE_OPS)
    if config.task == "collectives" and num_ranks < 2:
        raise UserError(
            f"task=collectives measures what ranks send each other, world_size is {num_ranks}; "
            "write world_size=2 or more"
        )


def _validate_names(key: str, names: Sequence[str] | None, known: Sequence[str]) -> None:
    if names is None:
        return
    for name in names:
        if name not in known:
            meant = nearest(name, known)
            hint = f"; did you mean {meant}?" if meant else ""
            raise UserError(f"collectives.{key} ({name}) must be among {', '.join(known)}{hint}")
    if not names or len(set(names)) < len(names):
        raise UserError(
            f"collectives.{key} ([{', '.join(names)}]) must name at least one, and none twice; "
            f"choose from {', '.join(known)}"
        )


def _number(key: str, value: Any) -> int | float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise UserError(f"{key} ({value}) must be a number")


def _validate_kinds(group: str, keys: Mapping[str, Any]) -> None:
    """Refuse a key of a group whose value is of another kind than in the group's own YAML."""
    for key, default in _yaml_values(group, str(keys.get("name"))).items():
        *parents, last = key.split(".")
        inner: Any = keys
        for depth, parent in enumerate(parents, start=1):
            inner = inner.get(parent)
            if inner is None:
                break  # the group is left out
            if not isinstance(inner, Mapping):
                name = ".".join([group, *parents[:depth]])
                raise UserError(f"{name} ({inner}) is a group of keys; write {group}.{key}=VALUE")
        if inner is not None and last in inner:
            _validate_kind(f"{group}.{key}", inner[last], default)


def _validate_kind(key: str, value: Any, default: Any) -> None:
    kind = type(default)
    if kind is float and isinstance(value, list):
        return  # such as a number per channel: the target checks how many
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        shown = "null" if value is None else value
        raise UserError(f"{key} ({shown}) must be {KINDS[kind]}")
    if kind in (int, float) and default >= 0 > value:
        raise UserError(f"{key} ({value}) must be 0 or greater")


@lru_cache
def _yaml_values(group: str, option: str) -> Mapping[str, Any]:
    """Return the plain values of an option's YAML by dotted key; nothing for a user's option."""
    path = CONFIG_DIR / group / f"{option}.yaml"
    if not re.fullmatch(r"\w+", option) or not path.is_file():
        return {}
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    own = content.get(group, content)
    return {
        key: value
        for key, value in leaves(own)
        if isinstance(value, bool | int | float | str)
        and key.rpartition(".")[2][0] != "_"
        and key not in ("name", "loss")
        and not str(value).startswith("${")
    }


def _ensure_memory(config: Config) -> None:
    """Refuse a generated dataset that is larger than this machine's memory."""
    dataset = config.dataset
    sizes = [dataset.get(key) for key in ("channels", "height", "width")]
    if all(isinstance(size, int) for size in sizes):
        sample_bytes = math.prod(int(size or 0) for size in sizes)
    else:
        sample_bytes = 4 * sum(dataset.get(key) or 0 for key in ("input_size", "target_size"))
    count = (dataset.get("num_samples") or 0) + (dataset.get("eval_samples") or 0)
    needed, memory = (size / 2**30 for size in (count * sample_bytes, memory_bytes()))
    if needed > memory:
        raise UserError(
            f"dataset={dataset.get('name')} of {count} samples takes {needed:.0f} GiB and this "
            f"machine has {memory:.0f}; write a smaller dataset.num_samples"
        )


def memory_bytes() -> int:
    """Return how much memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
