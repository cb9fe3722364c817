"""Finds and reads the weights of a run or a file, to start a run or to use its model.

Only rank 0 does this, or a process without ranks.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ddp_runner.checkpoint.manifest import MANIFEST, WEIGHTS_INDEX, read_manifest
from ddp_runner.checkpoint.model_file import Tensors, fitting_tensors, read_export
from ddp_runner.checkpoint.store import (
    best_checkpoints,
    checkpoints_by_step,
    first_undamaged,
    load_checkpoint,
    load_plain_data,
    newest_first,
)
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.sections import Asked
from ddp_runner.config.training import CheckpointConfig
from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import UserError, any_error, os_errors
from ddp_runner.files import file_sha256, is_missing, read_file, read_yaml
from ddp_runner.job import Status
from ddp_runner.parallelism.shards import StoredTensor, send_module
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record

TRIES = 5  # attempts to read a checkpoint that a live run may delete
PREFIX = "module."  # prefix of the model's keys in the state of torch's AveragedModel


@dataclass(frozen=True)
class Weights:
    """A model's state_dict and its source."""

    tensors: Tensors  # on the CPU, or in files
    step: int  # optimizer steps taken
    path: Path  # model.safetensors, a checkpoint folder, or the user's file
    is_average: bool = False  # averaged weights of ``ema``


def find_weights(
    run_dir: RunDir,
    asked: Asked,
    *,
    settings: CheckpointConfig,
    is_average: bool = False,
    instead: str = "inference.weights=last",
    log: Callable[[str], None],
) -> Weights:
    """Return the weights of a run: best, last, or those of a step; see ``InferenceConfig``.

    With `is_average` they are the averages of ``ema``, which a user's own loop lacks. `instead` is
    an alternative argument for error messages. `log` receives a sentence about each damaged
    checkpoint.

    Raises:
        UserError: the weights do not exist, are damaged or cannot be read.
    """
    has_own_loop = "uses" in read_run_record(run_dir, missing_ok=True)
    is_average = is_average and not has_own_loop
    if asked == "best":
        exported = _exported(run_dir, is_average=is_average, instead=instead, log=log)
        if exported is not None:
            return exported
    fix = "call run.export in its loop" if has_own_loop else "name another run"
    for tries_left in reversed(range(TRIES)):
        path = find_checkpoint(run_dir.checkpoints, asked, settings=settings, log=log)
        if path is None:
            raise UserError(
                f"{run_dir} has no undamaged checkpoint, and no {run_dir.export.name} with these "
                "weights",
                fix,
            )
        try:
            tensors = read_model(path, is_average=is_average, fix=fix)
            return Weights(tensors, read_manifest(path).step, path, is_average)
        except UserError:
            if path.exists() or not tries_left:  # else the live run has deleted it
                raise
    raise AssertionError("the last try returns or raises")


def find_checkpoint(
    folder: Path, asked: Asked, *, settings: CheckpointConfig, log: Callable[[str], None]
) -> Path | None:
    """Return the best, last or given checkpoint if it is undamaged, else None.

    "best" means by ``checkpoint.monitor``, or the newest if no undamaged checkpoint has a finite
    value of that metric.

    Raises:
        UserError: the step has no checkpoint, or the folder cannot be read.
    """
    if isinstance(asked, int):
        by_step = checkpoints_by_step(folder)
        if asked not in by_step:
            raise UserError(
                f"inference.weights ({asked}): {folder.parent} has no checkpoint of that step",
                f"it has {', '.join(map(str, by_step)) or 'none'}",
            )
        return by_step[asked]
    ranking, monitor = list[Path](), settings.monitor
    if asked == "best" and monitor is not None:
        ranking = best_checkpoints(folder, monitor=monitor, mode=settings.mode, log=log)
    return first_undamaged(dict.fromkeys([*ranking, *newest_first(folder)]), log=log)


def read_model(path: Path, *, is_average: bool, fix: str) -> Tensors:
    """Return a checkpoint's model, averaged if `is_average`.

    Raises:
        UserError: the checkpoint is damaged, or has no model that a training saved.
    """
    objects = load_checkpoint(path).get("objects")
    state = objects.get("ema" if is_average else "model") if isinstance(objects, Mapping) else None
    if not isinstance(state, Mapping):
        raise UserError(f"{path} contains no model", fix)
    return averaged_weights(state) if is_average else state


def averaged_weights(state: Mapping[str, Any]) -> Tensors:
    """Return the model's state_dict from the state of an ``Ema``."""
    return {
        name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)
    }


def _exported(
    run_dir: RunDir, *, is_average: bool, instead: str, log: Callable[[str], None]
) -> Weights | None:
    """Return a run's export; None if it is outdated or of the other kind (averaged or not)."""
    path = run_dir.export
    if is_missing(path):
        return None
    record = {} if is_missing(run_dir.record) else read_run_record(run_dir)
    is_completed, expected = record.get("status") == Status.COMPLETED, record.get("export_sha256")
    with os_errors(f"{path} cannot be read", fix=f"make it readable, or write {instead}"):
        sha256 = file_sha256(path)
    if expected not in (None, sha256):
        if not is_completed:  # a kill came between the file and its checksum
            log(f"{path} is skipped: the run has not completed since it wrote the file")
            return None
        raise UserError(
            f"{path} is damaged: its checksum differs from {run_dir.record.name}",
            f"restore it, or write {instead}",
        )
    tensors, facts = read_export(path, named=str(path))
    step = int(facts["step"]) if facts.get("step", "").isdecimal() else 0
    last_step = max(checkpoints_by_step(run_dir.checkpoints), default=0)
    is_outdated = not is_completed and last_step > step
    if is_outdated or (facts.get("weights") == "ema") != is_average:
        return None
    return Weights(tensors, step, path, is_average)


