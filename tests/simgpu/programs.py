"""What a program sees on the simulated GPU; prints the answers as JSON. Run by test_device.py."""

import json
import sys
from typing import Any

import simgpu
import torch
from process_programs import DEVICE, collective, forks, host_reads, two_ranks
from torch.nn import functional

SIZE = 1000


def default() -> torch.Stream:
    """Return the current stream, which is the default one everywhere here."""
    return torch.accelerator.current_stream(0)


def unwritten() -> Any:
    """Memory that nothing has written: fresh, and used before."""
    fresh = torch.empty(SIZE, device=DEVICE)
    place = fresh.fill_(1).data_ptr()
    del fresh
    used = torch.empty(SIZE, device=DEVICE)
    assert used.data_ptr() == place
    return [torch.empty(SIZE + 1, device=DEVICE).isnan().all().item(), used.isnan().all().item()]


def streams() -> Any:
    """One stream reads what another writes: without a wait, and with each kind of wait."""
    torch.accelerator.synchronize()
    side, event = torch.Stream(DEVICE), torch.Event(DEVICE, enable_timing=True)
    with simgpu.held(side):
        with side:
            assert torch.accelerator.current_stream() == side
            written = torch.ones(4, device=DEVICE)
            event.record()
        without = (written * 1).cpu().tolist()
        is_done = event.query()
        default().wait_event(event)
        after_event = written * 1
    after_event = after_event.tolist()
    with simgpu.held(side):
        with side:
            written += 1
        default().wait_stream(side)
        after_stream = written * 1
    after_stream = after_stream.tolist()
    end = torch.Event(DEVICE, enable_timing=True)
    end.record()
    end.synchronize()
    return {
        "without": without,
        "event": after_event,
        "stream": after_stream,
        "done": is_done,
        "order": event.elapsed_time(end) > 0,
    }


def freed(*, recorded: bool) -> Any:
    """A tensor of the default stream is freed while a side stream still has to read it."""
    tensor, side = torch.ones(SIZE, device=DEVICE), torch.Stream(DEVICE)
    place = tensor.data_ptr()
    side.wait_stream(default())
    with simgpu.held(side):
        with side:
            doubled = tensor * 2
        if recorded:
            tensor.record_stream(side)
        del tensor
        other = torch.full((SIZE,), 7.0, device=DEVICE)
        default().synchronize()
    default().wait_stream(side)
    return [other.data_ptr() == place, doubled[0].item()]


def copies() -> Any:
    """Copies that the host does not wait for, of pinned and of pageable memory."""
    device = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    found = {}
    for name, host in (("pinned", torch.ones(4).pin_memory()), ("pageable", torch.ones(4))):
        simgpu.reset_waits()
        with simgpu.held(default()):
            device.copy_(host, non_blocking=True)
            host.fill_(5)
        waits = sum(simgpu.waits().values())
        found[f"from {name}"] = [device[0].item(), waits, simgpu.copies()]
    device.fill_(3)
    host = torch.zeros(4).pin_memory()
    simgpu.reset_waits()
    with simgpu.held(default()):
        host.copy_(device, non_blocking=True)
        before = host[0].item()
    found["to pinned"] = [before, simgpu.waits(), simgpu.copies()]
    default().synchronize()
    found["to pinned, later"] = host[0].item()
    simgpu.reset_waits()
    host = torch.zeros(4)
    host.copy_(device, non_blocking=True)
    found["to pageable"] = [host[0].item(), simgpu.waits(), simgpu.copies()]
    return found


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


def waits() -> Any:
    """Each thing that the host waits for, once; and a step of training, which is none."""
    tensor, event = torch.ones(4, device=DEVICE), torch.Event(DEVICE)
    event.record()
    simgpu.reset_waits()
    layer = torch.nn.Linear(4, 4, device=DEVICE)
    layer(tensor).sum().backward()
    torch.optim.AdamW(layer.parameters(), foreach=True).step()
    none = simgpu.waits()
    tensor[0].item()
    tensor.cpu()
    torch.ones(4).to(DEVICE)
    tensor[[0, 1]]
    tensor[tensor > 0]
    torch.equal(tensor, tensor)
    event.synchronize()
    default().synchronize()
    torch.accelerator.synchronize()
    return [none, simgpu.waits()]


def training() -> Any:
    """Return the losses of a few steps on the CPU and on the device, and types of autocast."""
    losses = []
    for device in ("cpu", "simgpu"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()
        )
        model.append(torch.nn.Linear(144, 3))
        inputs, targets = torch.randn(8, 3, 8, 8), torch.arange(8) % 3
        model, inputs, targets = (x.to(device) for x in (model, inputs, targets))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    with torch.autocast("simgpu", dtype=torch.bfloat16):
        low = model(inputs)
        types = [str(low.dtype), str(functional.cross_entropy(low, targets).dtype)]
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append([torch.rand(1, device=DEVICE).item() for _ in range(2)])
    return [*losses, types, drawn]


def missing() -> Any:
    """An operator that only GPUs have."""
    try:
        torch.nn.LSTM(2, 2, device=DEVICE)(torch.ones(1, 1, 2, device=DEVICE))
    except NotImplementedError as error:
        return str(error)


def errors() -> Any:
    """A task fails; the calls after it. Nothing works on the device from then on."""
    embedding = functional.embedding(torch.tensor(9).to(DEVICE), torch.ones(4, 2, device=DEVICE))
    found = [list(embedding.shape)]
    for _ in range(2):
        try:
            embedding.cpu()
        except RuntimeError as error:
            found.append(str(error))
    return found


def main(folder: str) -> None:
    """Run everything in its order: two ranks part first, and the error that stays comes last."""
    found: dict[str, Any] = {"two_ranks": two_ranks(f"{folder}/store2")}
    for function in (host_reads, forks, unwritten, streams, copies, pinned, out_of_memory):
        found[function.__name__] = function()
    found["freed"] = [freed(recorded=recorded) for recorded in (False, True)]
    found["collective"] = collective(f"{folder}/store1")
    found["training"] = training()
    found["missing"] = missing()
    found["waits"] = waits()
    found["errors"] = errors()
    found["waits_at_the_end"] = simgpu.waits()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
