"""``task=plan``: traces a rank of a run that nobody starts, and prints what it needs and costs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from ddp_runner.config.planned_gpus import PlanConfig, filled_in, missing
from ddp_runner.config.schema import RunConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import counted, listed
from ddp_runner.job import Status
from ddp_runner.planning.rank_trace import RankTrace, make_mode, trace_rank
from ddp_runner.planning.step_times import StepTimes, step_times
from ddp_runner.rank.records import log_facts, task_logger
from ddp_runner.rank.session import Session, report_start
from ddp_runner.tracking.run_record import RunFields

GIB = 2**30
ALLOWANCE = 1.2  # reserved over live bytes: the allocator's gaps, NCCL's and cuBLAS's buffers
FIGURE = "{:<26} {:>10}"
CALL = "{:<26} {:>10} {:>10} {:>10}"


def run_plan(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Trace the rank that ``plan.rank`` names. A single process runs it, whatever the world size.

    Raises:
        UserError: the model or its training step reads values of tensors.
    """
    config = session.config
    report_start(session, step=0)
    batch, steps = config.batch, counted(config.train.grad_accum_steps, "micro-step")
    facts = {
        "plan of": f"{config.model.get('name')} in {config.train.precision}, "
        f"parallelism={config.parallelism.get('name')}",
        "ranks": f"{config.world_size}; traced is rank {config.plan.rank}, without a GPU",
        "batch": f"{batch.global_size} a step, {batch.per_rank} a forward, {steps}",
    }
    log_facts(session, facts)
    logger = task_logger(session)
    with logger:
        traces = [trace_rank(config, rank=rank, log=session.log) for rank in traced_ranks(config)]
        logger.step_done(step=0, epoch=0)  # the start-up ends here
        trace = max(traces, key=lambda one: one.peak)
        gpu = filled_in(config.plan, precision=config.train.precision)
        waits = bubble(config) if len(traces) > 1 else 0.0
        times = None if missing(gpu) else step_times(traces, gpu, bubble=waits)
        answer = verdict(trace, gpu)
        lines = [
            *table(trace),
            *(_stage_lines(traces, waits) if len(traces) > 1 else ()),
            *_time_lines(times, gpu),
            *filter(None, [answer]),
        ]
        session.log("\n".join(lines))
        logger.log(plan_metrics(trace, times), step=0, epoch=0)
        logger.finish(Status.COMPLETED, **_fields(config, trace, answer))
    return Status.COMPLETED


def traced_ranks(config: RunConfig) -> Sequence[int]:
    """Return the ranks that stand for all: ``plan.rank``, and those of the other stages."""
    layout = make_mode(config).layout(DistEnv(config.plan.rank, 0, config.world_size, 1))
    if not layout.has_stages:
        return [config.plan.rank]
    first = config.plan.rank // layout.model_ranks * layout.model_ranks
    return range(first, first + layout.model_ranks)


def bubble(config: RunConfig) -> float:
    """Return the share of a step in which a rank of a pipeline waits, if all stages are equal."""
    waits = len(traced_ranks(config)) - 1
    parts = config.train.grad_accum_steps * int(config.parallelism["stages_per_rank"])
    return waits / (parts + waits)


def _stage_lines(traces: Sequence[RankTrace], waits: float) -> Iterator[str]:
    yield CALL.format("stages of a pipeline", "rank", "peak, GiB", "TFLOP")
    for rank, trace in enumerate(traces):
        peak, flops = f"{trace.peak / GIB:,.3f}", f"{trace.flops / 1e12:,.3f}"
        yield CALL.format("", rank, peak, flops)
    yield f"each rank waits for {waits:.0%} of the step if all stages take the same time"


def table(trace: RankTrace) -> Iterator[str]:
    """Yield the lines of memory, FLOP and collectives, of at most 80 columns."""
    yield FIGURE.format("memory of a rank", "GiB")
    for name, size in (
        ("  parameters", trace.parameters),
        ("  gradients", trace.gradients),
        ("  optimizer state", trace.optimizer),
        ("  activations and others", trace.others),
        ("  peak of a step", trace.peak),
    ):
        yield FIGURE.format(name, f"{size / GIB:,.3f}")
    yield FIGURE.format("TFLOP of a rank and step", f"{trace.flops / 1e12:,.3f}")
    if trace.calls:
        yield CALL.format("collectives of a step", "calls", "GiB", "ranks")
    for one, count in sorted(trace.calls.items()):
        sent = f"{trace.sent[one] / GIB:,.3f}"
        yield CALL.format(f"  {one.kind}", f"{count:,}", sent, f"{one.group_size:,}")


def verdict(trace: RankTrace, gpu: PlanConfig) -> str | None:
    """Return whether a rank fits its GPU, in words; None without ``plan.memory_gib``."""
    if (most := gpu.memory_gib) is None:
        return None
    state = (trace.parameters + trace.gradients + trace.optimizer) / GIB
    peak, allowed = trace.peak / GIB, ALLOWANCE * trace.peak / GIB
    if state > most:
        kinds = "parameters, gradients and optimizer state"
        return f"does not fit {most:g} GiB: {state:.1f} GiB of {kinds}"
    if peak > most:
        return f"does not fit {most:g} GiB: {peak:.1f} GiB at the peak of a step"
    reason = f"allow x{ALLOWANCE} for the allocator and NCCL"
    if allowed > most:
        return f"may not fit: {peak:.1f} of {most:g} GiB ({reason}: {allowed:.1f})"
    return f"fits: {peak:.1f} of {most:g} GiB ({reason})"


def plan_metrics(trace: RankTrace, times: StepTimes | None) -> dict[str, float]:
    """Return the metrics of a plan for metrics.jsonl."""
    metrics = {
        "plan/parameters_gib": trace.parameters / GIB,
        "plan/gradients_gib": trace.gradients / GIB,
        "plan/optimizer_gib": trace.optimizer / GIB,
        "plan/peak_gib": trace.peak / GIB,
        "plan/flops": trace.flops,
        "plan/collective_gib": sum(trace.sent.values()) / GIB,
    }
    if times is not None:
        metrics["plan/step_ms"] = times.not_overlapped
        metrics["plan/step_ms_overlapped"] = times.overlapped
    return metrics


def _time_lines(times: StepTimes | None, gpu: PlanConfig) -> Iterator[str]:
    if times is None:
        yield f"no times without {listed(missing(gpu))}: write plan.gpu=h100"
        return
    yield FIGURE.format("time of a step", "ms")
    yield FIGURE.format("  computing", f"{times.computing:,.1f}")
    yield FIGURE.format("  sending", f"{times.sending:,.1f}")
    yield FIGURE.format("  if nothing overlaps", f"{times.not_overlapped:,.1f}")
    yield FIGURE.format("  if all overlaps", f"{times.overlapped:,.1f}")


def _fields(config: RunConfig, trace: RankTrace, answer: str | None) -> RunFields:
    sent = [
        asdict(one) | {"calls": trace.calls[one], "bytes": trace.sent[one]} for one in trace.calls
    ]
    return RunFields(
        step=0,
        epoch=0,
        num_devices=config.world_size,
        num_parameters=trace.num_parameters,
        planned_collectives=sent,
        verdict=answer,
    )
