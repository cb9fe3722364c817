"""How far this rank's clock is ahead of rank 0's; machines' clocks differ by milliseconds."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

ROUNDS = 20  # one of them meets no other work on either machine


def clock_ahead_ns(*, now_ns: Callable[[], int] = time.time_ns) -> int:
    """Return by how many nanoseconds this rank's clock is ahead of rank 0's; 0 on rank 0.

    Rank 0 asks each rank for its time and takes the fastest of its answers, given in the middle of
    the round trip, so the error is at most half of that (Cristian, "Probabilistic clock
    synchronization", 1989). If no difference fits as well, return 0: ranks of one machine share its
    clock. Collective: every rank must call.

    Args:
        now_ns: this rank's clock, which its trace has as well.
    """
    if dist.get_rank() == 0:
        for peer in range(1, dist.get_world_size()):
            dist.send(torch.tensor([_ahead_ns(peer, now_ns)]), dst=peer)
        return 0
    number = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        dist.recv(number, src=0)
        dist.send(torch.tensor([now_ns()]), dst=0)
    dist.recv(number, src=0)
    return int(number.item())


def _ahead_ns(peer: int, now_ns: Callable[[], int]) -> int:
    """Return by how much a rank's clock is ahead of that of rank 0, which calls this."""
    answers = [_ask(peer, now_ns) for _ in range(ROUNDS)]
    round_trip, ahead = min(answers)
    return 0 if abs(ahead) <= round_trip / 2 else round(ahead)


def _ask(peer: int, now_ns: Callable[[], int]) -> tuple[int, float]:
    """Return how long a question took, and how far the answer was ahead of its middle."""
    question, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    before = now_ns()
    dist.send(question, dst=peer)
    dist.recv(answer, src=peer)
    after = now_ns()
    return after - before, answer.item() - (before + after) / 2
