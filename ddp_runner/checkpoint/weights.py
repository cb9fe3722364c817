"""The weights that a run starts from, and those that it exports as ``model.safetensors``.

Rank 0 alone reads them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddp_runner.checkpoint.manifest import MANIFEST
from ddp_runner.checkpoint.plain_data import load_plain_data
from ddp_runner.checkpoint.store import best_checkpoints, first_whole, load_checkpoint, newest_first
from ddp_runner.config.own_loop import has_own_loop
from ddp_runner.config.schema import RunConfig
from ddp_runner.distributed import sum_over_ranks
from ddp_runner.errors import UserError, listed, os_errors
from ddp_runner.files import file_sha256, read_yaml, replacing, temp_folder_in
from ddp_runner.parallelism.shards import send_module
from ddp_runner.tracking.run_dir import RunDir


def starting_weights(
    config: RunConfig, checkpoints: Path, *, log: Callable[[str], None]
) -> Path | None:
    """Return and log what a run starts from; None: from scratch, or from its own `checkpoints`.

    Raises:
        UserError: `model.weights` names a run without a usable checkpoint.
    """
    asked = config.model.get("weights")
    if asked is None or newest_first(checkpoints):
        return None
    found = _find(Path(asked), log=log)
    log(f"starts from the weights in {found}")
    return found


def load_weights(module: nn.Module, path: Path | None) -> None:
    """Load rank 0's file, if it has one, into a bare model on all ranks. Collective.

    A mode need not send all that is in it.
    """
    (num_files,) = sum_over_ranks([path is not None])
    if num_files:
        send_module(module, read_weights(module, path) if path else None, group=None)


def read_weights(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Return the state_dict of a model from a file, with the model's own keys. Rank 0 only.

    Args:
        module: bare; it is left as it is.
        path: a checkpoint folder, a ``.safetensors`` file, or a state_dict that torch.save wrote,
            by itself or under the key ``model`` or ``state_dict``.

    Raises:
        UserError: the file is not readable, could run code, or is of another model.
    """
    return fitting_tensors(module, _read(path), named=f"model.weights ({path})")


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], *, named: str) -> None:
    """Load a state_dict into a bare model in place, on its devices; see ``fitting_tensors``."""
    module.load_state_dict(fitting_tensors(module, tensors, named=named))


def fitting_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], *, named: str
) -> dict[str, Tensor]:
    """Return a state_dict with the keys of a bare model, perhaps of its shards.

    The names may have the prefixes that torch.compile and DDP add. In an error the state_dict goes
    by what it is `named`.

    Raises:
        UserError: it is of another model.
    """
    found = {_plain_name(name): tensor for name, tensor in tensors.items()}
    expected = module.state_dict()
    if not any(name.startswith("module.") for name in expected):  # from a saved DDP module
        found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    names = {_plain_name(name): name for name in expected}
    differences = []
    if missing := [name for name in names if name not in found]:
        differences.append(f"it lacks {listed(missing)}")
    if unexpected := [name for name in found if name not in names]:
        differences.append(f"it has {listed(unexpected)}, which the model does not have")
    if wrong := [
        f"{name} is {tuple(found[name].shape)} there and {tuple(expected[own].shape)} in the model"
        for name, own in names.items()
        if name in found and found[name].shape != expected[own].shape
    ]:
        differences.append(listed(wrong))
    if differences:
        raise UserError(
            f"{named} does not fit the model: {'; '.join(differences)}; give "
            "weights of the same model, or the model's original keys"
        )
    return {own: found[name] for name, own in names.items()}


def best_or_newest(
    folder: Path, *, monitor: str | None, mode: str, log: Callable[[str], None]
) -> Path | None:
    """Return the undamaged checkpoint that is best, or without a metric the newest; None: none is.

    If all with a finite value of the metric are damaged, it is the newest of the others.
    """
    ranking = best_checkpoints(folder, monitor=monitor, mode=mode, log=log) if monitor else []
    return first_whole(dict.fromkeys([*ranking, *newest_first(folder)]), log=log)


