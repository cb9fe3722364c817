"""What the tasks that take a run's model read of the run, print at their start, and log to."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ddp_runner.checkpoint.weights import Weights
from ddp_runner.data.text_tokenizer import TextTokenizer, load_text_tokenizer
from ddp_runner.data.tokenizer import TOKENIZER_FILE
from ddp_runner.errors import UserError, os_errors
from ddp_runner.files import is_missing, read_file, read_yaml
from ddp_runner.rank.records import log_start, task_logger
from ddp_runner.rank.session import Session
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.tracking.run_record import RunFields, read_run_record, write_run_record
from ddp_runner.tracking.start_block import placement, shown_path


def logged_at(run_dir: RunDir, step: int) -> dict[str, Any]:
    """Return what metrics.jsonl has of a step: the epoch and the metrics; nothing if it has none.

    Damaged lines are left out.
    """
    found: dict[str, Any] = {}
    with suppress(OSError):  # the run has logged nothing
        for text in read_file(run_dir.metrics).splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and line.get("step") == step:
                    found |= line
    return found


def model_arguments(run_dir: RunDir) -> dict[str, Any]:
    """Return the facts of the data that a run's model was built with.

    Raises:
        UserError: the run has not noted them, or run.json cannot be read.
    """
    record = read_run_record(run_dir)
    arguments = record.get("model_arguments")
    if not isinstance(arguments, dict):
        why = "model_arguments, which a run of task=train notes; restore it"
        if "uses" in record:  # a loop of the user's own
            why = "model that anybody else can build; let its loop take it from run.model()"
        raise UserError(f"{run_dir.record} has no {why}")
    return arguments


def dataset_keys(run_dir: RunDir) -> Any:
    """Return the dataset's keys in a run's frozen config; None if it cannot be read."""
    with suppress(Exception):  # PyYAML raises errors of any kind for odd tags
        return read_yaml(run_dir.config)["dataset"]
    return None


def kept_tokenizer(run_dir: RunDir) -> TextTokenizer:
    """Return the tokenizer that a run of texts has kept.

    Raises:
        UserError: it has none, or it cannot be read.
    """
    folder = run_dir.path / "tokenizer"
    if is_missing(folder / TOKENIZER_FILE):
        raise UserError(
            f"{run_dir} has no {folder.name}/{TOKENIZER_FILE}, which a run of texts keeps; name a "
            "run of dataset=text"
        )
    return load_text_tokenizer(folder)


def validate_kept_files(run_dir: RunDir, files: Mapping[str, bytes], *, dataset: str) -> None:
    """Reject data that were made by another tokenizer than the run's.

    Raises:
        UserError: a file that the run has kept differs from the dataset's, or cannot be read.
    """
    for name, content in files.items():
        path = run_dir.path / name
        if is_missing(path):
            continue
        with os_errors(f"{path} cannot be read", fix="make it readable"):
            kept = read_file(path)
        if kept != content:
            raise UserError(
                f"dataset={dataset} made another {name} than the run has in {path}, so its samples "
                "would mean something else to the model; write "
                f"dataset.tokenizer={path.parent}"
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
    """Return what this rank logs to, with the facts of the task logged already.

    Args:
        session: of this rank.
        run_dir: of the run whose model is taken.
        weights: that are taken.
        data: what the task computes on, in words.
        notes: of the data, a sentence each.
        num_rounds: what the progress counts; 0: show none.
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
        log_start(session, facts, notes=notes)
        known = RunFields(
            of_run=str(run_dir),
            weights_step=weights.step,
            split=config.inference.split,
            warnings=list(session.job.warnings),
        )
        write_run_record(session.run_dir, **known)
    return task_logger(session, max_steps=num_rounds)
