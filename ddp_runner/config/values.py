"""What each value of a config must be by itself: of its kind, in its range, known. Torch-free.

What must hold between several keys is in ``validate``.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import yaml

from ddp_runner.config.inference import FORMATS, SPLITS
from ddp_runner.config.launching import meeting_place
from ddp_runner.config.measuring import DTYPES, OPS, REDUCE_OPS
from ddp_runner.config.own_loop import TASKS, has_own_loop
from ddp_runner.config.schema import (
    CONFIG_DIR,
    KINDS,
    LIST_GROUPS,
    RUNNER_KEYS,
    Config,
    ModeNeeds,
    leaves,
)
from ddp_runner.config.tracking import validate_tracking
from ddp_runner.errors import UserError, in_yaml, nearest
from ddp_runner.host.hardware import memory_bytes
from ddp_runner.metric_names import LISTED

SMALL_BYTES = 2**26  # of a dataset that fits any machine
MOST = 2**63 - 1  # the largest whole number of torch and NumPy, seeds included
POSITIVE = (
    "train.epochs", "train.max_steps", "train.log_every_steps", "train.eval_every_steps",
    "train.grad_accum_steps", "train.clip_norm", "train.clip_value", "train.num_threads",
    "early_stop.patience", "batch.global_size", "batch.per_rank",
    "batch.eval_per_rank", "checkpoint.every_epochs", "checkpoint.every_steps", "checkpoint.keep",
    "launch.nnodes", "launch.nproc_per_node", "launch.shutdown_timeout_s", "sweep.max_failures",
    "sweep.parallel_jobs", "model.num_stages", "optimizer.lr", "dataset.num_samples",
    "dataset.prefetch_factor", "dataset.channels", "dataset.height", "dataset.width",
    "dataset.num_classes", "dataset.eval_fraction",
    "parallelism.devices_per_rank", "parallelism.needs.devices_per_rank",
    "parallelism.needs.max_ranks", "parallelism.needs.model_ranks",
    "parallelism.needs.num_replicas", "parallelism.needs.min_ranks", "inference.top_k",
    "inference.num_tokens", "parallelism.num_replicas", "parallelism.tensor_parallel_size",
    "collectives.min_bytes", "collectives.max_bytes", "collectives.steps",
    "trackers.mlflow.timeout_s", "trackers.mlflow.wait_s", "trackers.wandb.timeout_s",
    "trackers.wandb.wait_s",
)  # fmt: skip
NOT_NEGATIVE = (
    "seed", "train.eval_every_epochs", "launch.max_restarts", "launch.node_rank",
    "optimizer.weight_decay", "optimizer.momentum", "collectives.warmup_steps",
    "scheduler.warmup_steps", "early_stop.min_delta", "dataset.num_workers",
    "inference.temperature",
)  # fmt: skip
LEAST = dict.fromkeys(NOT_NEGATIVE, 0) | {
    "backend.timeout_s": 1,  # less is too short for ranks that share a core
    "launch.join_timeout_s": 1,
    "collectives.size_factor": 2,
}
LARGEST = dict.fromkeys(  # a year, and threads: beyond them the libraries overflow
    ("backend.timeout_s", "launch.join_timeout_s", "launch.shutdown_timeout_s"), 31_536_000
) | {"train.num_threads": 4096}
TORCH_DATASET = "ddp_runner.data.sources.torch_dataset.TorchDataset"
CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "train.precision": ("fp32", "tf32", "bf16", "fp16"),
    "sweep.retry": (None, "failed"),
    "batch.count": ("samples", "tokens"),
    "checkpoint.mode": ("max", "min"),
    "early_stop.mode": (None, "max", "min"),
    "inference.split": SPLITS,
    "inference.format": FORMATS,
    "trackers.wandb.mode": (None, "online", "offline"),
}
GROUP = re.compile(r"params\.groups\.\d+\.")  # its keys have the rules of the optimizer's
LISTS = {"ops": OPS, "dtypes": DTYPES, "reduce_ops": REDUCE_OPS}  # of collectives


def validate_values(config: Config) -> None:
    """Reject a value that no run can use, whatever the other keys are.

    Raises:
        UserError: a value is infinite, of another kind, out of its range, or an unknown word.
    """
    for group in RUNNER_KEYS:
        if not isinstance(getattr(config, group).get("_target_"), str):
            raise UserError(
                f"{group} has no _target_, the name of what is built; choose an option, as in "
                f"{group}=NAME: see --help"
            )
    if config.task not in TASKS and not has_own_loop(config.task):
        meant = nearest(config.task, TASKS)
        hint = f"; did you mean {meant}?" if meant else ""
        raise UserError(
            f"task ({config.task}) must be one of {', '.join(TASKS)}, or a function of your own, "
            f"as PACKAGE.MODULE.FUNCTION{hint}"
        )
    step = config.train.step
    if not isinstance(step.get("_target_") if isinstance(step, Mapping) else step, str):
        raise UserError(
            f"train.step ({step}) must be a dotted name, or a mapping with _target_; write "
            "train.step=my_package.step"
        )
    for group in LIST_GROUPS:
        _validate_named(group, getattr(config, group))
    validate_tracking(config)
    values = dict(leaves(asdict(config)))
    if config.launch.rdzv_endpoint is not None:
        meeting_place(config.launch)
    _validate_numbers(values)
    for group in RUNNER_KEYS:
        keys = getattr(config, group)
        usual = yaml_values(group, str(keys.get("name")))
        if keys["_target_"] == TORCH_DATASET and not usual:  # in a YAML of the user's
            usual = {"defaults": [], **yaml_values(group, "torch_dataset")}
        _validate_kind(group, keys, usual)
    _validate_kind("dataset.shuffle", config.dataset.get("shuffle", True), True)
    for name, keys in config.trackers.items():
        usual = yaml_values("trackers", str(name)).get(name, {})
        _validate_kind(f"trackers.{name}", keys, {"wait_s": 10.0, **usual})
    _validate_needs(config.parallelism.get("needs", {}))
    _validate_memory(config)
    for key, options in CHOICES.items():
        if key in values and values[key] not in options:
            named = ", ".join("null" if one is None else one for one in options)
            raise UserError(f"{key} ({values[key]}) must be one of {named}")
    for name, known in LISTS.items():
        _validate_list(f"collectives.{name}", getattr(config.collectives, name), known)


def _validate_numbers(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{key} ({value}) must be a finite number")
            if isinstance(number, int) and abs(number) > MOST:
                limit = f"{MOST} or less" if number > 0 else f"{-MOST} or greater"
                raise UserError(f"{key} ({value}) must be {limit}")
    # Last what a mode needs, which may follow from a key of its own: an error names that one.
    for key in sorted(values, key=lambda key: ".needs." in key):
        rule_of, value = GROUP.sub("optimizer.", key), values[key]
        if value is None or rule_of not in {*POSITIVE, *LEAST, *LARGEST}:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{key} ({in_yaml(value)}) must be a number")
        if rule_of in POSITIVE and not value > 0:
            raise UserError(f"{key} ({value}) must be greater than 0")
        if value < (least := LEAST.get(rule_of, value)):
            raise UserError(f"{key} ({value}) must be {least} or greater")
        if value > (largest := LARGEST.get(rule_of, value)):
            raise UserError(f"{key} ({value}) must be {largest} or less")


def _validate_kind(key: str, value: Any, default: Any) -> None:
    """Reject a value of another kind than the default in its YAML; a group's keys one by one."""
    if isinstance(default, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"{key} ({value}) is a group of keys; write {key}.KEY=VALUE")
        for name, usual in default.items():
            inner = value.get(name, usual)
            # What an option inherits may be null for another that inherits the same.
            is_left_out = inner is None and (isinstance(usual, Mapping) or "defaults" in default)
            if name not in ("name", "loss", "reshard_after_forward") and not is_left_out:
                _validate_kind(f"{key}.{name}", inner, usual)
        return
    kind = type(default)
    if kind not in KINDS or str(default).startswith(("${", "???")):
        return
    if kind is float and isinstance(value, list):
        return  # such as a number per channel: the target checks how many
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{key} ({in_yaml(value)}) must be {KINDS[kind]}")
    if kind in (int, float) and default >= 0 > value:
        raise UserError(f"{key} ({value}) must be 0 or greater")


