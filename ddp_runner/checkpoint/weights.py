"""The weights that a run starts from, and those that it leaves as ``model.safetensors``.

``worker`` finds out what to start from and exports at the end; ``build`` loads, on rank 0 alone:
the mode's wrap gives them to the other ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ddp_runner.checkpoint.manifest import MANIFEST
from ddp_runner.checkpoint.plain_data import load_plain_data
from ddp_runner.checkpoint.store import (
    best_checkpoints,
    first_whole,
    load_checkpoint,
    newest_first,
)
from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.tracking.run_dir import RunDir

MOST_NAMES = 3  # of a mismatch that are listed


def starting_weights(
    config: Config, checkpoints: Path, *, log: Callable[[str], None]
) -> Path | None:
    """Return what a run starts from; None where nothing was asked for, or where it goes on.

    Args:
        config: of the run.
        checkpoints: its own; if it has saved any, the run has read its weights before.
        log: gets a line with what was found.

    Raises:
        UserError: there is nothing to start from where `model.weights` points.
    """
    asked = config.model.get("weights")
    if asked is None or newest_first(checkpoints):
        return None
    found = _find(Path(asked), log=log)
    log(f"starts from the weights in {found}")
    return found


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a model's parameters and buffers, each onto the device where it is. Rank 0 only.

    Args:
        module: bare, not yet wrapped.
        path: a checkpoint folder, a ``.safetensors`` file, or what torch.save made of a state_dict,
            which may lie under ``model`` or ``state_dict``.

    Raises:
        UserError: the file is not readable, could run code, or is of another model.
    """
    found = {_plain_name(name): tensor for name, tensor in _read(path).items()}
    expected = module.state_dict()
    if not any(name.startswith("module.") for name in expected):  # DDP's own, saved with the rest
        found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    names = {_plain_name(name): name for name in expected}
    differences = []
    if missing := [name for name in names if name not in found]:
        differences.append(f"it lacks {_listed(missing)}")
    if unexpected := [name for name in found if name not in names]:
        differences.append(f"it has {_listed(unexpected)}, which the model has not")
    if wrong := [
        f"{name} is {tuple(found[name].shape)} there and {tuple(expected[own].shape)} in the model"
        for name, own in names.items()
        if name in found and found[name].shape != expected[own].shape
    ]:
        differences.append(_listed(wrong))
    if differences:
        raise UserError(
            f"model.weights ({path}) does not fit the model: {'; '.join(differences)}; give "
            "weights of the same model, or its keys as they were"
        )
    module.load_state_dict({own: found[name] for name, own in names.items()})


def export_weights(
    path: Path, state: Mapping[str, Tensor], *, step: int, metrics: Mapping[str, float | None]
) -> None:
    """Write a state_dict as safetensors, whole or not at all. Rank 0 only.

    Args:
        path: where to.
        state: tensors on any device; tied ones are written once for each of their names.
        step: optimizer steps that the weights have seen.
        metrics: of that step; with the step they become the file's metadata, as strings.

    Raises:
        UserError: it could not be written.
    """
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    facts = {name: str(value) for name, value in metrics.items() if value is not None}
    temp = path.with_name(f".{path.name}.tmp")
    try:
        temp.write_bytes(save(contiguous, {"format": "pt", "step": str(step), **facts}))
        temp.replace(path)
    except OSError as error:
        with suppress(OSError):
            temp.unlink()
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); free space or make the "
            "folder writable, then resume: the checkpoints are intact"
        ) from error


def _find(path: Path, *, log: Callable[[str], None]) -> Path:
    """Return the checkpoint folder or file to load; of a run its best checkpoint, or its newest."""
    if path.is_file() or (path / MANIFEST).exists():
        return path
    config = RunDir(path).config
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))["checkpoint"]
        monitor, mode = settings["monitor"], settings["mode"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(
            f"{config} does not tell which checkpoint is the best ({type(error).__name__}); write "
            "model.weights=RUN/checkpoints/step-XXXXXXXX"
        ) from error
    folder = RunDir(path).checkpoints
    ranking = best_checkpoints(folder, monitor=monitor, mode=mode) if monitor else []
    found = first_whole(dict.fromkeys([*ranking, *newest_first(folder)]), log=log)
    if found is None:
        raise UserError(f"model.weights ({path}) has no whole checkpoint; give another run")
    return found


def _read(path: Path) -> Mapping[str, Tensor]:
    named = f"model.weights ({path})"
    if path.is_dir():
        return _state_dict(load_checkpoint(path, map_location="cpu"), named=named)
    if path.suffix != ".safetensors":
        fix = "save the model's state_dict(), not the model"
        loaded = load_plain_data(path, named=named, map_location="cpu", fix=fix)
        return _state_dict(loaded, named=named)
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{named} cannot be read ({reason}); give another file") from error


def _state_dict(loaded: Any, *, named: str) -> Mapping[str, Tensor]:
    for nested in (loaded, *(_get(loaded, key) for key in ("model", "state_dict"))):
        if _is_state_dict(nested):
            return dict(nested)
    raise UserError(f"{named} holds no state_dict, nor one as model or state_dict; give one")


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(one, Tensor) for one in value.values())
    )


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _plain_name(name: str) -> str:
    """Return a key without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
