"""What every task prints at its start, and what it logs to."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.rank.session import Session
from ddp_runner.tracking.run_logger import Logger, NullLogger, RunLogger
from ddp_runner.tracking.start_block import fact_lines, shown_path, word_lines


def log_start(
    session: Session, facts: Mapping[str, str], *, notes: Sequence[str] = (), explains: bool = False
) -> None:
    """Log warnings, notes and the facts of a task; a sweep shows the facts once.

    With `explains` also what the words of distributed training mean, if the config asks for it. The
    log file has all of it, of each job of a sweep.
    """
    config, job = session.config, session.job
    for line in (*(f"warning: {text}" for text in job.warnings), *notes):
        session.log(line)
    folder = "" if job.is_claimed else str(shown_path(session.run_dir.path))  # else it is printed
    show = session.log if job.shows_header else log_to_file
    show(fact_lines({"run": folder, **facts}))
    if explains:
        device, versions = session.devices[0], job.code["versions"]
        words = word_lines(config, session.env, device=device, versions=versions)
        (show if config.verbose else log_to_file)(words)


def task_logger(session: Session, **shown: Any) -> Logger:
    """Return what this rank logs to; `shown` are further keywords of ``RunLogger``."""
    if not session.env.is_rank_zero:
        return NullLogger()
    return RunLogger(session.run_dir, job=session.job, heartbeat=session.heartbeat, **shown)
