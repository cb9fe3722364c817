"""Writes a model as a program that runs without its Python code: ONNX, or torch.export.

Sources: https://docs.pytorch.org/docs/stable/export.html and
https://docs.pytorch.org/docs/stable/onnx_export.html
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only  # what torch.export itself takes arguments apart with

from ddp_runner.checkpoint.model_file import load_tensors
from ddp_runner.config.schema import RunConfig
from ddp_runner.data.dataset import Dataset
from ddp_runner.data.splits import NUM_FIRST
from ddp_runner.data.trees import tensors_of
from ddp_runner.errors import UserError, os_errors, typed
from ddp_runner.files import temp_folder_in
from ddp_runner.train.build_model import place_alone
from ddp_runner.train.build_state import build_step
from ddp_runner.train.step import StepFunction

FILES = {"onnx": "model.onnx", "torch_export": "model.pt2"}
MOST_CHARACTERS = 200  # of an error of torch's exporter, which may fill a page
CPU = torch.device("cpu")
MOST_INLINE = 2**31 - 2**26  # bytes of weights in an ONNX file; beyond them a second file has them


def export_programs(
    config: RunConfig,
    dataset: Dataset,
    *,
    arguments: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    samples: Any,
    folder: Path,
) -> list[Path]:
    """Write the model in each format of ``checkpoint.export``, and return the files.

    The programs are traced on the CPU and take any number of samples; texts may be of any length.
    Rank 0 only.

    Args:
        config: of the run.
        dataset: whose batches the training step takes; the step shows how the model is called.
        arguments: facts of the data that the model is built with.
        tensors: the weights, a state_dict.
        samples: a batch of ``NUM_FIRST``, as the split loads it.
        folder: where the files go.

    Raises:
        UserError: torch cannot trace the model, or a file cannot be written.
    """
    module, step = place_alone(config, arguments, CPU), build_step(config, [CPU])
    load_tensors(module, tensors, named="the exported model")
    module.eval()
    written = []
    for name in dict.fromkeys(config.checkpoint.export):
        what = f"{folder / FILES[name]} cannot be written"
        try:
            new = temp_folder_in(folder, prefix=".export-")
            with os_errors(what), _quiet(), torch.no_grad(), new as temp:
                args, kwargs = _call(module, step, dataset.prepare(samples, CPU))
                is_text = dataset.padding_id is not None or dataset.vocab_size is not None
                shapes = _dynamic_axes((args, kwargs), is_text=is_text)
                program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
                _save(program, temp / FILES[name])
                for file in temp.iterdir():  # large weights are in a second file
                    written.append(file.replace(folder / file.name))
        except UserError:
            raise
        except Exception as error:  # torch raises anything for what it cannot trace
            reason = typed(error.__cause__ or error)[:MOST_CHARACTERS]
            raise UserError(
                f"checkpoint.export={name}: torch cannot make a program of "
                f"model={config.model.get('name')} ({reason}); leave it out, or change the "
                "model: model.safetensors has the weights"
            ) from error
    return written


def _call(module: nn.Module, step: StepFunction, data: Any) -> tuple[Any, dict[str, Any]]:
    """Return the arguments that the training step calls the model with, first.

    The tensors are copies: a program would keep the strides of a slice.
    """
    calls = list[tuple[Any, dict[str, Any]]]()
    record = module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        step(module, data)
    record.remove()
    if not calls:
        raise UserError(
            "checkpoint.export: the training step calls parts of the model, not the model itself, "
            "so there is no single program to export; leave it out"
        )
    copy = partial(torch.clone, memory_format=torch.contiguous_format)
    args, kwargs = tree_map_only(Tensor, copy, calls[0])
    return args, kwargs


def _dynamic_axes(trees: Any, *, is_text: bool) -> torch.export.ShapesCollection:
    """Return which axes of the tensors may vary: the batch, and the length of texts."""
    shapes = torch.export.ShapesCollection()
    for _, tensor in tensors_of(trees):
        if tensor.ndim and len(tensor) == NUM_FIRST:
            axes = {0: torch.export.Dim.DYNAMIC}
            if is_text and tensor.ndim > 1:
                axes[1] = torch.export.Dim.DYNAMIC
            shapes[tensor] = axes
    return shapes


def _save(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program in the format that the file's ending names."""
    if path.suffix == ".pt2":
        torch.export.save(program, path)
        return
    num_bytes = sum(tensor.nbytes for tensor in program.state_dict.values())
    torch.onnx.export(program, f=path, external_data=num_bytes > MOST_INLINE, verbose=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch prints about its own exporter out of the terminal in the block."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        yield