def _validate_named(group: str, options: Mapping[Any, Any]) -> None:
    """Reject an option of `metrics` or `trackers` without a name that keys can have, or a class."""
    word = group.removesuffix("s")
    for name, keys in options.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII):
            raise UserError(
                f"{group}.{name}: the name of a {word} is letters, digits and _; write "
                f"{group}.{re.sub(r'[^A-Za-z0-9_]', '_', f'_{name}').strip('_') or 'mine'}"
            )
        if f"eval/{name}" in LISTED and group == "metrics":
            raise UserError(
                f"metrics.{name}: eval/{name} is a metric of every evaluation; give yours another "
                f"name, such as metrics.own_{name}"
            )
        if not isinstance(keys, Mapping) or not isinstance(keys.get("_target_"), str):
            raise UserError(
                f"{group}.{name} has no _target_, the class of the {word}; write {group}=[{name}] "
                f"for one that has a YAML, or +{group}.{name}._target_=my_package.Mine"
            )


def _validate_needs(needs: Any) -> None:
    defaults = asdict(ModeNeeds())
    _validate_kind("parallelism.needs", needs, {})
    for key, value in needs.items():
        if key not in defaults:
            meant = nearest(str(key), defaults, cutoff=0.0)
            raise UserError(f"parallelism.needs.{key} does not exist; did you mean {meant}?")
        if value is not None or key not in ("max_ranks", "model_ranks"):  # null: any, all
            usual = 1 if defaults[key] is None else defaults[key]
            _validate_kind(f"parallelism.needs.{key}", value, usual)


