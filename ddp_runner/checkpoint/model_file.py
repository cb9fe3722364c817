"""Matches a state_dict to a model; reads and writes ``model.safetensors``."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddp_runner.errors import UserError, any_error, listed
from ddp_runner.files import file_sha256, replacing, temp_folder_in


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], *, named: str) -> None:
    """Load a state_dict into a bare model in place, on its devices; see ``fitting_tensors``."""
    module.load_state_dict(fitting_tensors(module, tensors, named=named))


def fitting_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], *, named: str
) -> dict[str, Tensor]:
    """Return the tensors under the keys of a bare model, which may have shards.

    Ignore prefixes of torch.compile and DDP. Errors call the tensors by `named`.

    Raises:
        UserError: the tensors are from another model.
    """
    expected = module.state_dict()
    given = {_without_compile(name): tensor for name, tensor in tensors.items()}
    if not any(name.startswith("module.") for name in expected):  # from a saved DDP module
        given = {name.removeprefix("module."): tensor for name, tensor in given.items()}
    keys = {_without_compile(key): key for key in expected}
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
    state: Mapping[str, Tensor],
    *,
    step: int,
    metrics: Mapping[str, float | None],
    is_average: bool = False,
) -> str:
    """Write a state_dict atomically as safetensors, and return its SHA-256. Rank 0 only.

    Tensors may be on any device. Tied tensors are written once per name. The file's metadata has
    step and metrics (without ``perf/``) as strings, and ``weights: ema`` for averaged weights.

    Raises:
        UserError: the file could not be written.
    """
    tensors, addresses = dict[str, Tensor](), set[int]()
    for name, tensor in state.items():
        tensors[name] = tensor.detach().cpu().contiguous()
        if tensors[name].untyped_storage().data_ptr() in addresses:
            tensors[name] = tensors[name].clone()  # the format has no shared memory
        addresses.add(tensors[name].untyped_storage().data_ptr())
    facts = {
        name: str(value)
        for name, value in metrics.items()
        if value is not None and not name.startswith("perf/")  # they differ between equal runs
    }
    facts |= {"weights": "ema"} if is_average else {}
    try:
        # safetensors writes to a temporary file first, which a killed process leaves behind.
        prefix = f".{path.name}.parts"
        with replacing(path) as temp, temp_folder_in(path.parent, prefix=prefix) as parts:
            written = parts / path.name
            written.touch()
            mode = written.stat().st_mode
            save_file(tensors, written, {"format": "pt", "step": str(step), **facts})
            written.chmod(mode)  # safetensors makes its files private
            written.replace(temp)
            digest = file_sha256(temp)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{path} could not be written ({reason})",
            "free space or make the folder writable, then resume: the checkpoints are intact",
        ) from error
    return digest


def read_export(path: Path, *, named: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the state_dict and the metadata of a ``.safetensors`` file.

    Raises:
        UserError: the file is missing or damaged.
    """
    with any_error(f"{named} cannot be read", "give another file"):
        with safe_open(path, framework="pt") as file:
            facts = dict(file.metadata() or {})
        return load_file(path), facts


def _without_compile(name: str) -> str:
    """Return a key without torch.compile's prefix."""
    return name.replace("_orig_mod.", "")
