"""What a command takes from the run that it resumes: its groups and its frozen config."""

import re
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from omegaconf import DictConfig, OmegaConf

from ddp_runner.cli.compose import quoted
from ddp_runner.cli.resume_arguments import follow_again, validate_repeated
from ddp_runner.config.load import chosen_keys, forced, frozen_config
from ddp_runner.config.schema import RUNNER_KEYS, has_own_loop
from ddp_runner.config.sections import AUTO, INFERENCE
from ddp_runner.config.targets import given_targets
from ddp_runner.errors import UserError
from ddp_runner.files import is_missing, read_yaml
from ddp_runner.tracking.outputs import newest_run
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record


class NotARunError(UserError):
    """This machine does not have the run to resume; another one may."""


def resumed_overrides(
    overrides: Sequence[str], *, folders: Sequence[Path]
) -> tuple[list[str], list[str]]:
    """Return the overrides for Hydra to compose, and those among them that the user did not write.

    A resumed run brings its groups (``model=bert``): without them Hydra would compose the default
    groups, and reject keys that only the run's own groups have. ``resume=last`` becomes a path.
    Several runs, in a sweep, bring the groups that they share; each job then brings the rest. The
    `folders` hold the groups, the project's and the user's own.

    Raises:
        UserError: there is no last run.
    """
    overrides = list(overrides)
    places = [place for place, one in enumerate(overrides) if one.startswith("resume=")]
    if not places:
        return overrides, []
    place = places[-1]
    value = OverridesParser.create().parse_override(overrides[place]).value()
    runs = [_run(one) for one in (value.list if isinstance(value, ChoiceSweep) else [value])]
    if value == "last":
        overrides[place] = f"resume={quoted(str(runs[0]))}"
    first, *others = (_choices(run, folders=folders) for run in runs)
    given = {one.partition("=")[0] for one in overrides}
    configs = [RunDir(run).config for run in runs]
    overrides = [forced(one, configs, chosen=given) for one in overrides]
    implied = [
        f"{group}={option}"
        for group, option in first
        if group not in given and all((group, option) in one for one in others)
    ]
    return [*overrides[: place + 1], *implied, *overrides[place + 1 :]], implied


def with_resumed(
    raw: DictConfig, overrides: Sequence[str], *, is_launched: bool = False
) -> DictConfig:
    """Return the composed config, or a resumed run's own config with this command's keys on top.

    If the ranks run already, `is_launched`, their number replaces the run's.

    Raises:
        NotARunError: this machine does not have the run to resume.
        UserError: a key cannot change it.
    """
    raw.allowed_targets = [*raw.allowed_targets, *given_targets(raw)]
    if raw.resume in (None, AUTO):
        return raw
    frozen, chosen = _frozen(Path(raw.resume)), chosen_keys(overrides)
    own: Any = OmegaConf.to_container(frozen)  # of the run, and nothing is resolved
    unresolved: Any = OmegaConf.to_container(raw)
    trained = own["task"]
    follow_again(frozen, own, unresolved["dataset"])
    # What resume=auto finds does the same work, so its config has the experiment's keys already.
    if "experiment" in chosen and f"resume={AUTO}" not in overrides:
        raise UserError("experiment= cannot change a run that is resumed; give single keys")
    for key in chosen:
        if key == "experiment":
            continue
        # The scaling group has no keys of its own: it chooses the batch.
        changed = "batch" if key == "scaling" else key
        value = OmegaConf.select(raw, changed)
        if value is not None and not OmegaConf.is_config(value):
            # A secret is frozen as the user wrote it; in a container it is unresolved anyway.
            value = reduce(getitem, changed.split("."), unresolved)
        OmegaConf.update(frozen, changed, value, merge=False, force_add=True)
        if changed.endswith("._target_"):  # the keys of the class that it replaces are not in raw
            owner = changed.removesuffix("._target_")
            old, new = OmegaConf.select(frozen, owner), OmegaConf.select(raw, owner)
            for name in old.keys() - new.keys():
                del old[name]
    # A config that came with somebody else's run must not allow itself to run code, or send what it
    # reads from this environment to a server of its choice.
    frozen.allowed_targets, frozen.trackers = raw.allowed_targets, raw.trackers
    frozen.sweep = raw.sweep  # where the run was a job of a sweep
    # Where the ranks met, and which machine this was, held for that launch only. Also, ranks send
    # pickles to whoever answers at that address.
    for key in ("init_method", "node_rank", "rdzv_endpoint", "rdzv_id"):
        frozen.launch[key] = unresolved["launch"][key]
    takes_model = "task" in chosen and frozen.task in INFERENCE
    if takes_model:
        # More metrics beside those of the training, which other keys of the run may name.
        given: Any = OmegaConf.to_container(frozen.metrics)  # still unresolved
        frozen.metrics = {**own["metrics"], **given}
    validate_repeated(frozen, unresolved)
    if is_launched and "world_size" not in chosen:
        frozen.world_size = AUTO
    if trained in INFERENCE and frozen.task not in INFERENCE:
        raise UserError(
            f"resume={raw.resume} is a run of task={trained}, which has nothing to train on; name "
            f"the run that it was about: resume={frozen.inference.run}"
        )
    if takes_model:
        _take_model(frozen, raw, chosen, trained=trained)
    elif frozen.task in INFERENCE and is_missing(Path(str(frozen.inference.run))):
        raise NotARunError(
            f"resume={raw.resume} is a run of task={trained} about {frozen.inference.run}, which "
            f"does not exist; write task={trained} resume=RUN with the folder where that run is now"
        )
    return frozen


