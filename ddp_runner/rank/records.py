"""The start lines and the logger of a task, and the checkpoints of a run with a loop."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_runner.checkpoint.model_file import export_weights
from ddp_runner.checkpoint.shard_notes import Shards
from ddp_runner.checkpoint.writer import CheckpointWriter
from ddp_runner.errors import UserError, listed
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.rank.session import Session
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_logger import Logger, NullLogger, RunLogger
from ddp_runner.tracking.run_record import RunFields, write_run_record
from ddp_runner.tracking.start_block import fact_lines, shown_path, word_lines


def log_facts(
    session: Session, facts: Mapping[str, str], *, notes: Sequence[str] = (), explains: bool = False
) -> None:
    """Log warnings, notes and the facts of a task. A sweep prints the facts only once.

    With `explains`, add a glossary of distributed training, printed if the config is verbose. The
    log file of each job has everything.
    """
    config, job = session.config, session.job
    for line in (*(f"warning: {text}" for text in job.warnings), *notes):
        session.log(line)
    folder = "" if job.is_claimed else str(shown_path(session.run_dir.path))  # else already printed
    show = session.log if job.shows_header else log_to_file
    show(fact_lines({"run": folder, **facts}))
    if explains:
        device, versions = session.devices[0], job.provenance["versions"]
        glossary = word_lines(config, session.env, device=device, versions=versions)
        (show if config.verbose else log_to_file)(glossary)


def task_logger(session: Session, **keywords: Any) -> Logger:
    """Return this rank's logger; see ``RunLogger`` for the keywords."""
    if not session.env.is_rank_zero:
        return NullLogger()
    return RunLogger(session.run_dir, job=session.job, heartbeat=session.heartbeat, **keywords)


def export_model(
    run_dir: RunDir, specs: Mapping[str, Tensor], tensors: Iterable[Tensor], **facts: Any
) -> None:
    """Write rank 0's tensors to model.safetensors; for the facts see ``export_weights``.

    Collective if they are gathered one by one, as by ``whole_tensors``.
    """
    try:
        if dist.get_rank() == 0:
            digest = export_weights(run_dir.export, specs, tensors, **facts)
            write_run_record(run_dir, export_sha256=digest)
    finally:
        deque(tensors, maxlen=0)  # the other ranks wait for the rest


class Records:
    """The logger and the checkpoint writer of a run; ranks other than 0 write nothing.

    The constructor begins the run: it freezes the config, tells the launcher, and enters the stack.
    Call it after every check of the command: a resume that fails must leave the run as it was.

    Only rank 0's `fields` are written to run.json. `resume_step` is that of the checkpoint that the
    run resumes from; None: it starts at step 0. The stack closes both at the end of the run, also
    after an error. `logger` takes the metrics of steps and evaluations; the further keywords are
    those of ``task_logger``.
    """

    def __init__(
        self,
        session: Session,
        *,
        fields: RunFields,
        resume_step: int | None,
        stack: ExitStack,
        **keywords: Any,
    ) -> None:
        self._writer: CheckpointWriter | None = None
        wire = session.job.wire
        if session.env.is_rank_zero:
            session.run_dir.freeze(session.job)
            write_run_record(session.run_dir, **fields)
        if wire is not None:
            wire.send("ready")
        self.logger: Logger = task_logger(session, resume_step=resume_step, **keywords)
        stack.enter_context(self.logger)
        folder, settings, env = session.run_dir.checkpoints, session.config.checkpoint, session.env
        shards = None
        if settings.format == "sharded":
            if session.hosts_without_folder:
                raise UserError(
                    f"checkpoint.format=sharded needs a run folder that every machine sees, and "
                    f"{listed(session.hosts_without_folder)} does not see {session.run_dir}",
                    "put it on a shared disk, or write checkpoint.format=file",
                )
            shards = Shards(env.rank, env.world_size, wire)
        if env.is_rank_zero or shards is not None:
            writer = CheckpointWriter(folder, settings, wire=wire, log=session.log, shards=shards)
            self._writer = stack.enter_context(writer)
        if env.is_rank_zero and self._writer is not None and resume_step is not None:
            self._writer.retain(step=resume_step)

    def save(
        self, snapshot: Callable[..., dict[str, Any]], *, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Start to write a checkpoint. Collective: every rank must call.

        `snapshot` returns the state, and adds addresses to `copies` as ``gathered`` does.

        Raises:
            UserError: the state is not finite, or the previous save failed.
        """
        self.wait()  # keep a single state in memory
        if self._writer is not None:
            self._writer.begin(step)
        copies = set[int]()
        content = snapshot(copies=copies)
        if self._writer is not None:
            self._writer.save(content, step=step, metrics=dict(metrics), copies=copies)

    def wait(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            UserError: the checkpoint could not be saved.
        """
        if self._writer is not None:
            self._writer.wait()
