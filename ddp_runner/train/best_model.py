"""Exports the best model of a completed run, also as a program that runs without Python code.

Sources: https://docs.pytorch.org/docs/stable/export.html and
https://docs.pytorch.org/docs/stable/onnx_export.html
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only  # as torch.export itself does

from ddp_runner.checkpoint.manifest import Manifest, read_manifest
from ddp_runner.checkpoint.model_file import Tensors, fitting_tensors, load_tensors, read_export
from ddp_runner.checkpoint.store import best_checkpoints
from ddp_runner.checkpoint.weights import read_model
from ddp_runner.data.splits import NUM_FIRST
from ddp_runner.data.trees import tensors_of
from ddp_runner.distributed import from_rank_zero
from ddp_runner.errors import UserError, os_errors, typed
from ddp_runner.files import json_safe, temp_folder_in
from ddp_runner.parallelism.shards import send_module, whole, whole_state, whole_tensors
from ddp_runner.rank.records import Records, export_model
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import add_warning
from ddp_runner.train.build_model import place_alone
from ddp_runner.train.build_state import build_step
from ddp_runner.train.evaluation import evaluate
from ddp_runner.train.state import TrainState, Work
from ddp_runner.train.step import StepFunction

FILES = {"onnx": "model.onnx", "torch_export": "model.pt2"}
MAX_REASON = 200  # characters of an error of torch's exporter, which may fill a page
CPU = torch.device("cpu")
MAX_INLINE = 2**31 - 2**26  # bytes of weights in an ONNX file; more go to a second file


def export_best(
    state: TrainState, run_dir: RunDir, records: Records, *, log: Callable[[str], None]
) -> None:
    """Export the best model, or the last model without checkpoint.monitor.

    With ema.evaluate it has the averaged weights, as in the evaluations. With checkpoint.load_best
    it is evaluated and logged as best/...: rank 0 reads the checkpoint and broadcasts it.
    Collective: every rank of the loop must call.

    Raises:
        UserError: the model cannot be written.
    """
    work, settings, progress = state.work, state.work.config.checkpoint, state.progress
    module, saved = state.evaluated, list[Tensors]()

    def find() -> tuple[int, Mapping[str, float | None]]:
        if settings.monitor is not None and (found := _best_model(state, run_dir.checkpoints, log)):
            manifest, tensors = found
            saved.append(tensors)
            return manifest.step, manifest.metrics
        return progress.step, progress.metrics

    step, metrics = from_rank_zero(find, group=work.group)
    is_last = step == progress.step
    if settings.load_best and not is_last:
        send_module(module, saved[0] if saved else None, group=work.group)
    if settings.load_best:
        results, _ = evaluate(work, module, step=progress.step)
        results = {name.replace("eval/", "best/"): value for name, value in results.items()}
        records.logger.log(results, step=progress.step, epoch=state.batches.epoch)
    tensors: Iterator[Tensor] = (whole(value) for it in saved for value in it.values())
    if settings.load_best or is_last:
        tensors = whole_tensors(module, group=work.group)
    records.logger.exported(step, metrics)
    is_average = module is not state.module
    specs = whole_state(module)
    export_model(run_dir, specs, tensors, step=step, metrics=metrics, is_average=is_average)
    if not work.env.is_rank_zero:
        return
    if settings.export:
        try:
            arguments, samples = work.dataset.model_arguments, state.first().data
            files = export_programs(work, run_dir, arguments=arguments, samples=samples)
            log(f"exported {', '.join(path.name for path in files)}")
        except UserError as error:  # many models cannot be traced, and the training is complete
            add_warning(run_dir, str(error))
            log(f"warning: {error}")
    if settings.monitor is not None:
        score = json_safe(metrics.get(settings.monitor))
        value = "not finite" if score is None else f"{score:.4f}"
        log(f"best by {settings.monitor}: {value} at step {step}, in {run_dir.export.name}")


def _best_model(
    state: TrainState, folder: Path, log: Callable[[str], None]
) -> tuple[Manifest, Tensors] | None:
    """Return the best model that can be loaded; None if that is the last. Rank 0 only.

    The training is complete, so a damaged file must not fail the run: it is logged, and the last
    model is in memory.
    """
    module, settings = state.evaluated, state.work.config.checkpoint
    assert settings.monitor is not None
    fix = "leave the folder to this run alone"
    for path in best_checkpoints(folder, monitor=settings.monitor, mode=settings.mode):
        try:
            manifest = read_manifest(path)
            if manifest.step == state.step:
                return None
            content = read_model(path, is_average=module is not state.module, fix=fix)
            return manifest, fitting_tensors(module, content, named=f"checkpoint {path}")
        except UserError as error:
            log(f"{error}; trying the next best checkpoint")
    log(f"no valid checkpoint has a finite {settings.monitor}; exporting the last model")
    return None


def export_programs(
    work: Work, run_dir: RunDir, *, arguments: Mapping[str, Any], samples: Any
) -> list[Path]:
    """Write a folder's model in each format of ``checkpoint.export``, and return the files.

    The programs are traced on the CPU and take any number of samples; texts may be of any length.
    Rank 0 only.

    The folder has the weights, in model.safetensors. The model is built with `arguments`, facts of
    the data. The samples are a batch of ``NUM_FIRST``, as the split loads it.

    Raises:
        UserError: torch cannot trace the model, or a file cannot be written.
    """
    config, dataset, folder = work.config, work.dataset, run_dir.path
    module, step = place_alone(config, arguments, CPU), build_step(config, [CPU])
    tensors, _ = read_export(run_dir.export, named=str(run_dir.export))
    load_tensors(module, tensors, named="the exported model")
    module.eval()
    is_text = dataset.padding_id is not None or dataset.vocab_size is not None
    written = []
    for name in dict.fromkeys(config.checkpoint.export):
        path = folder / FILES[name]
        try:
            with (
                os_errors(f"{path} cannot be written"),
                warnings.catch_warnings(action="ignore"),
                redirect_stdout(StringIO()),  # of torch's exporter
                redirect_stderr(StringIO()),
                torch.no_grad(),
                temp_folder_in(folder, prefix=".export-") as temp,
            ):
                args, kwargs = _model_arguments(module, step, dataset.prepare(samples, CPU))
                shapes = _dynamic_axes((args, kwargs), is_text=is_text)
                program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
                _save(program, temp / path.name)
                for file in temp.iterdir():  # large weights are in a second file
                    written.append(file.replace(folder / file.name))
        except Exception as error:  # torch raises many types for models that it cannot trace
            if isinstance(error, UserError):
                raise
            reason = typed(error.__cause__ or error)[:MAX_REASON]
            raise UserError(
                f"checkpoint.export={name}: torch cannot make a program of "
                f"model={config.model.get('name')} ({reason})",
                "leave it out, or change the model: model.safetensors has the weights",
            ) from error
    return written


def _model_arguments(
    module: nn.Module, step: StepFunction, data: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of the training step's first call of the model.

    The tensors are copied: a program would keep the strides of a slice.
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
            "so there is no single program to export",
            "leave it out",
        )
    copy = partial(torch.clone, memory_format=torch.contiguous_format)
    args, kwargs = tree_map_only(Tensor, copy, calls[0])
    return args, kwargs


def _dynamic_axes(trees: Any, *, is_text: bool) -> torch.export.ShapesCollection:
    """Return the axes of the tensors that may vary: the batch, and the length of texts."""
    shapes = torch.export.ShapesCollection()
    for _, tensor in tensors_of(trees):
        if tensor.ndim and len(tensor) == NUM_FIRST:
            axes = {0: torch.export.Dim.DYNAMIC}
            if is_text and tensor.ndim > 1:
                axes[1] = torch.export.Dim.DYNAMIC
            shapes[tensor] = axes
    return shapes


def _save(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program in the format of the path's suffix."""
    if path.suffix == ".pt2":
        torch.export.save(program, path)
        return
    num_bytes = sum(tensor.nbytes for tensor in program.state_dict.values())
    torch.onnx.export(program, f=path, external_data=num_bytes > MAX_INLINE, verbose=False)
