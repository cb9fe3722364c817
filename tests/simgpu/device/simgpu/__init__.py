"""A simulated GPU: the device type "simgpu" of torch, on the CPU.

torch imports this package itself, at the end of its own import, when the folder above is on
PYTHONPATH. See the README of tests/simgpu.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def waits() -> dict[str, int]:
    """Return how often the host has waited for a stream, by the cause."""
    from simgpu.native import library

    return library.waits()


def copies() -> dict[str, int]:
    """Return how many copies the host has not waited for, by their kind."""
    from simgpu.native import library

    return library.copies()


def reset_waits() -> None:
    """Begin to count waits and copies at zero."""
    from simgpu.native import library

    library.reset_counts()


def pinned_bytes() -> int:
    """Return the bytes of pinned memory that tensors or copies under way hold."""
    from simgpu.native import library

    return library.pinned_bytes()


@contextmanager
def held(stream: Any) -> Iterator[None]:
    """Let a stream stand still in the block; what waits for it there waits for ever."""
    from simgpu.native import library

    hold = library.hold(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        hold.release()


def _autoload() -> None:
    # Of the entry point torch.backends. Here and above imports come late: `import simgpu` imports
    # torch, which calls this function before that import has ended.
    from simgpu import at_exit, device_module, process_group, traces

    device_module.register()
    process_group.register()
    at_exit.register()
    traces.start()


import torch  # noqa: E402, F401 - so that `import simgpu` is enough
