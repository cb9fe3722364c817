"""``task=collectives``: how long each collective takes at each size, and whether it is right.

Called by ``worker``. What is called is in ``collective_ops``, how it is timed in
``collective_timing``, what may be asked for in ``collectives_config``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from ddp_runner.collectives.messages import prepare, refusal
from ddp_runner.collectives.operations import OPERATIONS, Variant
from ddp_runner.collectives.timing import Row, measure
from ddp_runner.config.collectives import OPS, message_sizes
from ddp_runner.config.schema import CollectivesConfig
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.rank.session import Session, note_restart
from ddp_runner.tracking.run_logger import NullLogger, RunLogger
from ddp_runner.tracking.start_block import fact_lines, gpu_names, ranks_on_nodes, shown_path

DEFAULT_REDUCE_OPS = ("sum", "mean", "max")
TABLE_HEAD = (
    f"{'operation':<22} {'dtype':<8} {'bytes':>13} {'median us':>12} {'p95':>12} {'min':>12} "
    f"{'max':>12} {'algbw GB/s':>11} {'busbw GB/s':>11}"
)


def run_collectives(session: Session, stop_requested: Callable[[], bool]) -> str:
    """Measure what the config asks for; return completed or preempted. Collective: every rank.

    Raises:
        UserError: a reduction is asked for by name that the backend does not have.
        WrongResultError: a rank's result was wrong; on every rank.
    """
    env, device, run_dir = session.env, session.devices[0], session.run_dir
    asked, backend = session.config.collectives, session.config.backend.name
    note_restart(session, step=0)
    for warning in session.job.warnings:
        session.log(f"warning: {warning}")
    (session.log if session.job.shows_header else log_to_file)(_start_block(session))
    refusals = {
        variant: refusal(variant, device=device, backend=backend) for variant in variants(asked)
    }
    validate_reduce_ops(asked, refusals, backend=backend)
    logger: NullLogger | RunLogger = NullLogger()
    if env.is_rank_zero:
        job = session.job
        logger = RunLogger(run_dir, started_at=job.started_at, title=job.title)
    logger.step_done(step=0, epoch=0)  # the start-up ends here

    rows: list[Row] = []
    status = Status.COMPLETED
    session.log(TABLE_HEAD)
    with logger:
        for variant, num_bytes in _messages(session, refusals):
            prepared = prepare(variant, num_bytes=num_bytes, device=device, backend=backend)
            row = measure(variant, prepared, asked, device=device, stop_requested=stop_requested)
            if row is None:
                status = Status.PREEMPTED
                break
            rows.append(row)
            session.log(_table_line(row))
            logger.log(_metrics(variant, row), step=row.bytes, epoch=0)
        logger.finish(
            status,
            step=max((row.bytes for row in rows), default=0),
            epoch=0,
            collectives=[asdict(row) for row in rows],
            not_in_backend=[
                {**asdict(variant), "reason": reason}
                for variant, reason in refusals.items()
                if reason is not None
            ],
        )
    return status


def variants(asked: CollectivesConfig) -> Iterator[Variant]:
    """Yield what is asked for: each operation with each dtype and, if it reduces, reduction."""
    for op in asked.ops or OPS:
        if op == "barrier":
            yield Variant(op)
            continue
        reductions = asked.reduce_ops or DEFAULT_REDUCE_OPS
        for dtype in asked.dtypes:
            for reduce_op in reductions if OPERATIONS[op].reduces else (None,):
                yield Variant(op, dtype, reduce_op)


def _messages(
    session: Session, refusals: Mapping[Variant, str | None]
) -> Iterator[tuple[Variant, int]]:
    """Yield each variant with each size in bytes; say what the backend cannot do."""
    for variant, reason in refusals.items():
        if reason is not None:
            backend = session.config.backend.name
            session.log(f"{_title(variant)} not in {backend}: {reason}")
            continue
        for num_bytes in message_sizes(session.config) if variant.dtype else (0,):
            yield variant, num_bytes


def validate_reduce_ops(
    asked: CollectivesConfig, refusals: Mapping[Variant, str | None], *, backend: str
) -> None:
    """Refuse a reduction that is asked for by name and that the backend has for no dtype.

    Raises:
        UserError: on every rank, naming the reduction and those that can stay.
    """
    for reduce_op in asked.reduce_ops or ():
        reasons = [why for variant, why in refusals.items() if variant.reduce_op == reduce_op]
        if reasons and None not in reasons:
            others = [one for one in asked.reduce_ops or () if one != reduce_op]
            raise UserError(
                f"collectives.reduce_ops ({reduce_op}) is not in {backend} for "
                f"{', '.join(asked.dtypes)} ({reasons[0]}); "
                f"write collectives.reduce_ops=[{','.join(others) or 'sum'}]"
            )


def _start_block(session: Session) -> str:
    config, code = session.config, session.job.code
    asked, sizes = config.collectives, message_sizes(config)
    facts = {
        "run": "" if session.job.run_dir else str(shown_path(session.run_dir)),
        "collectives": f"{config.backend.name} (timeout {config.backend.timeout_s:g} s), "
        f"{ranks_on_nodes(session.env)}",
        "device": gpu_names(session.devices),
        "messages": f"{', '.join(f'{size:,}' for size in sizes)} bytes",
        "calls": f"{asked.steps} timed of each, after {asked.warmup_steps} to warm up",
        "versions": f"torch {code['versions']['torch']}, Python {code['versions']['python']}",
    }
    return fact_lines(facts)


def _title(variant: Variant | Row) -> str:
    name = " ".join(filter(None, (variant.op, variant.reduce_op)))
    return f"{name:<22} {variant.dtype or '-':<8}"


def _table_line(row: Row) -> str:
    latencies = " ".join(
        f"{row.latency_us[key]:>12,.1f}" for key in ("median", "p95", "min", "max")
    )
    line = f"{_title(row)} {row.bytes:>13,} {latencies}"
    if row.algbw_gb_per_s is None:
        return line
    return f"{line} {row.algbw_gb_per_s:>11.4f} {row.busbw_gb_per_s:>11.4f}"


def _metrics(variant: Variant, row: Row) -> dict[str, float]:
    metrics = {f"latency_us_{name}": value for name, value in row.latency_us.items()}
    if row.algbw_gb_per_s is not None and row.busbw_gb_per_s is not None:
        metrics |= {"algbw_gb_per_s": row.algbw_gb_per_s, "busbw_gb_per_s": row.busbw_gb_per_s}
    return {f"collectives/{variant}/{name}": value for name, value in metrics.items()}
