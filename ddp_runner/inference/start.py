"""What evaluate, predict and export print at their start, and what they log to."""

from ddp_runner.data.streams import num_samples
from ddp_runner.inference.model import TrainedModel
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.rank.session import Session
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
    if not session.env.is_rank_zero:
        return NullLogger()
    config, job, setup = session.config, session.job, model.setup
    for note in (*(f"warning: {text}" for text in job.warnings), *setup.dataset.notes):
        session.log(note)
    counts = [
        f"{'a stream of' if (count := num_samples(split)) is None else f'{count:,}'} {NOUNS[name]}"
        for name, split in setup.splits.items()
    ]
    facts = {
        "run": "" if job.run_dir else str(shown_path(session.run_dir.path)),
        "task": f"{config.task} the model of {shown_path(model.run_dir.path)}",
        "model": f"{config.model.get('name')}, step {model.step}, from {model.weights_name}",
        "data": f"{setup.dataset.name}, {' and '.join(counts)} samples",
        "parallelism": f"{config.parallelism.get('name')}, {config.backend.name}, "
        f"{ranks_on_nodes(session.env)}",
        "device": gpu_names(session.devices),
    }
    (session.log if job.shows_header else log_to_file)(fact_lines(facts))
    known = RunFields(
        of_run=str(model.run_dir),
        weights_step=model.step,
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
