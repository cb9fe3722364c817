"""The keys of how ranks start and meet. Torch-free."""

import re
from dataclasses import dataclass

from ddp_runner.errors import UserError

ENDPOINT = re.compile(r"(?:\[([\da-fA-F:.]+(?:%\w+)?)\]|([^\s\[\]:/@]+))(?::(\d{1,5}))?")
DEFAULT_PORT = 29400  # torchrun's


@dataclass
class LaunchConfig:
    """How the ranks start. Under torchrun, which has its own flags, these keys are ignored."""

    nnodes: int = 1  # number of machines
    nproc_per_node: int | None = None  # ranks per machine; null: world_size / nnodes
    # this machine's number, which orders the ranks; 0 hosts the rendezvous; null: HOST does
    node_rank: int | None = None
    rdzv_endpoint: str | None = None  # HOST:PORT where the machines meet; needed when nnodes > 1
    rdzv_id: str = "ddp_runner"  # the same on every machine of one run
    join_timeout_s: float = 600.0  # seconds that a machine waits for the others
    max_restarts: int = 0  # restarts of all ranks after a failure, each from the last checkpoint
    # Where the ranks meet: tcp://HOST:PORT or file:///PATH; file://NAME is in the run folder; null:
    # at the rendezvous. A resumed run does not keep it.
    init_method: str | None = None
    # Seconds from the first Ctrl-C or SIGTERM to SIGKILL; ten times as long while a checkpoint is
    # written.
    shutdown_timeout_s: float = 30.0


def meeting_place(launch: LaunchConfig) -> tuple[str, int]:
    """Return the host and the port of launch.rdzv_endpoint.

    Raises:
        UserError: it is neither HOST nor HOST:PORT.
    """
    found = ENDPOINT.fullmatch(launch.rdzv_endpoint or "")
    port = int(found[3] or DEFAULT_PORT) if found else 0
    if found is None or not 1 <= port <= 65535:
        raise UserError(
            f"launch.rdzv_endpoint ({launch.rdzv_endpoint}) must be HOST:PORT, with a port from 1 "
            "to 65535 and an IPv6 address in brackets; write n1:29400, or [fd00::1]:29400"
        )
    return found[1] or found[2], port
