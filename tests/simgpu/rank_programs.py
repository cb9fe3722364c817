"""What parts of a rank do on the simulated GPU; prints the answers as JSON. Run by test_rank.py."""

import json
from typing import Any

import simgpu
import torch
from torch import nn

from ddp_runner.device import peak_memory_gib, seed_devices
from ddp_runner.metric_names import StepPart
from ddp_runner.parallelism.dp import Replicas
from ddp_runner.train.step_timer import MOST_EVENTS, StepTimer

FIRST, SECOND = torch.device("simgpu", 0), torch.device("simgpu", 1)


def timer() -> Any:
    """Parts of steps between two log lines, with more events than are kept."""
    pace = StepTimer(FIRST)
    for _ in range(MOST_EVENTS + 10):
        pace.mark(StepPart.FORWARD)
        pace.add(samples=1)
    lap = pace.lap()
    return sorted(lap.parts), lap.exchanges


def exchanges() -> Any:
    """How often the host waits for four steps, and how many exchanges they have."""
    pace = StepTimer(FIRST)
    simgpu.reset_waits()
    for _ in range(4):
        for part in (None, StepPart.FORWARD, StepPart.BACKWARD, StepPart.COMM, StepPart.OPTIMIZER):
            pace.mark(part)
        pace.add(samples=1)
    waits = simgpu.waits()
    return waits, len(pace.lap().exchanges)


def peak() -> Any:
    """The peak in GiB of two devices with 64 and 128 MiB."""
    for device, mib in ((FIRST, 64), (SECOND, 128)):
        torch.empty(mib << 20, dtype=torch.uint8, device=device)
    return peak_memory_gib()


def draws() -> Any:
    """Whether each device draws the same after the same seed."""
    found = []
    for device in (FIRST, SECOND):
        seed_devices(3)
        first = torch.rand(4, device=device)
        seed_devices(3)
        found.append(torch.equal(first, torch.rand(4, device=device)))
    return found


def replicas() -> Any:
    """The dtypes and devices of what DataParallel's replicas give under autocast to bf16."""
    layers = [nn.Linear(4, 4, device=device) for device in (FIRST, SECOND)]
    inputs = [(torch.ones(2, 4, device=device),) for device in (FIRST, SECOND)]
    parallel = Replicas(layers[0], device_ids=[0, 1])
    with torch.autocast("simgpu", dtype=torch.bfloat16):
        outputs = parallel.parallel_apply(layers, inputs, [{}, {}])
    return [(str(output.dtype), str(output.device)) for output in outputs]


if __name__ == "__main__":
    programs = (timer, exchanges, peak, draws, replicas)
    print(json.dumps({function.__name__: function() for function in programs}))
