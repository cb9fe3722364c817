"""How fast ranks reach each other, and how far the clocks of their machines are apart.

Every function here is a collective; all ranks get the same findings.
"""

import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from ddp_runner.distributed import gather_objects
from ddp_runner.doctor.finding import Finding, ok, problem, warning
from ddp_runner.doctor.machines import Machines
from ddp_runner.errors import counted

NUM_TRIPS, NUM_SENDS = 20, 3
MESSAGE_BYTES, CUDA_BYTES = 8 * 2**20, 64 * 2**20
MOST_PAIRED = 6  # machines of which each pair is measured; of more, only those with the first
SLOW_MS, SLOW_GB_PER_S, CLOCK_S = 10.0, 0.05, 1.0


def pairs(machines: Machines) -> Iterator[Finding]:
    """Yield latency and bandwidth between machines, and how far their clocks are apart."""
    first = machines.first_ranks
    chosen = [pair for pair in combinations(first, 2) if len(first) <= MOST_PAIRED or not pair[0]]
    measured = {}
    for pair in chosen:
        own = measure_link(*pair) if machines.env.rank in pair else None
        measured[pair] = gather_objects(own)[pair[0]]
    for (one, other), link in measured.items():
        assert link is not None
        latency_ms, gb_per_s, _ = link
        value = (
            f"{machines.names[one]} to {machines.names[other]}: {latency_ms:.2f} ms, "
            f"{gb_per_s:.2f} GB/s"
        )
        if latency_ms > SLOW_MS or gb_per_s < SLOW_GB_PER_S:
            advice = "slow: name the fast network in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            yield warning("link", value, advice)
        else:
            yield ok("link", value)
    offsets = {pair[1]: link[2] for pair, link in measured.items() if link and not pair[0]}
    farthest = max(offsets, key=lambda rank: abs(offsets[rank]))
    value = (
        f"{machines.names[farthest]} is {abs(offsets[farthest]):.3f} s "
        f"{'ahead of' if offsets[farthest] > 0 else 'behind'} {machines.names[0]}"
    )
    if abs(offsets[farthest]) > CLOCK_S:
        yield warning("clocks", value, "times in logs do not fit together: run chrony or ntpd")
    else:
        yield ok("clocks", value + (", the others less" if len(offsets) > 1 else ""))


def all_reduce(
    device: torch.device, *, group: dist.ProcessGroup | None, name: str
) -> Iterator[Finding]:
    """Yield how long all ranks take to add up a message, and whether the sum is right."""
    num_bytes = CUDA_BYTES if device.type == "cuda" else MESSAGE_BYTES
    num_ranks, times = dist.get_world_size(), list[float]()
    message = torch.empty(num_bytes // 4, device=device)
    for _ in range(NUM_SENDS + 1):  # the first one connects
        message.fill_(1.0)
        gather_objects(None)  # all begin together
        started = time.perf_counter()
        dist.all_reduce(message, group=group)
        is_right = bool((message == num_ranks).all())  # waits for the GPU
        times.append(time.perf_counter() - started)
    slowest_s = max(gather_objects(min(times[1:])))
    value = f"all_reduce of {num_bytes // 2**20} MiB over {counted(num_ranks, 'rank')}"
    if all(gather_objects(is_right)):
        yield ok(name, f"{value}: {1e3 * slowest_s:.1f} ms")
    else:
        yield problem(name, f"{value} gave a wrong sum", "a link or a GPU corrupts data")


def nccl(local_rank: int, *, timeout_s: float) -> Iterator[Finding]:
    """Yield how fast NCCL is, if each rank has a GPU of its own."""
    has_gpu = torch.cuda.is_available() and local_rank < torch.cuda.device_count()
    if not all(gather_objects(has_gpu)):
        return
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    uuids = gather_objects(str(torch.cuda.get_device_properties(device).uuid))
    if len(set(uuids)) < len(uuids):
        yield ok("NCCL", "not tried: two ranks have the same GPU")
        return
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    yield from all_reduce(device, group=group, name="NCCL")


def measure_link(one: int, other: int) -> tuple[float, float, float]:
    """Return one way's milliseconds, GB/s (1e9 bytes), and by how much the other's clock is ahead.

    Both ranks of the pair must call. The offset is that of the fastest round trip, whose answer was
    written in its middle, as NTP does it (RFC 5905, section 8).
    """
    stamp, trips = torch.zeros(1, dtype=torch.float64), list[tuple[float, float]]()
    message, sends = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), list[float]()
    if dist.get_rank() == other:
        for _ in range(NUM_TRIPS):
            dist.recv(stamp, one)
            stamp.fill_(time.time())
            dist.send(stamp, one)
        for _ in range(NUM_SENDS):
            dist.recv(message, one)
            dist.send(stamp, one)
        return 0.0, 0.0, 0.0
    for _ in range(NUM_TRIPS):
        asked_at, started = time.time(), time.perf_counter()
        dist.send(stamp, other)
        dist.recv(stamp, other)
        trip_s = time.perf_counter() - started
        trips.append((trip_s, stamp.item() - asked_at - trip_s / 2))
    for _ in range(NUM_SENDS):
        started = time.perf_counter()
        dist.send(message, other)
        dist.recv(stamp, other)
        sends.append(time.perf_counter() - started)
    latency_s = median(trip_s for trip_s, _ in trips) / 2
    moving_s = max(min(sends) - 2 * latency_s, 1e-9)
    return 1e3 * latency_s, MESSAGE_BYTES / moving_s / 1e9, min(trips)[1]
