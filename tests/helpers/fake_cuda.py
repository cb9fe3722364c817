"""Tensors on GPUs that are not there, for tests of where things are; a helper, not a test.

Inside ``fake_gpus`` a tensor on ``cuda:1`` is torch's FakeTensor: it has a shape, a dtype and a
device, and no numbers. Operations check and pass on their devices as on real GPUs, with torch's own
rules, and the code under test is the real one: modules, autocast, autograd's functions, optimizers,
the loss's scaler, clipping, torch.save and torch.load. What asks the CUDA driver is replaced:

* a number that is read is 1 on the CPU and 0 on a GPU, a truth is True;
* autograd's engine asks for streams before anything else: the graph is walked here instead;
* copies between GPUs for DataParallel are ``Tensor.to``, its threads run one after another;
* DDP has no reducer, and collectives find on every rank what is on this one;
* streams and events only record on which device they are;
* random numbers have a state that can be saved and set, and are never drawn.
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
    """What the code did with the GPUs, as far as it leaves no tensor behind."""

    rng: dict[int, Tensor] = field(default_factory=dict)  # each device's state, told by its size
    marks: list["FakeEvent"] = field(default_factory=list)  # timed events, in order
    num_events: int = 0


class FakeMode(FakeTensorMode):
    """Also knows what depends on a tensor's numbers."""

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
    """A device's one stream: remembers after which other devices' work it goes on."""

    device: torch.device
    waits_for: set[torch.device] = field(default_factory=set)

    def wait_event(self, event: "FakeEvent") -> None:
        """Go on after the event."""
        assert event.after is not None
        self.waits_for |= event.after

    def record_event(self) -> "FakeEvent":
        """Return a new event at this place."""
        event = FakeEvent(FakeGpus())
        event.record(self)
        return event


class FakeEvent:
    """Knows which devices' work it comes after; two devices' events have no time between them."""

    def __init__(self, gpus: FakeGpus) -> None:
        self._gpus, self.place = gpus, 0
        self.after: set[torch.device] | None = None
        self.device: torch.device | None = None
        self.is_over = False

    def record(self, stream: FakeStream) -> None:
        """Stand at the stream's end."""
        self._gpus.num_events += 1
        self.place = self._gpus.num_events
        self.device, self.after = stream.device, {stream.device, *stream.waits_for}

    def synchronize(self) -> None:
        """Wait until this and all that came before on the device is over."""
        for one in self._gpus.marks:
            one.is_over |= one.device == self.device and one.place <= self.place

    def elapsed_time(self, event: "FakeEvent") -> float:
        """Return 1 ms; as on a real GPU, both must be over."""
        assert self.device == event.device
        assert self.is_over
        assert event.is_over, "device not ready"
        return 1.0


@contextmanager
def fake_gpus(count: int, *, ranks: int = 1) -> Iterator[FakeGpus]:
    """Have so many GPUs, and collectives that every rank answers as this one does.

    Args:
        count: of visible GPUs.
        ranks: in the process group; nothing is reduced.
    """
    gpus = FakeGpus(rng={index: torch.zeros(16 + index).byte() for index in range(count)})
    streams: dict[torch.device, FakeStream] = {}

    def stream(device: Any) -> FakeStream:
        device = torch.device("cuda", index_of(device))
        return streams.setdefault(device, FakeStream(device))

    def event(enable_timing: bool = False) -> FakeEvent:
        assert enable_timing
        gpus.marks.append(FakeEvent(gpus))
        return gpus.marks[-1]

    def save_rng(device: Any = "cuda") -> Tensor:
        return gpus.rng[index_of(device)]

    def set_rng(state: Tensor, device: Any = "cuda") -> None:
        gpus.rng[index_of(device)] = state

    def gather(box: list[Any], value: Any, group: Any = None) -> None:
        box[:] = [value] * len(box)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with pytest.MonkeyPatch.context() as patch, FakeMode():
            for name, stub in {
                "device_count": lambda: count,
                "get_rng_state": save_rng,
                "set_rng_state": set_rng,
                "current_stream": stream,
                "Event": event,
                "is_bf16_supported": lambda including_emulation=True: True,
            }.items():
                patch.setattr(torch.cuda, name, stub)
            patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
            patch.setattr(torch, "set_rng_state", lambda state: None)  # the CPU's, without numbers
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
    """Return a device's number, however it is named."""
    return device if isinstance(device, int) else torch.device(device).index or 0


def _replace_copies(patch: pytest.MonkeyPatch) -> None:
    """Let DataParallel copy between devices that are not there, and find them."""
    data_parallel = sys.modules["torch.nn.parallel.data_parallel"]  # its name is a function's, too

    def scatter(tensor: Tensor, gpus: Any, sizes: Any = None, dim: int = 0, *_: Any) -> Any:
        parts = tensor.chunk(len(gpus), dim) if sizes is None else tensor.split(list(sizes), dim)
        return tuple(part.to(torch.device("cuda", i)) for part, i in zip(parts, gpus, strict=False))

    def gather(tensors: Sequence[Tensor], dim: int = 0, destination: Any = None) -> Tensor:
        return torch.cat([one.to(torch.device("cuda", destination)) for one in tensors], dim)

    def broadcast(tensors: Sequence[Tensor], gpus: Any, *_: Any) -> list[list[Tensor]]:
        return [[one.to(torch.device("cuda", i), copy=True) for one in tensors] for i in gpus]

    def add(parts: Sequence[Sequence[Tensor]], destination: Any = None, *_: Any) -> Any:
        device = torch.device("cuda", destination)
        return tuple(sum(one.to(device) for one in each) for each in zip(*parts, strict=True))

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
    # What earlier versions ask in their place.
    for name in ("device", "stream"):
        patch.setattr(torch.cuda, name, lambda *_: nullcontext())


def _replace_reducer(patch: pytest.MonkeyPatch) -> None:
    """Take out of DDP what compares, sends and reduces numbers; its own checks stay."""
    from torch.nn.parallel import distributed

    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
        patch.setattr(distributed, name, lambda *_, **__: None)
    for name in ("Reducer", "Logger"):
        patch.setattr(dist, name, MagicMock())


class _InTurn(threading.Thread):
    """A thread that the others wait for: fake tensors are of one thread at a time."""

    def start(self) -> None:
        """Run to the end."""
        super().start()
        self.join()


def _apply(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Move a module: its own way swaps a parameter's inside, which fake ones cannot do."""
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
    """Walk the graph from the root: each node after all that feed it, with the sum of theirs."""
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
            # A torch.autograd.Function has another name for it.
            call = node if callable(node) else node.apply
            results = call(*given_in_order)
            results = results if isinstance(results, tuple) else (results,)
            # A Function's arguments that are no tensors come first, and have no edge.
            results = results[-len(node.next_functions) :]
            for (following, index), result in zip(node.next_functions, results, strict=True):
                if following is not None and result is not None:
                    wanted = following._input_metadata[index]  # as the engine checks and casts
                    assert result.device == wanted.device, f"gradient of {following.name()}"
                    part = result.sum_to_size(wanted.shape).to(wanted.dtype)
                    before = inputs[following].get(index)
                    inputs[following][index] = part if before is None else before + part
