"""``task=collectives``: verifies each collective and measures it at each message size."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

from ddp_runner.collectives.measurement import (
    Measurement,
    prepare,
    summarize,
    time_calls,
    unsupported_reason,
)
from ddp_runner.collectives.operations import OPERATIONS, Variant
from ddp_runner.config.sections import OPS, CollectivesConfig
from ddp_runner.distributed import gather_objects
from ddp_runner.job import Status
from ddp_runner.rank.records import log_facts, task_logger
from ddp_runner.rank.session import Session, report_start
from ddp_runner.tracking.start_block import gpu_names, ranks_on_nodes

ROW = "{:<19} {:<8} {:>11} {:>9} {:>9} {:>8} {:>8}"
HEAD = ROW.format("operation", "dtype", "bytes", "median us", "p95 us", "alg GB/s", "bus GB/s")


def run_collectives(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Measure the config's operations. Collective: every rank must call.

    Raises:
        WrongResultError: a rank's result was wrong; raised on every rank.
    """
    job, device, backend = session.job, session.devices[0], session.config.backend.name
    config = session.config.collectives
    report_start(session, step=0)
    sizes = message_sizes(config)
    facts = {
        "collectives": f"{backend}, {ranks_on_nodes(session.env)}",
        "device": gpu_names(session.devices),
        "messages": f"{', '.join(f'{size:,}' for size in sizes)} bytes",
        "calls": f"{config.steps} timed of each, after {config.warmup_steps} to warm up",
    }
    log_facts(session, facts, explains=True)
    absent, messages = list[dict[str, str | None]](), list[tuple[Variant, int]]()
    for variant in variants(config):
        reason = unsupported_reason(variant, device=device)
        if reason is None:
            messages += [(variant, size) for size in (sizes if variant.dtype else [0])]
        else:
            absent.append({**asdict(variant), "reason": reason})
            session.log(f"{variant} unsupported by {backend}: {reason}")
    # Steps are bytes here: a sweep's dashboard would show curves of its calibration (job 0).
    logger = task_logger(session, shows_curves=job.number > 0)
    logger.step_done(step=0, epoch=0)  # the start-up ends here
    measurements, status = list[Measurement](), Status.COMPLETED
    session.log(HEAD)
    with logger:
        for variant, num_bytes in messages:
            prepared = prepare(variant, num_bytes=num_bytes, device=device)
            prepared.verify()
            latencies = time_calls(prepared, config, stop_requested=stop_requested)
            if latencies is None:
                status = Status.PREEMPTED
                break
            measured = summarize(variant, prepared.num_bytes, gather_objects(latencies))
            prepared.verify()
            measurements.append(measured)
            session.log(_row(measured))
            logger.log(_metrics(variant, measured), step=measured.bytes, epoch=0)
        logger.finish(
            status,
            step=max((measurement.bytes for measurement in measurements), default=0),
            epoch=0,
            collectives=[asdict(measurement) for measurement in measurements],
            not_in_backend=absent,
        )
    return status


def variants(config: CollectivesConfig) -> Iterator[Variant]:
    """Yield each operation with each dtype and, if it reduces, each reduction."""
    for op in config.ops or OPS:
        if op == "barrier":
            yield Variant(op)
            continue
        reductions = config.reduce_ops or ("sum", "mean", "max")
        for dtype in config.dtypes:
            for reduce_op in reductions if OPERATIONS[op].reduces else (None,):
                yield Variant(op, dtype, reduce_op)


def message_sizes(config: CollectivesConfig) -> list[int]:
    """Return the sizes to measure in bytes, ascending, including max_bytes."""
    sizes, size = [], config.min_bytes
    while size < config.max_bytes:
        sizes.append(size)
        size *= config.size_factor
    return [*sizes, config.max_bytes]


def _row(measured: Measurement) -> str:
    rates = (measured.algbw_gb_per_s, measured.busbw_gb_per_s)
    return ROW.format(
        " ".join(filter(None, (measured.op, measured.reduce_op))),
        measured.dtype or "-",
        f"{measured.bytes:,}",
        *(f"{measured.latency_us[key]:,.0f}" for key in ("median", "p95")),
        *("" if rate is None else f"{rate:.4f}" for rate in rates),
    ).rstrip()


def _metrics(variant: Variant, measured: Measurement) -> dict[str, float]:
    numbers = {f"latency_us_{name}": value for name, value in measured.latency_us.items()}
    if measured.algbw_gb_per_s is not None and measured.busbw_gb_per_s is not None:
        numbers["algbw_gb_per_s"] = measured.algbw_gb_per_s
        numbers["busbw_gb_per_s"] = measured.busbw_gb_per_s
    return {f"collectives/{variant}/{name}": value for name, value in numbers.items()}
