"""``task=collectives``: verifies each collective and measures it at each message size."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from ddp_runner.collectives.measurement import Measurement, measure, prepare, unsupported_reason
from ddp_runner.collectives.operations import OPERATIONS, Variant
from ddp_runner.config.measuring import OPS, CollectivesConfig
from ddp_runner.job import Status
from ddp_runner.rank.session import Session, note_restart
from ddp_runner.rank.task_log import log_start, task_logger
from ddp_runner.tracking.start_block import gpu_names, ranks_on_nodes

DEFAULT_REDUCE_OPS = ("sum", "mean", "max")
TABLE_HEAD = (
    f"{'operation':<19} {'dtype':<8} {'bytes':>11} {'median us':>9} {'p95 us':>9} "
    f"{'alg GB/s':>8} {'bus GB/s':>8}"
)


def run_collectives(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Measure what the config names; return completed or preempted.

    Collective: every rank must call.

    Raises:
        WrongResultError: a rank's result was wrong; raised on every rank.
    """
    job, device = session.job, session.devices[0]
    config, backend = session.config.collectives, session.config.backend.name
    note_restart(session, step=0)
    log_start(session, _facts(session))
    reasons = {
        variant: unsupported_reason(variant, device=device, backend=backend)
        for variant in variants(config)
    }
    # Steps are bytes here: curves of a calibration would be drawn beside those of its sweep.
    logger = task_logger(session, shows_curves=job.number > 0)
    logger.step_done(step=0, epoch=0)  # the start-up ends here
    measurements, status = list[Measurement](), Status.COMPLETED
    session.log(TABLE_HEAD)
    with logger:
        for variant, num_bytes in _messages(session, reasons):
            prepared = prepare(variant, num_bytes=num_bytes, device=device, backend=backend)
            measured = measure(prepared, config, stop_requested=stop_requested)
            if measured is None:
                status = Status.PREEMPTED
                break
            measurements.append(measured)
            session.log(_table_line(measured))
            logger.log(_metrics(variant, measured), step=measured.bytes, epoch=0)
        absent = [{**asdict(one), "reason": why} for one, why in reasons.items() if why is not None]
        logger.finish(
            status,
            step=max((one.bytes for one in measurements), default=0),
            epoch=0,
            collectives=[asdict(one) for one in measurements],
            not_in_backend=absent,
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
    sizes, backend = message_sizes(session.config.collectives), session.config.backend.name
    for variant, reason in reasons.items():
        if reason is None:
            yield from ((variant, num_bytes) for num_bytes in (sizes if variant.dtype else (0,)))
        else:
            session.log(f"{_title(variant)} unsupported by {backend}: {reason}")


def message_sizes(asked: CollectivesConfig) -> list[int]:
    """Return the sizes to measure in bytes, ascending; max_bytes is always among them."""
    sizes, size = [], asked.min_bytes
    while size < asked.max_bytes:
        sizes.append(size)
        size *= asked.size_factor
    return [*sizes, asked.max_bytes]


def _facts(session: Session) -> dict[str, str]:
    config, code = session.config, session.job.code
    asked, sizes = config.collectives, message_sizes(config.collectives)
    return {
        "collectives": f"{config.backend.name} (timeout {config.backend.timeout_s:g} s), "
        f"{ranks_on_nodes(session.env)}",
        "device": gpu_names(session.devices),
        "messages": f"{', '.join(f'{size:,}' for size in sizes)} bytes",
        "calls": f"{asked.steps} timed of each, after {asked.warmup_steps} to warm up",
        "versions": f"torch {code['versions']['torch']}, Python {code['versions']['python']}",
    }


def _title(variant: Variant | Measurement) -> str:
    name = " ".join(filter(None, (variant.op, variant.reduce_op)))
    return f"{name:<19} {variant.dtype or '-':<8}"


def _table_line(measured: Measurement) -> str:
    latencies = " ".join(f"{measured.latency_us[name]:>9,.0f}" for name in ("median", "p95"))
    line = f"{_title(measured)} {measured.bytes:>11,} {latencies}"
    if measured.algbw_gb_per_s is None:
        return line
    return f"{line} {measured.algbw_gb_per_s:>8.4f} {measured.busbw_gb_per_s:>8.4f}"


def _metrics(variant: Variant, measured: Measurement) -> dict[str, float]:
    numbers = {
        **{f"latency_us_{name}": value for name, value in measured.latency_us.items()},
        "algbw_gb_per_s": measured.algbw_gb_per_s,
        "busbw_gb_per_s": measured.busbw_gb_per_s,
    }
    return {
        f"collectives/{variant}/{name}": value
        for name, value in numbers.items()
        if value is not None
    }
