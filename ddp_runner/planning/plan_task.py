"""``task=plan``: traces a rank of a run that nobody starts, and prints what it needs and costs."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch

from ddp_runner.config.planned_gpus import PlanConfig, filled_in, missing
from ddp_runner.config.schema import RunConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import counted
from ddp_runner.job import Status
from ddp_runner.planning.rank_trace import RankTrace, trace_rank
from ddp_runner.rank.records import log_facts, task_logger
from ddp_runner.rank.session import Session, make_mode, report_start

GIB = 2**30
ALLOWANCE = 1.2  # reserved over live bytes: the allocator's gaps, NCCL's and cuBLAS's buffers
MEMORY = "parameters", "gradients", "optimizer state", "activations and others", "peak of a step"
FIGURE = "{:<26} {:>10}"
CALL = "{:<26} {:>10} {:>10} {:>10}"


def run_plan(session: Session, stop_requested: Callable[[], bool]) -> Status:
    """Trace the rank that ``plan.rank`` names. A single process runs it, whatever the world size.

    Raises:
        UserError: the model or its training step reads values of tensors.
    """
    config = session.config
    report_start(session, step=0)
    ranks = traced_ranks(config)
    which = f"traced is rank {ranks[0]}"
    if len(ranks) > 1:
        which = f"below is the largest of {ranks[0]} to {ranks[-1]}"
    batch, steps = config.batch, counted(config.train.grad_accum_steps, "micro-step")
    facts = {
        "plan of": f"{config.model.get('name')} in {config.train.precision}, "
        f"parallelism={config.parallelism.get('name')}",
        "ranks": f"{config.world_size}; {which}, without a GPU",
        "batch": f"{batch.global_size} a step, {batch.per_rank} a forward, {steps}",
    }
    log_facts(session, facts)
    if torch.__version__ < "2.15" and "tensor_parallel_size" in config.parallelism:
        old = f"torch {torch.__version__} counts DTensor's bookkeeping, so the peak is too high"
        session.log(f"warning: {old}; plan with torch 2.15 or newer")
    with task_logger(session) as logger:
        traces = [trace_rank(config, rank=rank, log=session.log) for rank in ranks]
        logger.step_done(step=0, epoch=0)  # the start-up ends here
        trace = max(traces, key=lambda one: one.peak)
        gpu = filled_in(config.plan, precision=config.train.precision)
        waits = len(traces) - 1  # of a rank of a pipeline, if all stages are equal
        parts = config.train.grad_accum_steps * int(config.parallelism.get("stages_per_rank", 1))
        bubble = waits / (parts + waits)
        lacking = [f"plan.{name}=N" for name in missing(gpu) if name != "memory_gib"]
        times = None if lacking else step_times(traces, gpu, bubble=bubble)
        answer = verdict(trace, gpu)
        lines = [
            *table(trace),
            *(_stage_lines(ranks, traces, bubble) if waits else ()),
            *_time_lines(times, lacking),
            *filter(None, [answer]),
        ]
        session.log("\n".join(lines))
        logger.log(plan_metrics(trace, times), step=0, epoch=0)
        collectives = [
            asdict(one) | {"calls": count, "bytes": trace.sent[one]}
            for one, count in trace.calls.items()
        ]
        logger.finish(
            Status.COMPLETED,
            step=0,
            epoch=0,
            num_devices=config.world_size,
            num_parameters=trace.num_parameters,
            planned_collectives=collectives,
            verdict=answer,
        )
    return Status.COMPLETED


def traced_ranks(config: RunConfig) -> Sequence[int]:
    """Return the ranks that stand for all: ``plan.rank``, and those of the other stages."""
    layout = make_mode(config).layout(DistEnv(config.plan.rank, 0, config.world_size, 1))
    size = layout.model_ranks if layout.has_stages else 1
    first = config.plan.rank // size * size
    return range(first, first + size)


def _stage_lines(ranks: Sequence[int], traces: Sequence[RankTrace], bubble: float) -> Iterator[str]:
    yield CALL.format("stages of a pipeline", "rank", "peak, GiB", "TFLOP")
    for rank, trace in zip(ranks, traces, strict=True):
        yield CALL.format("", rank, _gib(trace.peak), f"{trace.flops / 1e12:,.3f}")
    yield f"each waits for {bubble:.0%} of computing if all stages take the same time"


def table(trace: RankTrace) -> Iterator[str]:
    """Yield the lines of memory, FLOP and collectives, of at most 80 columns."""
    state = trace.parameters, trace.gradients, trace.optimizer
    sizes = *state, trace.peak - sum(state), trace.peak
    yield FIGURE.format("memory of a rank", "GiB")
    for name, size in zip(MEMORY, sizes, strict=True):
        yield FIGURE.format(f"  {name}", _gib(size))
    yield FIGURE.format("TFLOP of a rank and step", f"{trace.flops / 1e12:,.3f}")
    if trace.calls:
        yield CALL.format("collectives of a step", "calls", "GiB", "ranks")
    for one, count in sorted(trace.calls.items()):
        sent, ranks = _gib(trace.sent[one]), f"{one.group_size:,}"
        yield CALL.format(f"  {one.kind}", f"{count:,}", sent, ranks)


def _gib(size: int) -> str:
    return f"{size / GIB:,.3f}"


def verdict(trace: RankTrace, gpu: PlanConfig) -> str | None:
    """Return whether a rank fits its GPU, in words; None without ``plan.memory_gib``."""
    if (most := gpu.memory_gib) is None:
        return None
    state = (trace.parameters + trace.gradients + trace.optimizer) / GIB
    peak, allowed = trace.peak / GIB, ALLOWANCE * trace.peak / GIB
    reason = f"allow x{ALLOWANCE} for the allocator and NCCL"
    if state > most:
        kinds = "parameters, gradients and optimizer state"
        return f"does not fit {most:g} GiB: {state:.1f} GiB of {kinds}"
    if peak > most:
        return f"does not fit {most:g} GiB: {peak:.1f} GiB at the peak of a step"
    if allowed > most:
        return f"may not fit: {peak:.1f} of {most:g} GiB ({reason}: {allowed:.1f})"
    return f"fits: {peak:.1f} of {most:g} GiB ({reason})"


def plan_metrics(trace: RankTrace, times: Sequence[float] | None) -> dict[str, float]:
    """Return the metrics of a plan for metrics.jsonl; the times are those of ``step_times``."""
    metrics = {
        "plan/parameters_gib": trace.parameters / GIB,
        "plan/gradients_gib": trace.gradients / GIB,
        "plan/optimizer_gib": trace.optimizer / GIB,
        "plan/peak_gib": trace.peak / GIB,
        "plan/flops": trace.flops,
        "plan/collective_gib": sum(trace.sent.values()) / GIB,
    }
    if times is not None:
        metrics |= {"plan/step_ms": sum(times), "plan/step_ms_overlapped": max(times)}
    return metrics


def _time_lines(times: Sequence[float] | None, lacking: Sequence[str]) -> Iterator[str]:
    if times is None:
        yield "no times without figures of a GPU: write plan.gpu=h100, or all of"
        yield f"  {' '.join(lacking)}"
        return
    names = "computing", "sending", "if nothing overlaps", "if all overlaps"
    yield FIGURE.format("time of a step", "ms")
    for name, time_ms in zip(names, (*times, sum(times), max(times)), strict=True):
        yield FIGURE.format(f"  {name}", f"{time_ms:,.1f}")


def step_times(
    traces: Sequence[RankTrace], gpu: PlanConfig, *, bubble: float
) -> tuple[float, float]:
    """Return the milliseconds of computing and of sending; no figure of the GPU may be None.

    Of the traces, one for each stage of a pipeline, the slowest decides. `bubble` is the share of
    the step in which a rank waits for other stages.
    """
    assert gpu.tflops is not None
    most = max(trace.flops for trace in traces)
    computing = most / (gpu.tflops * 1e12 * gpu.efficiency) / (1.0 - bubble)
    return 1e3 * computing, 1e3 * max(sum(sending_s(trace, gpu)) for trace in traces)


def sending_s(trace: RankTrace, gpu: PlanConfig) -> Iterator[float]:
    """Yield the seconds of each collective: latency x hops + bytes x (n - 1) / n / link.

    NCCL's trees have as many hops as the logarithm of the group. Between machines each rank of the
    group sends over a link of its own.
    """
    assert gpu.ranks_per_node is not None
    assert gpu.latency_us is not None
    assert gpu.node_gb_s is not None
    assert gpu.net_gb_s is not None
    for one, count in trace.calls.items():
        link = gpu.node_gb_s
        nodes = one.last // gpu.ranks_per_node - one.first // gpu.ranks_per_node + 1
        if nodes > 1:
            link = min(link, gpu.net_gb_s * max(1.0, one.group_size / nodes))
        hops, share = math.ceil(math.log2(one.group_size)), (one.group_size - 1) / one.group_size
        if one.kind == "send":
            hops, share = 1, 1.0
        rounds = 2 if one.kind == "all-reduce" else 1  # a reduce-scatter, then an all-gather
        latency_s = count * rounds * hops * gpu.latency_us / 1e6
        yield latency_s + rounds * trace.sent[one] * share / (link * 1e9)