def left_trackers(raw: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return what to say if the resumed run had trackers and this command says nothing of them."""
    if raw.resume in (None, AUTO) or any(
        key.partition(".")[0] == "trackers" for key in chosen_keys(overrides)
    ):
        return []
    frozen: Any = OmegaConf.to_container(_frozen(Path(raw.resume)))  # nothing is resolved
    names = list(frozen["trackers"])
    if not names:
        return []
    return [
        f"the run was sent to {', '.join(names)}, and a resumed run sends nothing by itself: add "
        f"trackers=[{','.join(names)}] with its keys and, for one of your own, "
        "--config-dir=FOLDER; or trackers=[]"
    ]


def _take_model(
    frozen: DictConfig, raw: DictConfig, chosen: Sequence[str], *, trained: str
) -> None:
    """Make a run's config that of a new run, which takes its model. Change it in place.

    What counts is the model, so how the ranks were launched and split the batch is left out. The
    samples of a forward stay as many, so that the results stay equal to the last digit.

    Raises:
        UserError: the run has trained no model.
    """
    run_dir = RunDir(Path(raw.resume).absolute())
    if has_own_loop(trained):
        frozen.loop = {}
    elif trained != "train":
        raise UserError(
            f"resume={raw.resume} is a run of task={trained}, and task={frozen.task} takes the "
            "model of a run of task=train; name such a run"
        )
    frozen.resume, frozen.inference.run = None, str(run_dir)
    if "weights" in frozen.model:
        frozen.model.weights = None  # where the training began
    frozen.launch, frozen.name, frozen.notes = raw.launch, raw.name, raw.notes
    batch = frozen.batch
    if not {"batch.eval_per_rank", "batch.per_rank"} & set(chosen):
        batch.eval_per_rank = batch.eval_per_rank or batch.per_rank
    batch.global_size = None
    hosts = read_run_record(run_dir, missing_ok=True).get("num_nodes", 1)
    if hosts != 1 and "world_size" not in chosen:
        frozen.world_size = AUTO
    # Other texts must have the tokens that the model was trained on.
    kept = run_dir.path / "tokenizer"
    has_other_data = any(key.startswith("dataset") for key in chosen)
    if has_other_data and kept.is_dir() and frozen.dataset.get("tokenizer", "") is None:
        frozen.dataset.tokenizer = str(kept)


def _run(value: Any) -> Path:
    """Return the run that a value of resume names."""
    text = value.text if isinstance(value, QuotedString) else str(value)
    if text != "last":
        return Path(text)
    if (newest := newest_run()) is None:
        raise UserError(
            "resume=last finds no run below outputs; start in the folder that holds it, or give "
            "resume=RUN"
        )
    return newest


def _frozen(run_dir: Path) -> DictConfig:
    """Return a run's frozen config; reject one that is missing or damaged."""
    path = RunDir(run_dir).config
    if is_missing(path):
        raise NotARunError(
            f"resume={run_dir} is not a run folder: {path} does not exist; "
            "name the folder that holds run.json"
        )
    return frozen_config(path)


def _choices(run_dir: Path, *, folders: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the groups that a run was composed of, each with its options that the folders have."""

    def exists(group: str, option: str) -> bool:
        is_name = re.fullmatch(r"[\w.-]{1,99}", option) is not None
        return is_name and any((one / group / f"{option}.yaml").is_file() for one in folders)

    try:
        choices = read_yaml(RunDir(run_dir).choices)
        pairs = [(str(group), str(option)) for group, option in choices.items()]
    except Exception:  # PyYAML raises errors of any kind for odd tags
        return []  # damaged, or not a run: with_resumed reports what is wrong
    groups = (*RUNNER_KEYS, "backend")
    found = [pair for pair in pairs if pair[0] in groups and exists(*pair)]
    listed = dict(pairs).get("metrics", "").strip("[]").split(",")
    metrics = [name for name in listed if exists("metrics", name)]
    return [*found, ("metrics", f"[{','.join(metrics)}]")] if metrics else found
