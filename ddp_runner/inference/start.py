"""What the tasks that take a run's model print at their start, and what they log to."""

from collections.abc import Sequence

from ddp_runner.data.streams import num_samples
from ddp_runner.inference.model import TrainedModel
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.rank.session import Session
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import Logger, NullLogger, RunLogger
from ddp_runner.tracking.run_record import RunFields, write_run_record
from ddp_runner.tracking.start_block import fact_lines, gpu_names, ranks_on_nodes, shown_path

NOUNS = {"train": "training", "eval": "evaluation"}


def open_logger(session: Session, model: TrainedModel, *, num_rounds: int = 0) -> Logger:
    """Return what this rank logs to, with the facts of the task logged already.

    Args:
        session: of this rank.
        model: of the run.
        num_rounds: what the progress counts; 0: show none.
    """
    setup = model.setup
    counts = [
        f"{'a stream of' if (count := num_samples(split)) is None else f'{count:,}'} {NOUNS[name]}"
        for name, split in model.splits.items()
    ]
    return open_run_logger(
        session,
        of_run=model.run_dir,
        weights=f"step {model.step}, from {model.weights_name}",
        step=model.step,
        data=f"{setup.dataset.name}, {' and '.join(counts)} samples",
        notes=setup.dataset.notes,
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
    if not session.env.is_rank_zero:
        return NullLogger()
    config, job = session.config, session.job
    for note in (*(f"warning: {text}" for text in job.warnings), *notes):
        session.log(note)
    facts = {
        "run": "" if job.run_dir else str(shown_path(session.run_dir.path)),
        "task": f"{config.task} the model of {shown_path(of_run.path)}",
        "model": f"{config.model.get('name')}, {weights}",
        "data": data,
        "parallelism": f"{config.parallelism.get('name')}, {config.backend.name}, "
        f"{ranks_on_nodes(session.env)}",
        "device": gpu_names(session.devices),
    }
    (session.log if job.shows_header else log_to_file)(fact_lines(facts))
    known = RunFields(
        of_run=str(of_run),
        weights_step=step,
        split=config.inference.split,
        warnings=list(job.warnings),
    )
    write_run_record(session.run_dir, **known)
    return RunLogger(
        session.run_dir,
        job=job,
        started_at=job.started_at,
        max_steps=num_rounds,
        title=job.title,
        heartbeat=session.heartbeat,
    )
