"""A model's state_dict and the file ``model.safetensors``: what fits a model, written and read."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddp_runner.errors import UserError, listed
from ddp_runner.files import file_sha256, replacing, temp_folder_in


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


def _plain_name(name: str) -> str:
    """Return a key without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")
