"""What the tasks that take a run's model print at their start, and what they log to."""

from collections.abc import Sequence

from ddp_runner.inference.model import TrainedModel
from ddp_runner.rank.session import Session
from ddp_runner.rank.task_log import log_start, task_logger
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.tracking.run_record import RunFields, write_run_record
from ddp_runner.tracking.start_block import count_of, placement, shown_path

NOUNS = {"train": "training", "eval": "evaluation"}


def open_logger(session: Session, model: TrainedModel, *, num_rounds: int = 0) -> Logger:
    """Return what this rank logs to, with the facts of the task logged already.

    Args:
        session: of this rank.
        model: of the run.
        num_rounds: what the progress counts; 0: show none.
    """
    work = model.work
    counts = [
        f"{count_of(split.num_samples)} {NOUNS[name]}" for name, split in model.splits.items()
    ]
    return open_run_logger(
        session,
        of_run=model.run_dir,
        weights=f"step {model.step}, from {model.weights_name}",
        step=model.step,
        data=f"{work.dataset.name}, {' and '.join(counts)} samples",
        notes=work.dataset.notes,
        num_rounds=num_rounds,
    )


def open_run_logger(
    session: Session,
    *,
    of_run: RunDir,
    weights: str,
    step: int,
    data: str,
    notes: Sequence[str] = (),
    num_rounds: int = 0,
) -> Logger:
    """Return what this rank logs to; what the task takes of a run is given in words."""
    config = session.config
    if not session.env.is_rank_zero:
        return task_logger(session)
    facts = {
        "task": f"{config.task} the model of {shown_path(of_run.path)}",
        "model": f"{config.model.get('name')}, {weights}",
        "data": data,
        **placement(config, session.env, session.devices),
    }
    log_start(session, facts, notes=notes)
    known = RunFields(
        of_run=str(of_run),
        weights_step=step,
        split=config.inference.split,
        warnings=list(session.job.warnings),
    )
    write_run_record(session.run_dir, **known)
    return task_logger(session, max_steps=num_rounds)
