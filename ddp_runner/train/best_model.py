"""Exports the best model of a completed run, and evaluates it on request."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ddp_runner.checkpoint.manifest import read_manifest
from ddp_runner.checkpoint.model_file import fitting_tensors
from ddp_runner.checkpoint.store import best_checkpoints
from ddp_runner.checkpoint.weights import read_model
from ddp_runner.errors import UserError
from ddp_runner.files import json_safe
from ddp_runner.parallelism.shards import gathered, send_module
from ddp_runner.rank.records import Records
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import add_warning
from ddp_runner.train.evaluation import evaluate
from ddp_runner.train.programs import export_programs
from ddp_runner.train.state import TrainState


class _Model(NamedTuple):
    """A model to export."""

    state: Mapping[str, Tensor]
    step: int
    metrics: Mapping[str, float | None]


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
    module, best = state.evaluated, None
    is_average = module is not state.module
    tensors = gathered(module.state_dict(), keep=work.env.is_rank_zero)
    if work.env.is_rank_zero:
        best = _Model(tensors, progress.step, progress.metrics)
        if settings.monitor is not None:
            best = _best_model(state, run_dir.checkpoints, best, log=log)
    if settings.load_best:
        send_module(module, best.state if best else None, group=work.group)
        results, _ = evaluate(work, module, step=progress.step)
        results = {name.replace("eval/", "best/"): value for name, value in results.items()}
        records.logger.log(results, step=progress.step, epoch=state.batches.epoch)
    if best is None:
        return
    records.logger.exported(best.step, best.metrics)
    records.export(best.state, step=best.step, metrics=best.metrics, is_average=is_average)
    if settings.export:
        _try_programs(state, run_dir, best, log=log)
    if settings.monitor is not None:
        score = json_safe(best.metrics.get(settings.monitor))
        value = "not finite" if score is None else f"{score:.4f}"
        log(f"best by {settings.monitor}: {value} at step {best.step}, in {run_dir.export.name}")


def _try_programs(
    state: TrainState, run_dir: RunDir, best: _Model, *, log: Callable[[str], None]
) -> None:
    """Export the programs of ``checkpoint.export``, or warn: many models cannot be traced."""
    work = state.work
    try:
        files = export_programs(
            work.config,
            work.dataset,
            arguments=work.dataset.model_arguments,
            tensors=best.state,
            samples=state.first().data,
            folder=run_dir.path,
        )
        log(f"exported {', '.join(path.name for path in files)}")
    except UserError as error:  # the training is complete
        add_warning(run_dir, str(error))
        log(f"warning: {error}")


def _best_model(
    state: TrainState, folder: Path, last: _Model, *, log: Callable[[str], None]
) -> _Model:
    """Return the best model that can be loaded, and log each damaged checkpoint. Rank 0 only.

    The training is complete, so a damaged file must not fail the run: the last model is in memory.
    """
    module, settings = state.evaluated, state.work.config.checkpoint
    assert settings.monitor is not None
    fix = "leave the folder to this run alone"
    for path in best_checkpoints(folder, monitor=settings.monitor, mode=settings.mode):
        try:
            manifest = read_manifest(path)
            if manifest.step == last.step:
                return last
            content = read_model(path, is_average=module is not state.module, fix=fix)
            tensors = fitting_tensors(module, content, named=f"checkpoint {path}")
            return _Model(tensors, manifest.step, manifest.metrics)
        except UserError as error:
            log(f"{error}; trying the next best checkpoint")
    log(f"no valid checkpoint has a finite {settings.monitor}; exporting the last model")
    return last
