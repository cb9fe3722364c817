"""What the tasks that take a run's model print at their start, and what they log to."""

from collections.abc import Sequence

from ddp_runner.checkpoint.weights import Weights
from ddp_runner.rank.records import log_start, task_logger
from ddp_runner.rank.session import Session
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import Logger
from ddp_runner.tracking.run_record import RunFields, write_run_record
from ddp_runner.tracking.start_block import placement, shown_path


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
