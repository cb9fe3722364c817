"""The programs of programs.py about memory: when it is written, freed, pinned and used up."""

from typing import Any

import simgpu
import torch
from process_programs import DEVICE

SIZE = 1000


def default() -> torch.Stream:
    """Return the current stream, which is the default one everywhere here."""
    return torch.accelerator.current_stream(0)


def unwritten() -> Any:
    """Memory that nothing has written: fresh, and used before."""
    fresh = torch.empty(SIZE, device=DEVICE)
    address = fresh.fill_(1).data_ptr()
    del fresh
    used = torch.empty(SIZE, device=DEVICE)
    assert used.data_ptr() == address
    return [torch.empty(SIZE + 1, device=DEVICE).isnan().all().item(), used.isnan().all().item()]


def freed(*, recorded: bool, reused: bool = True) -> Any:
    """A tensor of the default stream is freed while a side stream still has to read it."""
    tensor, side = torch.ones(SIZE, device=DEVICE), torch.Stream(DEVICE)
    address = tensor.data_ptr()
    side.wait_stream(default())
    with simgpu.held(side):
        with side:
            doubled = tensor * 2
        if recorded:
            tensor.record_stream(side)
        del tensor
        other = torch.full((SIZE if reused else 5 * SIZE,), 7.0, device=DEVICE)
        default().synchronize()
    default().wait_stream(side)
    return [other.data_ptr() == address, doubled[0].item()]


def pinned() -> Any:
    """Pinned memory: how it is told apart, and when it is given back."""
    before = simgpu.pinned_bytes()
    host = torch.ones(SIZE).pin_memory()
    is_pinned = [host.is_pinned(), host[5:].is_pinned(), torch.ones(3).is_pinned()]
    is_pinned.append(torch.empty(3, pin_memory=True).is_pinned())
    with simgpu.held(default()):
        device = host.to(DEVICE, non_blocking=True)
        del host
        while_used = simgpu.pinned_bytes() - before
    ones = (device == 1).all().item()
    default().synchronize()
    return [is_pinned, while_used, ones, simgpu.pinned_bytes() - before]


def resized() -> Any:
    """A tensor of the second device grows: what it held, and on which device there is more now."""
    tensor = torch.ones(4, device="simgpu:1")
    before = [torch.accelerator.memory_allocated(index) for index in (0, 1)]
    tensor.resize_(SIZE)
    more = [torch.accelerator.memory_allocated(index) - before[index] for index in (0, 1)]
    return [tensor[:4].tolist(), more]


def out_of_memory() -> Any:
    """A tensor larger than the device, and one larger than a share of it."""
    found = []
    for share, gib in ((1.0, 5), (0.1, 1)):
        torch.simgpu.set_per_process_memory_fraction(share)
        try:
            torch.empty(gib << 30, dtype=torch.uint8, device=DEVICE)
        except torch.OutOfMemoryError as error:
            found.append(str(error).partition(".")[0])
    torch.simgpu.set_per_process_memory_fraction(1.0)
    return found
