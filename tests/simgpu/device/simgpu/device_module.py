"""The module torch.simgpu: what programs call as they call torch.cuda."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from simgpu.native import library

Device = torch.device | int | str | None

is_initialized: Callable[[], bool] = library.is_initialized
_is_in_bad_fork: Callable[[], bool] = library.is_forked
device_count: Callable[[], int] = library.device_count
set_stream = torch.accelerator.set_stream


class device:  # noqa: N801 - torch.cuda's name
    """The current device in a block."""

    def __init__(self, device: Device) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = torch._C._accelerator_exchangeDevice(self.index)

    def __exit__(self, *error: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self.before)


class Event(torch.Event):
    """An event of the current device."""

    def __new__(cls, enable_timing: bool = False, **options: Any) -> "Event":
        """Make an event."""
        return super().__new__(cls, "simgpu", enable_timing=enable_timing)


class Stream(torch.Stream):
    """A stream of a device."""

    def __new__(cls, device: Device = None, priority: int = 0, **options: Any) -> "Stream":
        """Make a stream, or the object of one that exists."""
        if "stream_id" in options:
            return super().__new__(cls, **options)
        return super().__new__(cls, torch.device("simgpu", _index(device)), priority=priority)


class stream:  # noqa: N801 - torch.cuda's name
    """The current stream in a block, if it is not None."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.before = torch.accelerator.current_stream(self.stream.device)
            self.device = torch.accelerator.current_device_index()
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)
            torch.accelerator.set_device_index(self.device)


def is_available() -> bool:
    """Is there a device?"""
    return device_count() > 0


def init() -> None:
    """Do nothing: the first use of a device is its start."""


_lazy_init = init
empty_cache = init


def current_device() -> int:
    """Return the index of the current device."""
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: Device) -> None:
    """Make a device the current one."""
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Device = None) -> None:
    """Wait for all streams of a device."""
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Device = None) -> torch.Stream:
    """Return the current stream of a device."""
    return torch.accelerator.current_stream(_index(device))


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Return the state of a device's generator."""
    return library.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    """Set the state of a device's generator."""
    library.default_generator(_index(device)).set_state(state)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    library.default_generator(-1).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        library.default_generator(index).manual_seed(int(seed))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types of autocast."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Can it compute in bfloat16?"""
    return True


def get_device_name(device: Device = None) -> str:
    """Return the name of a device."""
    return "simulated accelerator"


def get_device_properties(device: Device = None) -> SimpleNamespace:
    """Return the facts of a device that torch and programs ask for."""
    return SimpleNamespace(
        name=get_device_name(device),
        uuid=f"SIM-{_index(device)}",
        total_memory=library.memory_info(_index(device))[1],
        multi_processor_count=1,
    )


def set_per_process_memory_fraction(share: float, device: Device = None) -> None:
    """Limit the memory of a device to a share of it."""
    library.set_memory_share(_index(device), share)


def register() -> None:
    """Make this module torch.simgpu, and give tensors its methods, such as is_simgpu."""
    torch._register_device_module("simgpu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
