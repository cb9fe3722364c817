"""Takes the groups and the frozen config of the run that a command resumes."""

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from omegaconf import DictConfig, OmegaConf

from ddp_runner.cli.compose import quoted
from ddp_runner.cli.resume_arguments import restore_interpolations, validate_foreign_keys
from ddp_runner.config.load import chosen_keys, forced_override, frozen_config
from ddp_runner.config.schema import RUNNER_KEYS, has_own_loop
from ddp_runner.config.sections import AUTO, INFERENCE
from ddp_runner.config.targets import given_targets
from ddp_runner.errors import UserError
from ddp_runner.files import is_missing, read_or_none, read_yaml
from ddp_runner.tracking.outputs import newest_run
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record


def resumed_overrides(
    overrides: Sequence[str], *, folders: Sequence[Path]
) -> tuple[list[str], list[str]]:
    """Return the overrides for Hydra, and those among them that the user did not write.

    A resumed run adds its groups (``model=bert``): without them Hydra would compose the default
    groups, and reject keys that only the run's groups have. Several runs, in a sweep, add the
    groups that they share; each job then adds the rest. ``resume=last`` becomes a path. The
    `folders` hold the groups, the project's and the user's own.
    """
    overrides = list(overrides)
    indices = [index for index, word in enumerate(overrides) if word.startswith("resume=")]
    if not indices:
        return overrides, []
    index = indices[-1]
    value = OverridesParser.create().parse_override(overrides[index]).value()
    runs = [*map(_resolve_run, value.list if isinstance(value, ChoiceSweep) else [value])]
    if value == "last":
        overrides[index] = f"resume={quoted(str(runs[0]))}"
    first, *others = (_read_choices(run, folders=folders) for run in runs)
    given = {word.partition("=")[0] for word in overrides}
    configs = [RunDir(run).config for run in runs]
    overrides = [forced_override(word, configs, chosen=given) for word in overrides]
    implied = [
        f"{group}={option}"
        for group, option in first
        if group not in given and all((group, option) in choices for choices in others)
    ]
    return [*overrides[: index + 1], *implied, *overrides[index + 1 :]], implied


def lacks_run(raw: DictConfig) -> bool:
    """Return whether this machine does not have the run to resume."""
    return raw.resume not in (None, AUTO) and is_missing(RunDir(Path(raw.resume)).config)


def with_resumed(
    raw: DictConfig,
    overrides: Sequence[str],
    *,
    is_launched: bool = False,
    is_elsewhere: bool = False,
) -> DictConfig:
    """Return the composed config, or a resumed run's config with this command's keys on top.

    If the ranks run already, `is_launched`, their number replaces the run's. With `is_elsewhere`
    only another machine has the run, and sends its config later.

    Raises:
        UserError: the run does not exist or is damaged, or a key cannot change it.
    """
    raw.allowed_targets = [*raw.allowed_targets, *given_targets(raw)]
    if raw.resume in (None, AUTO) or is_elsewhere:
        return raw
    frozen, chosen = _read_config(Path(raw.resume)), chosen_keys(overrides)
    run: Any = OmegaConf.to_container(frozen)  # unresolved
    unresolved: Any = OmegaConf.to_container(raw)
    trained = run["task"]
    restore_interpolations(frozen, run, unresolved["dataset"])
    _validate_chosen(frozen, raw, chosen, is_auto=f"resume={AUTO}" in overrides)
    _set_chosen(frozen, raw, chosen, unresolved)
    # The config may come from somebody else: it must not allow itself to run code, or choose the
    # server that gets values of this environment.
    frozen.allowed_targets, frozen.trackers = raw.allowed_targets, raw.trackers
    frozen.sweep = raw.sweep  # the run may have been a job of a sweep
    # The rendezvous and this machine's number belonged to the earlier launch. Also, ranks send
    # pickles to the process at that address.
    for key in ("init_method", "node_rank", "rdzv_endpoint", "rdzv_id"):
        frozen.launch[key] = unresolved["launch"][key]
    starts_inference = "task" in chosen and frozen.task in INFERENCE
    if starts_inference:
        # Keep the training's metrics, which other keys of the run may name.
        metrics: Any = OmegaConf.to_container(frozen.metrics)  # still unresolved
        frozen.metrics = {**run["metrics"], **metrics}
    validate_foreign_keys(frozen, unresolved)
    if is_launched and "world_size" not in chosen:
        frozen.world_size = AUTO
    if trained in INFERENCE and frozen.task not in INFERENCE:
        raise UserError(
            f"resume={raw.resume} is a run of task={trained}, which has nothing to train",
            f"name the run that it used: resume={frozen.inference.run}",
        )
    if starts_inference:
        _take_model(frozen, raw, chosen, trained=trained)
    elif frozen.task in INFERENCE and is_missing(Path(str(frozen.inference.run))):
        raise UserError(
            f"resume={raw.resume} is a run of task={trained} with the model of "
            f"{frozen.inference.run}, which does not exist",
            f"write task={trained} resume=RUN with that run's present folder",
        )
    return frozen


