"""Simulate GPUs, to test on which devices tensors and operations are.

Inside ``fake_gpus`` a tensor on ``cuda:1`` is torch's FakeTensor: it has a shape, a dtype and a
device, but no numbers. Operations check and propagate devices by torch's own rules, as on real
GPUs, and the code under test is the real one: modules, autocast, autograd's functions, optimizers,
the loss scaler, clipping, torch.save and torch.load. What asks the CUDA driver is replaced:

* reading a number gives 1 on the CPU and 0 on a GPU; reading a boolean gives True;
* autograd's engine asks for streams first, so the graph is walked here instead;
* DataParallel copies between GPUs with ``Tensor.to``, and its threads run one after another;
* DDP has no reducer, and in a collective every rank has the value of this rank;
* streams and events only record their device and their order;
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import comm
from torch.testing._internal.distributed.fake_pg import FakeStore

READ = torch.ops.aten._local_scalar_dense.default
ZEROS = torch.ops.aten.new_zeros.default
COUNT = torch.ops.aten.bincount.default


@dataclass
class FakeGpus:
    """What the code under test did with the GPUs besides making tensors."""

    marks: list["FakeEvent"] = field(default_factory=list)  # timed events, in order
    num_events: int = 0


class FakeMode(FakeTensorMode):
    """A FakeTensorMode that also runs the operations whose results depend on numbers."""

    def dispatch(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        if func is READ:
            return args[0].dtype == torch.bool or float(args[0].device.type == "cpu")
        if func is COUNT:
            num_bins = args[2] if len(args) > 2 else kwargs["minlength"]
            func, args, kwargs = ZEROS, (args[0], [num_bins]), {}
        return super().dispatch(func, types, args, kwargs or {})


@dataclass
class FakeStream:
    """The only stream of a device: records for which other devices it waits."""

    device: torch.device
    waits_for: set[torch.device] = field(default_factory=set)

    def wait_event(self, event: "FakeEvent") -> None:
        """Wait for the event."""
        assert event.after is not None
        self.waits_for |= event.after

    def record_event(self) -> "FakeEvent":
        """Return a new event at the stream's end."""
        event = FakeEvent(FakeGpus())
        event.record(self)
        return event


class FakeEvent:
    """Records which devices' work it follows; two devices' events have no time between them."""

    def __init__(self, gpus: FakeGpus) -> None:
        self._gpus, self.place = gpus, 0
        self.after: set[torch.device] | None = None
        self.device: torch.device | None = None
        self.is_over = False

    def record(self, stream: FakeStream) -> None:
        """Record the stream's end."""
        self._gpus.num_events += 1
        self.place = self._gpus.num_events
        self.device, self.after = stream.device, {stream.device, *stream.waits_for}

    def synchronize(self) -> None:
        """Wait for this event and all earlier ones of its device."""
        for event in self._gpus.marks:
            event.is_over |= event.device == self.device and event.place <= self.place

    def elapsed_time(self, event: "FakeEvent") -> float:
        """Return 1 ms; both events must be over, as on a real GPU."""
        assert self.device == event.device
        assert self.is_over
        assert event.is_over, "device not ready"
        return 1.0


@contextmanager
def fake_gpus(count: int, *, ranks: int = 1) -> Iterator[FakeGpus]:
    """Simulate GPUs and a process group in which every rank does the same as this one.

    Args:
        count: the number of visible GPUs.
        ranks: the size of the process group; nothing is reduced.
    """
    gpus = FakeGpus()
    streams: dict[torch.device, FakeStream] = {}

    def stream(device: Any) -> FakeStream:
        device = torch.device("cuda", index_of(device))
        return streams.setdefault(device, FakeStream(device))

    def event(enable_timing: bool = False) -> FakeEvent:
        assert enable_timing
        gpus.marks.append(FakeEvent(gpus))
        return gpus.marks[-1]

    def gather(box: list[Any], value: Any, group: Any = None) -> None:
        box[:] = [value] * len(box)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with pytest.MonkeyPatch.context() as patch, FakeMode():
            for name, stub in {
                "device_count": lambda: count,
                "current_stream": stream,
                "Event": event,
                "is_bf16_supported": lambda including_emulation=True: True,
            }.items():
                patch.setattr(torch.cuda, name, stub)
            patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
            patch.setattr(nn.Module, "_apply", _apply)
            patch.setattr(Tensor, "backward", _backward)
            for name, stub in {
                "all_reduce": lambda tensor, **_: None,
                "broadcast": lambda tensor, **_: None,
                "broadcast_object_list": lambda box, **_: None,
                "all_gather_object": gather,
                "get_world_size": lambda group=None: ranks,
            }.items():
                patch.setattr(dist, name, stub)
            _replace_copies(patch)
            _replace_reducer(patch)
            yield gpus
    finally:
        dist.destroy_process_group()


