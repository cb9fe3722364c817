"""A process with a device: the reference that every other mode is compared with."""

from dataclasses import dataclass

from ddp_runner.parallelism.mode import no_context, place_on_first, same_role, unwrapped


@dataclass(frozen=True)
class Single:
    """An unwrapped model on a device."""

    name: str
    role = staticmethod(same_role)
    place = staticmethod(place_on_first)
    wrap = staticmethod(unwrapped)
    no_sync = staticmethod(no_context)