def starting_weights(
    config: RunConfig, checkpoints: Path, *, log: Callable[[str], None]
) -> Weights | None:
    """Return and log the weights of ``model.weights``; None if unset, or with own `checkpoints`.

    It names a run (its best weights), a checkpoint folder, a folder that Hugging Face's
    ``save_pretrained`` has written, or a file: ``.safetensors``, or a state_dict from torch.save,
    which may be under the key ``model`` or ``state_dict``. ``model.weight_names`` renames tensors.

    Raises:
        UserError: there is no model in it, or it could run code.
    """
    source = config.model.get("weights")
    if source is None or newest_first(checkpoints):
        return None
    path, run_dir = Path(source), RunDir(Path(source))
    with os_errors(f"model.weights ({path}) cannot be read", fix="make it readable, or change it"):
        has_export_alone = run_dir.export.exists() and not run_dir.config.exists()
        is_foreign = has_export_alone or (path / WEIGHTS_INDEX).exists()
        is_run = not (path.is_file() or is_foreign or (path / MANIFEST).exists())
    if is_run:
        instead = f"model.weights={path}/checkpoints/step-XXXXXXXX"
        rule = f"{run_dir.config} does not say which checkpoint is best"
        with any_error(rule, "write model.weights=RUN/checkpoints/step-XXXXXXXX"):
            section = read_yaml(run_dir.config)["checkpoint"]  # of any version
            settings = CheckpointConfig(monitor=section["monitor"], mode=section["mode"])
        weights = find_weights(run_dir, "best", settings=settings, instead=instead, log=log)
    else:
        weights = Weights(_read(path), 0, path)
    table = config.model.get("weight_names") or {}
    weights = replace(weights, tensors=_renamed(weights.tensors, table))
    log(f"starts from the weights in {weights.path}")
    return weights


def load_weights(module: nn.Module, weights: Weights | None) -> None:
    """Load rank 0's weights, if any, into a bare model on all ranks. Collective.

    Raises:
        UserError: the weights are from another model.
    """
    (num_found,) = sum_over_ranks([weights is not None])
    if num_found:
        tensors = None
        if weights is not None:
            named = f"model.weights ({weights.path})"
            tensors = fitting_tensors(module, weights.tensors, named=named)
        send_module(module, tensors, group=None)


def _renamed(tensors: Tensors, table: Mapping[str, str | None]) -> Tensors:
    """Return tensors under new names: ``a.*.b: c.*.d`` renames a.0.b to c.0.d; null drops it.

    Each ``*`` is one part of a name. Names that match no pattern stay.
    """
    rules = [
        (re.compile(re.escape(pattern).replace(r"\*", r"([^.]+)")), new)
        for pattern, new in table.items()
    ]
    renamed = dict[str, Tensor | StoredTensor]()
    for name, tensor in tensors.items():
        matches = ((rule.fullmatch(name), new) for rule, new in rules)
        match, new = next((pair for pair in matches if pair[0]), (None, name))
        if new is None:
            continue
        for part in match.groups() if match else ():
            new = new.replace("*", part, 1)
        renamed[new] = tensor
    return renamed


def _read_foreign(folder: Path, *, named: str) -> Tensors:
    """Return the state_dict of a folder that Hugging Face's ``save_pretrained`` has written.

    Its tensors are mapped: each is read when it is used.
    """
    names = {RunDir(folder).export.name}
    if (folder / WEIGHTS_INDEX).exists():
        with any_error(f"{named} has a damaged {WEIGHTS_INDEX}", "restore it"):
            names = {*json.loads(read_file(folder / WEIGHTS_INDEX))["weight_map"].values()}
            if outside := [name for name in names if Path(name).name != name]:
                raise ValueError(f"{outside[0]} is not in the folder")
    tensors = dict[str, Tensor]()
    for name in sorted(names):
        tensors |= read_export(folder / name, named=f"{named}, {name},")[0]
    return tensors


def _read(path: Path) -> Tensors:
    """Return the state_dict of a checkpoint or a file; see ``starting_weights``."""
    named = f"model.weights ({path})"
    if path.is_dir() and not (path / MANIFEST).exists():
        return _read_foreign(path, named=named)
    if path.is_dir():
        content: Any = load_checkpoint(path).get("objects")
    elif path.suffix == ".safetensors":
        return read_export(path, named=named)[0]
    else:
        fix = "save the model's state_dict(), not the model"
        content = load_plain_data(path, named=named, fix=fix)
    outer: Mapping[str, Any] = content if isinstance(content, Mapping) else {}
    for state in (outer, outer.get("model"), outer.get("state_dict")):
        tensors = dict(state) if isinstance(state, Mapping) else {}
        kinds = Tensor, StoredTensor
        if tensors and all(isinstance(tensor, kinds) for tensor in tensors.values()):
            return tensors
    raise UserError(
        f'{named} contains no state_dict, also not under "model" or "state_dict"',
        "give a file that has one",
    )
