"""Imports, in the fork server, what every rank needs, so that no rank pays for it.

Torch's optimizers import torch._dynamo when the first one is built: four seconds for each rank.
The server must start no thread and touch no GPU: neither survives a fork.
"""

import atexit
import importlib
import os
import signal
import sys

from ddp_runner.host.processes import die_with_parent, kill_descendants

SERVER = os.getpid()


def end_with_launcher(*_: object) -> None:
    """Kill the ranks and all that they have started; then end this server."""
    if os.getpid() == SERVER:  # the forked ranks inherit the handlers
        kill_descendants()
        os._exit(128 + signal.SIGKILL)


die_with_parent()  # before the imports: until they finish, the closed pipe would go unnoticed
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise its import starts threads
for name in (
    "torch._dynamo",
    "torch.utils.tensorboard",
    "tensorboard.plugins.hparams.metadata",
    "ddp_runner.worker",
):
    importlib.import_module(name)
if sys.platform == "linux":
    # From here on there may be ranks. The kernel ends them with this server, not their children.
    # A dying launcher closes its pipe first, and the server's loop exits when it sees that.
    atexit.register(end_with_launcher)
    signal.signal(signal.SIGRTMIN, end_with_launcher)
    die_with_parent(signal.SIGRTMIN)
