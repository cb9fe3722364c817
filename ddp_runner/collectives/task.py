"""``task=collectives``: verifies each collective and measures it at each message size."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from ddp_runner.collectives.messages import prepare, unsupported_reason
from ddp_runner.collectives.operations import OPERATIONS, Variant
from ddp_runner.collectives.timing import Measurement, measure
from ddp_runner.config.schema import OPS, CollectivesConfig
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.rank.rank_log import log_to_file
from ddp_runner.rank.session import Session, note_restart
from ddp_runner.tracking.run_logger import Logger, NullLogger, RunLogger
from ddp_runner.tracking.start_block import fact_lines, gpu_names, ranks_on_nodes, shown_path

DEFAULT_REDUCE_OPS = ("sum", "mean", "max")
TABLE_HEAD = (
    f"{'operation':<22} {'dtype':<8} {'bytes':>13} {'median us':>12} {'p95':>12} {'min':>12} "
    f"{'max':>12} {'algbw GB/s':>11} {'busbw GB/s':>11}"
)


def run_collectives(session: Session, stop_requested: Callable[[], bool]) -> str:
    """Measure what the config names; return completed or preempted.

    Collective: every rank must call.

    Raises:
        UserError: the backend does not support a reduction that the config names.
        WrongResultError: a rank's result was wrong; raised on every rank.
    """
    env, device, run_dir = session.env, session.devices[0], session.run_dir
    config, backend = session.config.collectives, session.config.backend.name
    note_restart(session, step=0)
    for warning in session.job.warnings:
        session.log(f"warning: {warning}")
    (session.log if session.job.shows_header else log_to_file)(_start_block(session))
    reasons = {
        variant: unsupported_reason(variant, device=device, backend=backend)
        for variant in variants(config)
    }
    validate_reduce_ops(config, reasons, backend=backend)
    logger: Logger = NullLogger()
    if env.is_rank_zero:
        job = session.job
        logger = RunLogger(run_dir, started_at=job.started_at, title=job.title)
    logger.step_done(step=0, epoch=0)  # the start-up ends here

    measurements: list[Measurement] = []
    status = Status.COMPLETED
    session.log(TABLE_HEAD)
    with logger:
        for variant, num_bytes in _messages(session, reasons):
            prepared = prepare(variant, num_bytes=num_bytes, device=device, backend=backend)
            measured = measure(
                variant, prepared, config, device=device, stop_requested=stop_requested
            )
            if measured is None:
                status = Status.PREEMPTED
                break
            measurements.append(measured)
            session.log(_table_line(measured))
            logger.log(_metrics(variant, measured), step=measured.bytes, epoch=0)
        logger.finish(
            status,
            step=max((one.bytes for one in measurements), default=0),
            epoch=0,
            collectives=[asdict(one) for one in measurements],
            not_in_backend=[
                {**asdict(variant), "reason": reason}
                for variant, reason in reasons.items()
                if reason is not None
            ],
        )
    return status


def variants(config: CollectivesConfig) -> Iterator[Variant]:
    """Yield each operation with each dtype and, if it reduces, each reduction."""
    for op in config.ops or OPS:
        if op == "barrier":
            yield Variant(op)
            continue
        reductions = config.reduce_ops or DEFAULT_REDUCE_OPS
        for dtype in config.dtypes:
            for reduce_op in reductions if OPERATIONS[op].reduces else (None,):
                yield Variant(op, dtype, reduce_op)


def _messages(
    session: Session, reasons: Mapping[Variant, str | None]
) -> Iterator[tuple[Variant, int]]:
    """Yield each supported variant with each size in bytes; log the unsupported ones."""
    for variant, reason in reasons.items():
        if reason is not None:
            backend = session.config.backend.name
            session.log(f"{_title(variant)} unsupported by {backend}: {reason}")
            continue
        for num_bytes in message_sizes(session.config.collectives) if variant.dtype else (0,):
            yield variant, num_bytes


def message_sizes(asked: CollectivesConfig) -> list[int]:
    """Return the sizes to measure in bytes, ascending; max_bytes is always among them."""
    sizes, size = [], asked.min_bytes
    while size < asked.max_bytes:
        sizes.append(size)
        size *= asked.size_factor
    return [*sizes, asked.max_bytes]


def validate_reduce_ops(
    config: CollectivesConfig, reasons: Mapping[Variant, str | None], *, backend: str
) -> None:
    """Refuse a named reduction that the backend supports for none of the dtypes.

    Raises:
        UserError: raised on every rank, with the reductions that can stay.
    """
    for reduce_op in config.reduce_ops or ():
        found = [reason for variant, reason in reasons.items() if variant.reduce_op == reduce_op]
        if found and None not in found:
            others = [name for name in config.reduce_ops or () if name != reduce_op]
            raise UserError(
                f"collectives.reduce_ops ({reduce_op}) is unsupported by {backend} for "
                f"{', '.join(config.dtypes)} ({found[0]}); "
                f"write collectives.reduce_ops=[{','.join(others) or 'sum'}]"
            )


def _start_block(session: Session) -> str:
    config, code = session.config, session.job.code
    asked, sizes = config.collectives, message_sizes(config.collectives)
    facts = {
        "run": "" if session.job.run_dir else str(shown_path(session.run_dir.path)),
        "collectives": f"{config.backend.name} (timeout {config.backend.timeout_s:g} s), "
        f"{ranks_on_nodes(session.env)}",
        "device": gpu_names(session.devices),
        "messages": f"{', '.join(f'{size:,}' for size in sizes)} bytes",
        "calls": f"{asked.steps} timed of each, after {asked.warmup_steps} to warm up",
        "versions": f"torch {code['versions']['torch']}, Python {code['versions']['python']}",
    }
    return fact_lines(facts)


def _title(variant: Variant | Measurement) -> str:
    name = " ".join(filter(None, (variant.op, variant.reduce_op)))
    return f"{name:<22} {variant.dtype or '-':<8}"


def _table_line(measured: Measurement) -> str:
    latencies = " ".join(
        f"{measured.latency_us[key]:>12,.1f}" for key in ("median", "p95", "min", "max")
    )
    line = f"{_title(measured)} {measured.bytes:>13,} {latencies}"
    if measured.algbw_gb_per_s is None:
        return line
    return f"{line} {measured.algbw_gb_per_s:>11.4f} {measured.busbw_gb_per_s:>11.4f}"


def _metrics(variant: Variant, measured: Measurement) -> dict[str, float]:
    metrics = {f"latency_us_{name}": value for name, value in measured.latency_us.items()}
    for name in ("algbw_gb_per_s", "busbw_gb_per_s"):
        if (bandwidth := getattr(measured, name)) is not None:
            metrics[name] = bandwidth
    return {f"collectives/{variant}/{name}": value for name, value in metrics.items()}
