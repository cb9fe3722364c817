"""One process on one device: the reference for every other mode."""

from dataclasses import dataclass

from ddp_runner.parallelism.mode import (
    local_engine,
    no_wrapper,
    null_context,
    one_share_each,
    place_on_first,
)


@dataclass(frozen=True)
class Single:
    """An unwrapped model on one device."""

    name: str
    layout = staticmethod(one_share_each)
    engine = staticmethod(local_engine)
    place = staticmethod(place_on_first)
    wrap = staticmethod(no_wrapper)
    no_sync = staticmethod(null_context)
