"""Matches a state_dict to a model; reads and writes ``model.safetensors``."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

from ddp_runner.checkpoint.tensor_files import read_tensors, write_tensors
from ddp_runner.errors import UserError, any_error, listed, os_errors
from ddp_runner.files import json_safe, replacing
from ddp_runner.parallelism.shards import StoredTensor, shard_like, whole_state

Tensors = Mapping[str, Tensor | StoredTensor]
COMPILED = "_orig_mod."  # torch.compile's prefix of a key


def load_tensors(module: nn.Module, tensors: Tensors, *, named: str) -> None:
    """Load a state_dict into a bare model or its shards in place; see ``fitting_tensors``.

    Every rank of the model has whole tensors, and loads its part of them.
    """
    fitting, own = fitting_tensors(module, tensors, named=named), module.state_dict()
    module.load_state_dict({key: shard_like(fitting[key], value) for key, value in own.items()})


def fitting_tensors(
    module: nn.Module, tensors: Tensors, *, named: str
) -> dict[str, Tensor | StoredTensor]:
    """Return the tensors under the keys of a bare model, which may have shards or be a stage.

    Ignore prefixes of torch.compile and DDP. Errors call the tensors by `named`.

    Raises:
        UserError: the tensors are from another model.
    """
    expected = whole_state(module)
    given = {name.replace(COMPILED, ""): tensor for name, tensor in tensors.items()}
    if not any(name.startswith("module.") for name in expected):  # from a saved DDP module
        given = {name.removeprefix("module."): tensor for name, tensor in given.items()}
    keys = {key.replace(COMPILED, ""): key for key in expected}
    differences = []
    if missing := [name for name in keys if name not in given]:
        differences.append(f"it lacks {listed(missing)}")
    if unexpected := [name for name in given if name not in keys]:
        differences.append(f"it has {listed(unexpected)}, which the model does not have")
    if shapes := [
        f"{name} is {tuple(given[name].shape)} there and {tuple(expected[key].shape)} in the model"
        for name, key in keys.items()
        if name in given and given[name].shape != expected[key].shape
    ]:
        differences.append(listed(shapes))
    if differences:
        raise UserError(
            f"{named} does not fit the model: {'; '.join(differences)}",
            "give weights of the same model, or the model's original keys",
        )
    return {key: given[name] for name, key in keys.items()}


def export_weights(
    path: Path,
    specs: Mapping[str, Tensor],
    tensors: Iterable[Tensor],
    *,
    step: int,
    metrics: Mapping[str, float | None],
    is_average: bool = False,
) -> str:
    """Write a state_dict atomically as safetensors, and return its SHA-256. Rank 0 only.

    Tied tensors are written once per name. The file's metadata has step and metrics (without
    ``perf/``) as strings, and ``weights: ema`` for averaged weights. For `specs` and `tensors` see
    ``write_tensors``.

    Raises:
        UserError: the file could not be written.
    """
    facts = {
        name: str(value)
        for name, value in json_safe(metrics).items()
        if value is not None and not name.startswith("perf/")  # they differ between equal runs
    }
    facts |= {"weights": "ema"} if is_average else {}
    fix = "free space or make the folder writable, then resume: the checkpoints are intact"
    with os_errors(f"{path} could not be written", fix=fix), replacing(path, sync=False) as temp:
        return write_tensors(temp, specs, tensors, facts={"step": str(step), **facts}).sha256


def read_export(path: Path, *, named: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the state_dict and the metadata of a ``.safetensors`` file.

    Raises:
        UserError: the file is missing or damaged.
    """
    with any_error(f"{named} cannot be read", "restore the file, or give another"):
        return read_tensors(path)
