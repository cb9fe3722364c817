"""What each value of a config must be by itself: of its kind, in its range, known. Torch-free.

The rules of the schema's keys stand beside its fields. The keys of an option, and their kinds, are
those of the class or function that it names. What must hold between several keys is in ``rules``.
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
    Config,
    ModeNeeds,
    has_own_loop,
    mode_needs,
    runner_keys,
)
from ddp_runner.config.sections import INFERENCE
from ddp_runner.config.signatures import ANY, Keyword, Keywords, source_keywords, unknown_key
from ddp_runner.errors import UserError
from ddp_runner.metric_names import LISTED

ANYTHING = Rule()  # but a number that no library takes
NOT_NEGATIVE = Rule(least=0)
WITHOUT_NEGATIVES = ("ddp_runner.", "torch.optim.lr_scheduler.")  # among their numbers
OF_OPTIMIZER = re.compile(r"params\.groups\.\d+\.")  # its keys have the rules of the optimizer's
# Keys that the runner reads, though the target may take them, too; and keywords that it gives.
READ: Mapping[str, Mapping[str, type]] = {
    "scheduler": {"monitor": str},
    "trackers": {"wait_s": float},
}
GIVEN = {
    "optimizer": {"params", "module"},
    "scheduler": {"optimizer", "last_epoch"},
    "loop": {"run"},
}
# Hydra's own, and what split modes and datasets give a model.
OF_RUN = re.compile(r"_.*|dev\d+|padding_id|vocab_size")


def validate_values(config: Config) -> None:
    """Reject a value that no run can use, whatever the other keys are.

    What the user wrote comes first: a mode's needs may follow from its other keys.

    Raises:
        UserError: a value is infinite, of another kind, out of its range, or an unknown word; or a
            class or function does not exist, or does not take the key.
    """
    for group in RUNNER_KEYS:
        if not isinstance(getattr(config, group).get("_target_"), str):
            raise UserError(
                f"{group} has no _target_, the name of what is built; choose an option, as in "
                f"{group}=NAME: see --help"
            )
    for group in LIST_GROUPS:
        _validate_named(group, getattr(config, group))
    groups = {group: getattr(config, group) for group in (*RUNNER_KEYS, *LIST_GROUPS)}
    _validate_options(groups)
    _validate_required(config)
    _validate_functions(config)
    for key in walk(config):
        may_be_null = plain_kind(key.kind) is not key.kind
        if key.value is not None or not may_be_null:
            validate_value(key.name, key.value, key.rule)
    own = {key: value for key, value in config.parallelism.items() if key != "needs"}
    others = {"parallelism": own, "loop": config.loop, "params": {"groups": config.params.groups}}
    for name, value in leaves(groups | others):
        rule = GROUP_KEYS.get(OF_OPTIMIZER.sub("optimizer.", name), ANYTHING)
        validate_value(name, value, rule)
    _validate_needs(config.parallelism)


def _validate_needs(mode: Mapping[str, Any]) -> None:
    try:
        needs = mode_needs(mode)
    except TypeError as error:
        raise UserError(
            f"parallelism.needs ({mode['needs']}) must be a mapping with some of the "
            f"keys {', '.join(one.name for one in fields(ModeNeeds))}"
        ) from error
    for key in walk(needs, "parallelism.needs."):
        if key.value is not None or plain_kind(key.kind) is key.kind:
            validate_kind(key.name, key.value, plain_kind(key.kind))
            validate_value(key.name, key.value, key.rule)


def _validate_named(group: str, options: Mapping[Any, Any]) -> None:
    """Reject an option of `metrics` or `trackers` without a name that keys can have, or a class."""
    word = group.removesuffix("s")
    for name, keys in options.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII) or name in (group, "_target_"):
            raise UserError(
                f"{group}.{name}: the name of a {word} is letters, digits and _, as in {group}.mine"
                f"; in its YAML all keys are below it, as in mine: {{_target_: my_package.Mine}}"
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
        _known("model.loss", loss)
    if isinstance(step, Mapping):
        _validate_options(step, "train.step")
        step = step.get("_target_")
    takes_loss = "loss" in (_known("train.step", str(step)) or ())
    if takes_loss and loss is None and config.task in ("train", "check"):
        raise UserError(
            f"model.loss is null or deleted, and train.step ({step}) needs it; write "
            "model.loss=ddp_runner.train.losses.cross_entropy, or a train.step of your own"
        )
    if has_own_loop(config.task):
        _known("task", config.task)
        _validate_keys({"_target_": config.task, **config.loop}, "loop")


def _validate_options(tree: Any, key: str = "") -> None:
    """Validate the keys beside each ``_target_`` in a part of the config."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if isinstance(tree, Mapping):
        if "_target_" in tree:
            validate_kind(f"{key}._target_", tree["_target_"], str)
            _validate_keys(tree, key)
        for name, one in tree.items():
            _validate_options(one, f"{key}.{name}".lstrip("."))


def _validate_required(config: Config) -> None:
    """Reject a model or a metric whose class must be given more."""
    options = {f"metrics.{name}": settings for name, settings in config.metrics.items()}
    # An own loop may give its model more; what it gave is in the run that inference takes.
    is_complete = not has_own_loop(config.task) and config.task not in INFERENCE
    for key, settings in (options | ({"model": config.model} if is_complete else {})).items():
        target = settings["_target_"]
        found = {name for name, one in (source_keywords(target) or {}).items() if one.is_required}
        lacking = sorted(one for one in found - {*settings} if not OF_RUN.fullmatch(one))
        if lacking and not {"_args_", "_partial_"} & {*settings}:
            raise UserError(
                f"{key} gives no {lacking[0]}, which {target} needs; put it into the YAML, or "
                f"write +{key}.{lacking[0]}=VALUE"
            )


def _validate_keys(settings: Mapping[str, Any], key: str) -> None:
    """Reject a key that a target does not take, and a value of another kind.

    What the source does not tell is left to the rank, which imports the target.
    """
    target = settings["_target_"]
    known = _known(f"{key}._target_", target)
    read = READ.get(key.partition(".")[0], {})
    taken = {ANY: Keyword(None)} if known is None else known
    kinds = {"name": None, **runner_keys(key), **read}
    kinds |= {name: one.kind for name, one in taken.items()}
    for name, value in settings.items():
        if not (name in kinds or ANY in kinds or name.startswith("_")):
            others = {*taken, *read} - GIVEN.get(key, set())
            raise unknown_key(name, key, target=target, known=others)
        kind = kinds.get(name)
        is_built = isinstance(value, Mapping) and "_target_" in value  # its kind is not known
        if kind is not None and value is not None and not is_built:
            validate_kind(f"{key}.{name}", value, kind)
        if target.startswith(WITHOUT_NEGATIVES) and type(value) in (int, float):
            validate_value(f"{key}.{name}", value, GROUP_KEYS.get(f"{key}.{name}", NOT_NEGATIVE))


def _known(key: str, name: str) -> Keywords | None:
    """Return what ``source_keywords`` does of the value of a key; an error names the key."""
    try:
        return source_keywords(name)
    except ImportError as error:
        raise UserError(f"{key} ({name}) does not exist: {error}") from None
