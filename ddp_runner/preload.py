"""What the fork server imports before the first worker exists, so that no worker imports it.

Torch's optimizers import torch._dynamo when the first one is built: four seconds that each worker
would pay. Importing starts no thread and touches no GPU.
"""

import importlib

from ddp_runner.stop import die_with_parent

die_with_parent()  # at once: by the end of its pipe it would be told after these seconds only
for name in (
    *("torch._dynamo", "torch.utils.tensorboard", "tensorboard.plugins.hparams.metadata"),
    "ddp_runner.worker",
):
    importlib.import_module(name)
