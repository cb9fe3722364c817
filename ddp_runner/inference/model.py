"""The model of a run, built on ranks with its data or in one process, and the files beside it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_runner.checkpoint.model_file import fitting_tensors, load_tensors
from ddp_runner.checkpoint.weights import Weights, find_weights
from ddp_runner.compare.run_reader import read_lines
from ddp_runner.config.load import frozen_config, to_config
from ddp_runner.config.schema import Config, has_own_loop
from ddp_runner.config.secrets import foreign_keys
from ddp_runner.config.sections import Asked, validate_weights
from ddp_runner.config.targets import validate_targets
from ddp_runner.data.load_dataset import build_dataset
from ddp_runner.data.stream import Split
from ddp_runner.data.text_tokenizer import TextTokenizer, load_text_tokenizer
from ddp_runner.data.tokenizer import TOKENIZER_FILE
from ddp_runner.data.trees import inputs_of, shapes_on_failure
from ddp_runner.distributed import from_rank_zero
from ddp_runner.errors import UserError, any_error, os_errors
from ddp_runner.files import is_missing, read_file
from ddp_runner.parallelism.shards import send_module
from ddp_runner.rank.records import log_facts, task_logger
from ddp_runner.rank.session import Session, report_start
from ddp_runner.seeds import seed_all
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.tracking.run_record import read_run_record, write_run_record
from ddp_runner.tracking.start_block import count_of, placement, shown_path
from ddp_runner.train.build_model import place_alone, place_model
from ddp_runner.train.build_state import build_work
from ddp_runner.train.state import Work, forward

# Groups of a run's config that do not affect its model.
UNUSED = ("trackers", "metrics", "loop", "optimizer", "scheduler", "dataset", "launch", "sweep")


@dataclass(frozen=True)
class TrainedModel:
    """The bare model of a run with its weights, on a rank that computes."""

    work: Work
    module: nn.Module
    splits: Mapping[str, Split]  # the splits of ``inference.split``, near the device
    run_dir: RunDir  # folder of the run that trained the model
    weights: Weights  # step and path of the weights; the module has the tensors
    logged: Mapping[str, Any]  # epoch and metrics that the run logged at the weights' step

    @property
    def epoch(self) -> int:
        """Return the epoch of the weights' step; 0 if the run has not logged that step."""
        return int(self.logged.get("epoch", 0))

    def open_logger(self, session: Session, *, num_rounds: int = 0) -> Logger:
        """Log the facts of the task, and return this rank's logger."""
        dataset, nouns = self.work.dataset, {"train": "training", "eval": "evaluation"}
        splits = self.splits.items()
        counts = [f"{count_of(split.num_samples)} {nouns[name]}" for name, split in splits]
        data = f"{dataset.name}, {' and '.join(counts)} samples"
        run_dir, weights, notes = self.run_dir, self.weights, dataset.notes
        return open_logger(session, run_dir, weights, data=data, notes=notes, num_rounds=num_rounds)


def open_model(session: Session) -> TrainedModel | None:
    """Return the run's model; None on a rank that computes nothing, such as a trainer of ps.

    Rank 0 reads the weights and sends them. Collective: every rank must call.

    Raises:
        UserError: the weights or the data are unusable, or do not fit the model.
    """
    report_start(session, step=0)
    config, run = session.config, session.config.inference.run
    assert run is not None
    run_dir, on_rank_zero = RunDir(Path(run)), list[Weights]()

    def read_run() -> tuple[Weights, dict[str, Any], dict[str, Any]]:
        weights = _weights(run_dir, config, config.inference.weights, log=session.log)
        on_rank_zero.append(weights)
        lines = [line for line in read_lines(run_dir.metrics)[0] if line["step"] == weights.step]
        logged = {name: value for line in lines for name, value in line.items()}
        return replace(weights, tensors={}), logged, model_arguments(run_dir)

    weights, logged, arguments = from_rank_zero(read_run)
    dataset = build_dataset(config, log=session.log)
    work = build_work(config, session.env, session.mode, devices=session.devices, dataset=dataset)
    if not work.layout.runs_loop:
        return None
    seed_all(config.seed)  # makes buffers equal that no file keeps
    module = place_model(config, session.mode, arguments, session.devices)
    tensors = None
    if on_rank_zero:
        validate_kept_files(run_dir, dataset.files, dataset=dataset.name)
        tensors = fitting_tensors(module, on_rank_zero[0].tensors, named=str(weights.path))
    send_module(module, tensors, group=work.group)
    choice, all_splits = config.inference.split, {"train": dataset.train, "eval": dataset.eval}
    names = all_splits if choice == "all" else (choice,)
    splits = {name: dataset.near(all_splits[name], session.devices[0]) for name in names}
    fault = f"the model of {run_dir} cannot take dataset={dataset.name}, with samples"
    fix = "choose a dataset that fits"
    for split in splits.values():
        batch = split.first(seed=config.seed)
        with torch.no_grad(), shapes_on_failure(fault, inputs_of(batch.data), fix=fix):
            forward(work, module.eval(), batch)
    return TrainedModel(work, module, splits, run_dir, weights, logged)


