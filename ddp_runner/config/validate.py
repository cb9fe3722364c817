"""Validates each value of a config alone: its type, its range, its choices. Torch-free.

The rules of the schema's keys are beside its fields. The keys of an option, and their types, come
from the source of its ``_target_``. Rules between several keys are in ``rules``.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ddp_runner.config.fields import Rule, plain_kind, validate_kind, validate_value, walk
from ddp_runner.config.identity import leaves
from ddp_runner.config.schema import (
    GROUP_KEYS,
    LIST_GROUPS,
    RUNNER_KEYS,
    TOTAL_STEPS,
    Config,
    ModeNeeds,
    has_own_loop,
    mode_needs,
    runner_keys,
)
from ddp_runner.config.sections import INFERENCE
from ddp_runner.config.signatures import ANY, Keywords, source_keywords, unknown_key
from ddp_runner.errors import UserError
from ddp_runner.metric_names import LISTED

NOT_NEGATIVE = Rule(least=0)
WITHOUT_NEGATIVES = ("ddp_runner.", "torch.optim.lr_scheduler.")  # targets without negative numbers
PARAMETER_GROUP = re.compile(r"params\.groups\.\d+\.")  # its keys have the optimizer's rules
# Keys that the runner reads, though the target may take them too.
ALSO_READ: Mapping[str, Mapping[str, type]] = {
    "scheduler": {"monitor": str},
    "trackers": {"wait_s": float},
}
# Keywords that the runner passes itself.
PASSED_BY_RUNNER = {
    "optimizer": {"params", "module"},
    "scheduler": {"optimizer", "last_epoch"},
    "loop": {"run"},
}
# Keywords that Hydra reads, or that split modes and datasets pass to a model.
PASSED_TO_MODEL = re.compile(r"_.*|dev\d+|padding_id|vocab_size")
# Keywords that may be null, whatever their annotation: the run's lengths, and facts of a dataset.
NULL_MEANS_DERIVED = re.compile(
    rf"scheduler\.(?:{'|'.join(TOTAL_STEPS)}|steps_per_epoch)|model\..*"
)


def validate_values(config: Config) -> None:
    """Reject a value that no run can use, whatever the other keys are."""
    for group in RUNNER_KEYS:
        if not isinstance(getattr(config, group).get("_target_"), str):
            raise UserError(
                f"{group} has no _target_, the name of its class or function",
                f"choose an option, as in {group}=NAME: see --help",
            )
    for group in LIST_GROUPS:
        _validate_list_group(group, getattr(config, group))
    groups = {group: getattr(config, group) for group in (*RUNNER_KEYS, *LIST_GROUPS)}
    _validate_options(groups)
    _validate_required(config)
    _validate_functions(config)
    for key in walk(config):
        if key.value is not None or plain_kind(key.kind) is key.kind:
            validate_value(key.name, key.value, key.rule)
    # The keys of a mode come before its needs, which may be interpolated from them.
    mode = {key: value for key, value in config.parallelism.items() if key != "needs"}
    others = {"parallelism": mode, "loop": config.loop, "params": {"groups": config.params.groups}}
    for name, value in leaves(groups | others):
        rule = GROUP_KEYS.get(PARAMETER_GROUP.sub("optimizer.", name), Rule())
        validate_value(name, value, rule)
    _validate_needs(config.parallelism)


def _validate_needs(mode: Mapping[str, Any]) -> None:
    needs, names = mode.get("needs", {}), [item.name for item in fields(ModeNeeds)]
    if not isinstance(needs, Mapping) or not needs.keys() <= {*names}:
        raise UserError(
            f"parallelism.needs ({needs}) must be a mapping with some of the keys "
            f"{', '.join(names)}"
        )
    for key in walk(mode_needs(mode), "parallelism.needs."):
        if key.value is not None or plain_kind(key.kind) is key.kind:
            validate_kind(key.name, key.value, plain_kind(key.kind))
            validate_value(key.name, key.value, key.rule)


def _validate_list_group(group: str, options: Mapping[Any, Any]) -> None:
    """Reject an option of `metrics` or `trackers` with a bad name or without a class."""
    word = group.removesuffix("s")
    for name, keys in options.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII) or name in (group, "_target_"):
            raise UserError(
                f"{group}.{name}: a {word} is named by letters, digits and _, like {group}.mine",
                "in its YAML all keys are below it, as in mine: {_target_: my_package.Mine}",
            )
        if f"eval/{name}" in LISTED and group == "metrics":
            raise UserError(
                f"metrics.{name}: eval/{name} is a metric of every evaluation",
                f"give yours another name, such as metrics.own_{name}",
            )
        if not isinstance(keys, Mapping) or not isinstance(keys.get("_target_"), str):
            raise UserError(
                f"{group}.{name} has no _target_, the class of the {word}",
                f"write {group}=[{name}] "
                f"if it has a YAML, or +{group}.{name}._target_=my_package.Mine",
            )


def _validate_functions(config: Config) -> None:
    """Reject a loss, a training step or a function of a task that does not exist."""
    loss, step = config.model.get("loss"), config.train.step
    for key, words in (
        ("blocks", config.model.get("blocks") or []),
        ("tensor_parallel", (config.model.get("tensor_parallel") or {}).values()),
    ):
        for word in words:
            validate_kind(f"model.{key}", word, str)
    if isinstance(loss, str):
        _keywords("model.loss", loss)
    if isinstance(step, Mapping):
        _validate_options(step, "train.step")
        step = step.get("_target_")
    takes_loss = "loss" in _keywords("train.step", str(step))
    if takes_loss and loss is None and config.task in ("train", "check"):
        raise UserError(
            f"model.loss is null or deleted, and train.step ({step}) needs it",
            "write model.loss=ddp_runner.train.losses.cross_entropy, or a train.step of your own",
        )
    if has_own_loop(config.task):
        _keywords("task", config.task)
        _validate_keys({"_target_": config.task, **config.loop}, "loop")


def _validate_options(tree: Any, key: str = "") -> None:
    """Validate the keys beside each ``_target_`` in a part of the config."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if isinstance(tree, Mapping):
        if "_target_" in tree:
            validate_kind(f"{key}._target_", tree["_target_"], str)
            _validate_keys(tree, key)
        for name, value in tree.items():
            _validate_options(value, f"{key}.{name}".lstrip("."))


