"""What a program sees on the simulated GPU; prints the answers as JSON. Run by test_device.py."""

import json
import sys
from typing import Any

import simgpu
import torch
from memory_programs import SIZE, default, freed, out_of_memory, pinned, resized, unwritten
from process_programs import DEVICE, collective, forks, host_reads, two_ranks
from torch.nn import functional


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


def late() -> Any:
    """What the default stream sees of a side stream: without a wait, and with one.

    The side stream has had nothing to do, and the default one a lot.
    """
    side, found = torch.Stream(DEVICE), []
    for waits in (False, True):
        torch.accelerator.synchronize()
        busy = torch.ones(SIZE, device=DEVICE)
        for _ in range(20):
            busy = busy * 1
        with side:
            written = torch.ones(4, device=DEVICE)
        if waits:
            default().wait_stream(side)
        found.append(written * 1)
    return [tensor.tolist() for tensor in found]


def queries() -> Any:
    """Whether a stream ever seems busy after the host has waited for it."""
    side = torch.Stream(DEVICE)
    found = []
    for _ in range(100):
        with side:
            torch.ones(4, device=DEVICE)
        side.synchronize()
        found.append(side.query())
    return all(found)


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


def rejected() -> Any:
    """What torch rejects at once, and the device goes on: shapes, and a scalar of the CPU."""
    tensor, scalar = torch.ones(4, device=DEVICE), torch.tensor(0.0)
    found = []
    for wrong in (
        lambda: tensor.copy_(torch.ones(3)),
        lambda: torch.ones(3).copy_(tensor),
        lambda: torch.sum(tensor, 0, out=scalar),
        lambda: scalar.masked_fill_(tensor[0] > 0, 1),
    ):
        try:
            wrong()
        except RuntimeError as error:
            found.append(str(error).partition(",")[0])
    return [found, (tensor * 2).tolist()]


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
        high = (functional.cross_entropy(low, targets), torch.ops.aten.norm(low, 2))
        types = [str(tensor.dtype) for tensor in (low, *high)]
        try:
            functional.binary_cross_entropy(low.sigmoid(), low.sigmoid())
        except RuntimeError as error:
            types.append(str(error))
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
    for function in (host_reads, forks, unwritten, streams, late, queries, copies, pinned):
        found[function.__name__] = function()
    for function in (resized, rejected, out_of_memory):
        found[function.__name__] = function()
    found["freed"] = [freed(recorded=recorded) for recorded in (False, True)]
    found["freed"].append(freed(recorded=False, reused=False))
    found["collective"] = collective(f"{folder}/store1")
    found["training"] = training()
    found["missing"] = missing()
    found["waits"] = waits()
    found["errors"] = errors()
    found["waits_at_the_end"] = simgpu.waits()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
