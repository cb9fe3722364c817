"""Read the files of a run beside its weights, and log for the tasks that use its model."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_runner.checkpoint.weights import Weights
from ddp_runner.compare.run_reader import read_lines
from ddp_runner.data.text_tokenizer import TextTokenizer, load_text_tokenizer
from ddp_runner.data.tokenizer import TOKENIZER_FILE
from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import is_missing, read_file
from ddp_runner.rank.records import log_facts, task_logger
from ddp_runner.rank.session import Session
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.tracking.run_record import RunFields, read_run_record, write_run_record
from ddp_runner.tracking.start_block import placement, shown_path


def logged_at(run_dir: RunDir, step: int) -> dict[str, float | None]:
    """Return the epoch and the metrics of a step in metrics.jsonl; empty if they are missing."""
    logged: dict[str, float | None] = {}
    for line in read_lines(run_dir.metrics)[0]:
        if line["step"] == step:
            logged |= line
    return logged


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
        if is_missing(path):
            continue
        with os_errors(f"{path} cannot be read", fix="make it readable"):
            kept = read_file(path)
        if kept != content:
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

    Args:
        session: this rank's session.
        run_dir: folder of the run that trained the model.
        weights: the model's weights.
        data: the task's input in words.
        notes: remarks about the data, a sentence each.
        num_rounds: total that the progress counts to; 0: show no progress.
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
        fields = RunFields(
            of_run=str(run_dir),
            weights_step=weights.step,
            split=config.inference.split,
            warnings=list(session.job.warnings),
        )
        write_run_record(session.run_dir, **fields)
    return task_logger(session, max_steps=num_rounds)
