"""One process, one device: what every other mode is compared with."""

from dataclasses import dataclass

from ddp_runner.parallelism import OneDevice


@dataclass(frozen=True)
class Single(OneDevice):
    """A bare model on one device."""

    max_ranks: int
