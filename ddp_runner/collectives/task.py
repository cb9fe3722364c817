"""``task=collectives``: how long each collective takes at each size, and whether it is right.

Called by ``worker``. What is called is in ``collective_ops``, how it is timed in
``collective_timing``, what may be asked for in ``collectives_config``.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict

import torch

from ddp_runner.collectives.messages import prepare, refusal
from ddp_runner.collectives.operations import OPERATIONS, Variant
from ddp_runner.collectives.timing import Row, measure
from ddp_runner.config.schema import OPS, CollectivesConfig
from ddp_runner.errors import UserError
from ddp_runner.job import Status
from ddp_runner.rank.session import Session, note_restart
from ddp_runner.tracking.run_logger import end_summary
from ddp_runner.tracking.times import begin_anew, end_session, note_startup
from ddp_runner.tracking.tracker import NullTracker, Tracker

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
    session.log(_start_block(session))
    refusals = {
        variant: refusal(variant, device=device, backend=backend) for variant in variants(asked)
    }
    validate_reduce_ops(asked, refusals, backend=backend)
    tracker: Tracker | NullTracker = NullTracker()
    if env.is_rank_zero:
        config_text = (run_dir / ".hydra" / "config.yaml").read_text(encoding="utf-8")
        tracker = Tracker(run_dir, config_text=config_text)
        begin_anew(run_dir)
        note_startup(run_dir)

    rows: list[Row] = []
    status = Status.COMPLETED
    session.log(TABLE_HEAD)
    with closing(tracker):
        for variant, num_bytes in _messages(session, refusals):
            prepared = prepare(variant, num_bytes=num_bytes, device=device, backend=backend)
            row = measure(variant, prepared, asked, device=device, stop_requested=stop_requested)
            if row is None:
                status = Status.PREEMPTED
                break
            rows.append(row)
            session.log(_table_line(row))
            tracker.log(_metrics(variant, row), step=row.bytes, epoch=0)
    if env.is_rank_zero:
        _record_end(session, status, rows, refusals, metrics=tracker.last_metrics)
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
    config, env, device = session.config, session.env, session.devices[0]
    asked, code = config.collectives, session.job.code
    place = str(device)
    if device.type == "cuda":
        place += f" ({torch.cuda.get_device_name(device)})"
    rows = {
        "run": str(session.run_dir),
        "collectives": f"backend {config.backend.name} (timeout {config.backend.timeout_s:g} s), "
        f"rank 0 on {place}",
        "world size": f"{env.world_size} ranks on {env.num_nodes} node(s), "
        f"{env.local_world_size} a node, {torch.get_num_threads()} CPU thread(s) a rank",
        "messages": f"{', '.join(f'{size:,}' for size in message_sizes(asked))} bytes, "
        f"{asked.warmup_steps} warm-up and {asked.steps} timed calls of each",
        "versions": f"torch {code['versions']['torch']}, Python {code['versions']['python']}",
    }
    warnings = [f"warning: {one}" for one in session.job.warnings]
    return "\n".join([*warnings, *(f"{name:<12} {text}" for name, text in rows.items())])


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


def _record_end(
    session: Session,
    status: str,
    rows: list[Row],
    refusals: Mapping[Variant, str | None],
    *,
    metrics: Mapping[str, float | None],
) -> None:
    end_session(
        session.run_dir,
        status=status,
        epoch=0,
        step=max((row.bytes for row in rows), default=0),
        metrics=dict(metrics),
        collectives=[asdict(row) for row in rows],
        not_in_backend=[
            {**asdict(variant), "reason": reason}
            for variant, reason in refusals.items()
            if reason is not None
        ],
    )
    wall_s = time.time() - session.job.started_at
    print(end_summary(status, metrics, wall_s=wall_s, run_dir=session.run_dir), flush=True)