def index_of(device: Any) -> int:
    """Return the index of a device, given as a number, a name or a torch.device."""
    return device if isinstance(device, int) else torch.device(device).index or 0


def _replace_copies(patch: pytest.MonkeyPatch) -> None:
    """Let DataParallel find the simulated GPUs and copy between them."""
    data_parallel = sys.modules["torch.nn.parallel.data_parallel"]  # a function has the same name

    def scatter(tensor: Tensor, gpus: Any, sizes: Any = None, dim: int = 0, *_: Any) -> Any:
        parts = tensor.chunk(len(gpus), dim) if sizes is None else tensor.split(list(sizes), dim)
        return tuple(part.to(torch.device("cuda", i)) for part, i in zip(parts, gpus, strict=False))

    def gather(tensors: Sequence[Tensor], dim: int = 0, destination: Any = None) -> Tensor:
        return torch.cat([part.to(torch.device("cuda", destination)) for part in tensors], dim)

    def broadcast(tensors: Sequence[Tensor], gpus: Any, *_: Any) -> list[list[Tensor]]:
        return [[part.to(torch.device("cuda", i), copy=True) for part in tensors] for i in gpus]

    def add(parts: Sequence[Sequence[Tensor]], destination: Any = None, *_: Any) -> Any:
        device = torch.device("cuda", destination)
        return tuple(sum(part.to(device) for part in each) for each in zip(*parts, strict=True))

    for name, stub in {
        "scatter": scatter,
        "gather": gather,
        "broadcast_coalesced": broadcast,
        "reduce_add_coalesced": add,
    }.items():
        patch.setattr(comm, name, stub)
    patch.setattr(data_parallel, "_get_available_device_type", lambda: "cuda")
    patch.setattr(data_parallel, "_check_balance", lambda device_ids: None)
    patch.setattr(
        torch,
        "accelerator",
        SimpleNamespace(
            is_available=lambda: True,
            current_accelerator=lambda check_available=False: (
                None if check_available else torch.device("cuda")
            ),
            current_stream=lambda device=None: nullcontext(),
            device_index=lambda device: nullcontext(),
        ),
    )
    apply = sys.modules["torch.nn.parallel.parallel_apply"]
    patch.setattr(apply, "threading", SimpleNamespace(Thread=_InTurn, Lock=threading.Lock))
    # Earlier versions of torch ask these instead.
    for name in ("device", "stream"):
        patch.setattr(torch.cuda, name, lambda *_: nullcontext())


def _replace_reducer(patch: pytest.MonkeyPatch) -> None:
    """Remove from DDP what compares, sends and reduces numbers; its own checks stay."""
    from torch.nn.parallel import distributed

    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
        patch.setattr(distributed, name, lambda *_, **__: None)
    for name in ("Reducer", "Logger"):
        patch.setattr(dist, name, MagicMock())


class _InTurn(threading.Thread):
    """A thread that starts and ends at once: fake tensors allow only one thread at a time."""

    def start(self) -> None:
        """Run to the end."""
        super().start()
        self.join()


def _apply(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Move a module by replacing its parameters: fake ones cannot be changed in place."""
    for child in self.children():
        child._apply(function)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                moved = function(parameter)
            self._parameters[name] = nn.Parameter(moved, parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self


def _backward(self: Tensor, *_: Any) -> None:
    """Walk the graph from its root: each node runs after all that feed it, on the sum of these."""
    assert self.grad_fn is not None
    order, seen = list[Any](), set[Any]()

    def visit(node: Any) -> None:
        if node in seen:
            return
        seen.add(node)
        for following, _ in node.next_functions:
            if following is not None:
                visit(following)
        order.append(node)

    visit(self.grad_fn)
    inputs: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    inputs[self.grad_fn][0] = torch.ones_like(self)
    with torch.no_grad():
        for node in reversed(order):
            given = inputs.pop(node, {})
            if hasattr(node, "variable"):
                leaf = node.variable
                assert given[0].device == leaf.device
                leaf.grad = given[0] if leaf.grad is None else leaf.grad + given[0]
                continue
            count = max(given, default=-1) + 1
            given_in_order = [given.get(index) for index in range(max(count, 1))]
            # A torch.autograd.Function is not callable.
            call = node if callable(node) else node.apply
            results = call(*given_in_order)
            results = results if isinstance(results, tuple) else (results,)
            # A Function's arguments that are not tensors come first, and have no edge.
            results = results[-len(node.next_functions) :]
            for (following, index), result in zip(node.next_functions, results, strict=True):
                if following is not None and result is not None:
                    wanted = following._input_metadata[index]  # as the engine checks and casts
                    assert result.device == wanted.device, f"gradient of {following.name()}"
                    part = result.sum_to_size(wanted.shape).to(wanted.dtype)
                    before = inputs[following].get(index)
                    inputs[following][index] = part if before is None else before + part