def _validate_list(key: str, names: Sequence[str] | None, known: Sequence[str]) -> None:
    for name in names or ():
        if name not in known:
            meant = nearest(name, known)
            hint = f"; did you mean {meant}?" if meant else ""
            raise UserError(f"{key} ({name}) must be among {', '.join(known)}{hint}")
    if names is not None and (not names or len(set(names)) < len(names)):
        raise UserError(
            f"{key} ([{', '.join(names)}]) must name at least one, and none twice; choose from "
            f"{', '.join(known)}"
        )


def _validate_memory(config: Config) -> None:
    """Reject a generated dataset that is larger than this machine's memory."""
    dataset = config.dataset
    sizes = {key: size for key, size in dataset.items() if isinstance(size, int)}
    if sizes.keys() >= {"channels", "height", "width"}:
        sample_bytes = math.prod(sizes[key] for key in ("channels", "height", "width"))
    else:
        sample_bytes = 4 * (sizes.get("input_size", 0) + sizes.get("target_size", 0))
    count = sizes.get("num_samples", 0) + sizes.get("eval_samples", 0)
    if count * sample_bytes < SMALL_BYTES:
        return  # without asking the machine for each job of a sweep
    needed, memory = (size / 2**30 for size in (count * sample_bytes, memory_bytes()))
    if needed > memory:
        raise UserError(
            f"dataset={dataset.get('name')} of {count} samples takes {needed:.0f} GiB and this "
            f"machine has {memory:.0f}; write a smaller dataset.num_samples"
        )


@lru_cache
def yaml_values(group: str, option: str) -> Mapping[str, Any]:
    """Return the keys of an option's YAML; nothing for a user's option."""
    path = CONFIG_DIR / group / f"{option}.yaml"
    if not re.fullmatch(r"\w+", option) or not path.is_file():
        return {}
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    own: dict[str, Any] = content.get(group, content)
    for base in content.get("defaults", ()):
        if isinstance(base, str):  # another option of the group
            own = {**yaml_values(group, base), **own}
    return own