def _validate_required(config: Config) -> None:
    """Reject a model or a metric without a keyword that its class requires."""
    options = {f"metrics.{name}": settings for name, settings in config.metrics.items()}
    # The user's own loop may pass more keywords to its model; inference takes that run's.
    if not has_own_loop(config.task) and config.task not in INFERENCE:
        options["model"] = config.model
    for key, settings in options.items():
        target = settings["_target_"]
        missing = sorted(
            name
            for name, keyword in source_keywords(target).items()
            if keyword.is_required and name not in settings and not PASSED_TO_MODEL.fullmatch(name)
        )
        if missing and not {"_args_", "_partial_"} & {*settings}:
            raise UserError(
                f"{key} gives no {missing[0]}, which {target} needs",
                f"put it into the YAML, or write +{key}.{missing[0]}=VALUE",
            )


def _validate_keys(settings: Mapping[str, Any], key: str) -> None:
    """Reject a key that a target does not take, and a value of the wrong type.

    If the source does not show the keywords, the rank that imports the target reports the fault.
    """
    target = settings["_target_"]
    keywords = _keywords(f"{key}._target_", target)
    also_read = ALSO_READ.get(key.partition(".")[0], {})
    kinds = {"name": None, **runner_keys(key), **also_read}
    kinds |= {name: keyword.kind for name, keyword in keywords.items()}
    for name, value in settings.items():
        if not (name in kinds or ANY in kinds or name.startswith("_")):
            known = {*keywords, *also_read} - PASSED_BY_RUNNER.get(key, set())
            raise unknown_key(name, key, target=target, known=known)
        kind = kinds.get(name)
        is_built = isinstance(value, Mapping) and "_target_" in value  # its type is not known
        if kind is not None and value is not None and not is_built:
            validate_kind(f"{key}.{name}", value, kind)
        excludes_null = name in keywords and not keywords[name].takes_null
        if value is None and excludes_null and not NULL_MEANS_DERIVED.fullmatch(f"{key}.{name}"):
            raise UserError(f"{key}.{name} is null, and {target} needs a value", "write one")
        if target.startswith(WITHOUT_NEGATIVES) and type(value) in (int, float):
            validate_value(f"{key}.{name}", value, GROUP_KEYS.get(f"{key}.{name}", NOT_NEGATIVE))


def _keywords(key: str, name: str) -> Keywords:
    """Return ``source_keywords`` of a key's value; the error names the key."""
    try:
        return source_keywords(name)
    except ImportError as error:
        raise UserError(f"{key} ({name}) does not exist: {error}") from None