def _weights(
    run_dir: RunDir, config: Config, choice: Asked, *, log: Callable[[str], None]
) -> Weights:
    """Return the weights that the run's evaluations use: averaged weights with ema.evaluate."""
    validate_weights(choice)
    is_average = config.ema.is_evaluated
    return find_weights(run_dir, choice, settings=config.checkpoint, is_average=is_average, log=log)


def load_model(
    run: Path,
    *,
    weights: str | int,
    device: str | torch.device,
    allowed_targets: Sequence[str],
    log: Callable[[str], None] = print,
) -> tuple[nn.Module, Weights]:
    """Return the model of a run, in evaluation mode, and its weights; see ``notebook.load``."""
    run_dir = RunDir(run)
    if is_missing(run_dir.config):
        raise UserError(f"{run} is not a run folder: it has no {run_dir.config.name} in .hydra")
    frozen = frozen_config(run_dir.config)
    # A config from somebody else's run must not allow its own targets.
    frozen.allowed_targets = list(allowed_targets)
    if has_own_loop(frozen.task):  # the loop itself is not called here
        frozen.task = "train"
    config = _resolved(frozen)
    validate_targets(config)
    if config.task != "train":
        raise UserError(f"{run} is a run of task={config.task}", "give a run of task=train")
    chosen = _weights(run_dir, config, weights, log=log)
    seed_all(config.seed)  # makes buffers equal that no file keeps
    device = torch.empty(0, device=device).device  # with its index
    module = place_alone(config, model_arguments(run_dir), device)
    load_tensors(module, chosen.tensors, named=str(chosen.path))
    return module.eval(), chosen


def _resolved(frozen: DictConfig) -> Config:
    """Return a frozen config as the schema's object, without the groups in UNUSED.

    A run may come from anybody, so no value may read the environment or name an address.
    """
    plain: Any = OmegaConf.to_container(frozen)
    plain |= {group: {} for group in UNUSED}
    for key, value in foreign_keys(plain, {}).items():
        raise UserError(
            f"{key} ({value}) of the run reads the environment or names an address, and whoever "
            "made the run may have chosen it",
            "write the value itself into the run's config",
        )
    with any_error("the run's config is damaged or of another version", "restore it"):
        return to_config(OmegaConf.create(plain))


def model_arguments(run_dir: RunDir) -> dict[str, Any]:
    """Return the facts of the data that a run's model was built with.

    Raises:
        UserError: run.json lacks them, or cannot be read.
    """
    record = read_run_record(run_dir)
    arguments = record.get("model_arguments")
    if not isinstance(arguments, dict):
        if "uses" in record:  # a loop of the user's own
            raise UserError(
                f"the run of {run_dir.record} built its model in its own loop, so no other task "
                "can build it",
                "let the loop take it from run.model()",
            )
        raise UserError(
            f"{run_dir.record} lacks model_arguments, which task=train writes", "restore the file"
        )
    return arguments


def kept_tokenizer(run_dir: RunDir) -> TextTokenizer:
    """Return the tokenizer of a run of texts; a ``UserError`` if it is missing."""
    folder = run_dir.path / "tokenizer"
    if is_missing(folder / TOKENIZER_FILE):
        raise UserError(
            f"{run_dir} has no {folder.name}/{TOKENIZER_FILE}, which a run of texts keeps",
            "name a run of dataset=text",
        )
    return load_text_tokenizer(folder)


def validate_kept_files(run_dir: RunDir, files: Mapping[str, bytes], *, dataset: str) -> None:
    """Raise a ``UserError`` if a dataset was not made with the run's tokenizer."""
    for name, content in files.items():
        path = run_dir.path / name
        with os_errors(f"{path} cannot be read", fix="make it readable"):
            is_other = not is_missing(path) and read_file(path) != content
        if is_other:
            raise UserError(
                f"dataset={dataset} has another {name} than the run ({path}), so its tokens mean "
                "something else to the model",
                f"write dataset.tokenizer={path.parent}",
            )


def open_logger(
    session: Session,
    run_dir: RunDir,
    weights: Weights,
    *,
    data: str,
    notes: Sequence[str] = (),
    num_rounds: int = 0,
) -> Logger:
    """Log the facts of the task, and return this rank's logger.

    `run_dir` trained the model, and `data` is the task's input in words. The progress counts to
    `num_rounds`; with 0 it is not shown.
    """
    config = session.config
    if session.env.is_rank_zero:
        source = weights.path.relative_to(run_dir.path)
        facts = {
            "task": f"{config.task} the model of {shown_path(run_dir.path)}",
            "model": f"{config.model.get('name')}, step {weights.step}, from {source}",
            "data": data,
            **placement(config, session.env, session.devices),
        }
        log_facts(session, facts, notes=notes)
        source_run, split = str(run_dir), config.inference.split
        write_run_record(session.run_dir, of_run=source_run, weights_step=weights.step, split=split)
    return task_logger(session, max_steps=num_rounds)
