"""What the fork server imports before the first worker exists, so that no worker imports it.

Torch's optimizers import torch._dynamo when the first one is built: four seconds that each worker
would pay. Importing starts no thread and touches no GPU.
"""

import importlib
import os
import signal
import sys

from ddp_runner.host.children import kill_descendants
from ddp_runner.rank.stop import die_with_parent

SERVER = os.getpid()


def end_with_launcher(*_: object) -> None:
    """Kill the ranks and what they have started, however deep; then end this server."""
    if os.getpid() == SERVER:  # the ranks, being forked, inherit the handler
        kill_descendants()
        os._exit(128 + signal.SIGKILL)


die_with_parent()  # at once: by the end of its pipe it would be told after these seconds only
for name in (
    *("torch._dynamo", "torch.utils.tensorboard", "tensorboard.plugins.hparams.metadata"),
    "ddp_runner.worker",
):
    importlib.import_module(name)
if sys.platform == "linux":
    # From here on there are ranks. The kernel ends them with this server, but not their children.
    signal.signal(signal.SIGRTMIN, end_with_launcher)
    die_with_parent(signal.SIGRTMIN)
