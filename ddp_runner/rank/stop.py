"""How a rank learns that it should stop."""

import signal

from ddp_runner.host.processes import handled_signals
from ddp_runner.job import Wire


class StopRequest:
    """True once this rank should finish its step, save and end.

    Our launcher asks over the wire: Ctrl-C reaches every process of a terminal, SIGTERM may reach
    every process of a container, and only the launcher knows which it was. Under another launcher
    (torchrun, Slurm) any of ``STOP_SIGNALS`` is the request.
    """

    def __init__(self, wire: Wire | None) -> None:
        self._wire = wire
        self.received: int | None = None  # the signal that this very rank received
        # SIGTERM to one rank of ours, sent by hand, asks as well; the other signals are ignored.
        for signum in handled_signals() if wire is None else (signal.SIGTERM,):
            signal.signal(signum, self._receive)

    def __call__(self) -> bool:
        """Return whether to stop; cheap enough for every step."""
        return self.received is not None or (self._wire is not None and self._wire.stop)

    def _receive(self, signum: int, frame: object) -> None:
        self.received = self.received or signum
