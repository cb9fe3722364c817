"""What the fork server imports before the first worker exists, so that no worker imports it.

Torch's optimizers import torch._dynamo when the first one is built: four seconds that each worker
would pay. Importing starts no thread and touches no GPU.
"""

import torch._dynamo
import torch.utils.tensorboard

import ddp_runner.worker

__all__ = ["ddp_runner", "torch"]