def export_weights(
    path: Path,
    state: Mapping[str, Tensor],
    *,
    step: int,
    metrics: Mapping[str, float | None],
    is_average: bool = False,
) -> str:
    """Write a state_dict as safetensors, whole or not at all; return its SHA-256. Rank 0 only.

    Its tensors may be on any device; tied ones are written once for each of their names. The
    optimizer step and its metrics become the file's metadata, as strings, with ``weights: ema`` for
    averaged weights.

    Raises:
        UserError: the file could not be written.
    """
    tensors, addresses = dict[str, Tensor](), set[int]()
    for name, tensor in state.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().data_ptr() in addresses:  # the format has no tensors that share
            own = own.clone()
        addresses.add(own.untyped_storage().data_ptr())
        tensors[name] = own
    facts = {name: str(value) for name, value in metrics.items() if value is not None}
    facts |= {"weights": "ema"} if is_average else {}
    try:
        # safetensors writes to a file with a name of its own, which a killed process leaves.
        prefix = f".{path.name}.parts"
        with replacing(path) as temp, temp_folder_in(path.parent, prefix=prefix) as parts:
            written = parts / path.name
            written.touch()
            mode = written.stat().st_mode
            save_file(tensors, written, {"format": "pt", "step": str(step), **facts})
            written.chmod(mode)  # safetensors lets nobody else read its file
            written.replace(temp)
            digest = file_sha256(temp)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{path} could not be written ({reason}); free space or make the "
            "folder writable, then resume: the checkpoints are intact"
        ) from error
    return digest


def read_export(path: Path, *, named: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the state_dict and the metadata of a ``.safetensors`` file.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = dict(file.metadata() or {})
        return load_file(path), facts
    except (OSError, ValueError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{named} cannot be read ({reason}); give another file") from error


def _find(path: Path, *, log: Callable[[str], None]) -> Path:
    """Return the checkpoint folder or file to load: of a run, the best checkpoint or the newest."""
    what = f"model.weights ({path}) cannot be read"
    with os_errors(what, fix="make it readable, or give other weights"):
        if path.is_file() or (path / MANIFEST).exists():
            return path
    config, export = RunDir(path).config, RunDir(path).export
    try:
        keys = read_yaml(config)
        settings, is_own = keys["checkpoint"], has_own_loop(str(keys.get("task")))
        monitor, mode = settings["monitor"], settings["mode"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(
            f"{config} does not say which checkpoint is best ({type(error).__name__}); write "
            "model.weights=RUN/checkpoints/step-XXXXXXXX"
        ) from error
    if is_own and export.is_file():  # in its checkpoints nobody knows which object is the model
        return export
    found = best_or_newest(RunDir(path).checkpoints, monitor=monitor, mode=mode, log=log)
    if found is None:
        fix = "call run.export in its loop" if is_own else "give another run"
        raise UserError(f"model.weights ({path}) has no undamaged checkpoint; {fix}")
    return found


def _read(path: Path) -> Mapping[str, Tensor]:
    """Return the state_dict of a file, given by itself or under the key model or state_dict."""
    named = f"model.weights ({path})"
    if path.is_dir():
        loaded: Any = load_checkpoint(path).get("objects")
    elif path.suffix == ".safetensors":
        return read_export(path, named=named)[0]
    else:
        fix = "save the model's state_dict(), not the model"
        loaded = load_plain_data(path, named=named, fix=fix)
    outer: Mapping[str, Any] = loaded if isinstance(loaded, Mapping) else {}
    for found in (outer, outer.get("model"), outer.get("state_dict")):
        tensors = dict(found) if isinstance(found, Mapping) else {}
        if tensors and all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            return tensors
    raise UserError(f"{named} holds no state_dict, not even as model or state_dict; give one")


def _plain_name(name: str) -> str:
    """Return a key without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")