def _validate_chosen(
    frozen: DictConfig, raw: DictConfig, chosen: Sequence[str], *, is_auto: bool
) -> None:
    """Reject groups of this command that cannot change a run; `is_auto`: with resume=auto."""
    # A run that resume=auto finds has the experiment's keys already.
    if "experiment" in chosen and not is_auto:
        raise UserError("experiment= cannot change a run that is resumed", "give single keys")
    old, new = (str(config.model.get("_target_")) for config in (frozen, raw))
    if "model" in chosen and new != old:  # model._target_=... renames a class that has moved
        raise UserError(
            f"resume={raw.resume} trains {old}, and a run keeps its model",
            "leave out model=, or start a new run",
        )


def _set_chosen(
    frozen: DictConfig, raw: DictConfig, chosen: Sequence[str], unresolved: Mapping[str, Any]
) -> None:
    """Set the keys and groups that this command gives, in place."""
    for key in chosen:
        if key == "experiment":
            continue
        # The group scaling has no keys of its own: it chooses the batch.
        changed = "batch" if key == "scaling" else key
        value = OmegaConf.select(raw, changed)
        if value is not None and not OmegaConf.is_config(value):
            # A secret is frozen as the user wrote it; in a container it is unresolved anyway.
            value = reduce(getitem, changed.split("."), unresolved)
        OmegaConf.update(frozen, changed, value, merge=False, force_add=True)
        if changed.endswith("._target_"):  # drop the keys of the replaced class
            owner = changed.removesuffix("._target_")
            old, new = OmegaConf.select(frozen, owner), OmegaConf.select(raw, owner)
            for name in old.keys() - new.keys():
                del old[name]


def dropped_trackers(raw: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return a note if the resumed run had trackers and this command does not mention any."""
    is_given = any(key.partition(".")[0] == "trackers" for key in chosen_keys(overrides))
    frozen: Any = OmegaConf.to_container(_read_config(Path(raw.resume)))  # unresolved
    if is_given or not (names := list(frozen["trackers"])):
        return []
    return [
        f"the run was sent to {', '.join(names)}, and a resumed run is sent only if its command "
        f"says so: add trackers=[{','.join(names)}] with its keys and, for one of your own, "
        "--config-dir=FOLDER; or trackers=[]"
    ]


def _take_model(
    frozen: DictConfig, raw: DictConfig, chosen: Sequence[str], *, trained: str
) -> None:
    """Turn a run's config into the config of a new run that uses its model, in place.

    The launch and the global batch are not taken. The samples per forward stay, so that the results
    are equal to the last digit.
    """
    run_dir = RunDir(Path(raw.resume).absolute())
    if has_own_loop(trained):
        frozen.loop = {}
    elif trained != "train":
        raise UserError(
            f"resume={raw.resume} is a run of task={trained}, and task={frozen.task} takes the "
            "model of a run of task=train",
            "name a run of that task",
        )
    frozen.resume, frozen.inference.run = None, str(run_dir)
    if "weights" in frozen.model:
        frozen.model.weights = None  # the training's initial weights
    frozen.launch, frozen.name, frozen.notes = raw.launch, raw.name, raw.notes
    batch = frozen.batch
    if not {"batch.eval_per_rank", "batch.per_rank"} & set(chosen):
        batch.eval_per_rank = batch.eval_per_rank or batch.per_rank
    batch.global_size = None
    num_nodes = read_run_record(run_dir, missing_ok=True).get("num_nodes", 1)
    if num_nodes != 1 and "world_size" not in chosen:
        frozen.world_size = AUTO
    # Other texts must get the tokens that the model was trained on.
    tokenizer = run_dir.path / "tokenizer"
    has_other_data = any(key.startswith("dataset") for key in chosen)
    if has_other_data and tokenizer.is_dir() and frozen.dataset.get("tokenizer", "") is None:
        frozen.dataset.tokenizer = str(tokenizer)


def _resolve_run(value: Any) -> Path:
    text = value.text if isinstance(value, QuotedString) else str(value)
    return newest_run() if text == "last" else Path(text)


def _read_config(run_dir: Path) -> DictConfig:
    """Return a run's frozen config; reject a missing or damaged file."""
    path = RunDir(run_dir).config
    if is_missing(path):
        if not is_missing(RunDir(run_dir).record):
            raise UserError(f"{path}, the config of the run, is missing", "restore it from a copy")
        raise UserError(
            f"resume={run_dir} is not a run folder: {path} does not exist",
            "name the folder that holds run.json",
        )
    return frozen_config(path)


def _read_choices(run_dir: Path, *, folders: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the groups of a run with their options, if the folders have them."""

    def exists(group: str, option: str) -> bool:
        is_name = re.fullmatch(r"[\w.-]{1,99}", option) is not None
        return is_name and any((root / group / f"{option}.yaml").is_file() for root in folders)

    choices = read_or_none(read_yaml, RunDir(run_dir).choices)
    if not isinstance(choices, dict):
        return []  # with_resumed reports a damaged or missing run
    pairs = [(str(group), str(option)) for group, option in choices.items()]
    groups = (*RUNNER_KEYS, "backend")
    options = [pair for pair in pairs if pair[0] in groups and exists(*pair)]
    listed = dict(pairs).get("metrics", "").strip("[]").split(",")
    metrics = [name for name in listed if exists("metrics", name)]
    return [*options, ("metrics", f"[{','.join(metrics)}]")] if metrics else options
