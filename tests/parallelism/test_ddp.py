"""DDP without a process group: what it builds."""

from typing import Any

import pytest
import torch
import yaml
from torch import nn

from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.parallelism.ddp import DDP

CPU = torch.device("cpu")


def ddp(**changes: bool) -> DDP:
    """Return the mode of parallelism=ddp with some keys changed."""
    keys: dict[str, Any] = yaml.safe_load((CONFIG_DIR / "parallelism" / "ddp.yaml").read_text())
    del keys["_target_"]
    return DDP(**{**keys, **changes})


@pytest.mark.parametrize(("is_synced", "kind"), [(False, nn.BatchNorm1d), (True, nn.SyncBatchNorm)])
def test_batchnorm_is_converted_where_its_statistics_are_synchronized(
    is_synced: bool, kind: type
) -> None:
    """It then counts over the samples of all ranks; only CUDA computes that."""
    mode = ddp(sync_batchnorm=is_synced)
    assert type(mode.place(lambda: nn.BatchNorm1d(2), (CPU,))) is kind


def test_no_sync_names_what_it_was_given() -> None:
    """A bare model would reduce nothing, and train each rank on its own."""
    with pytest.raises(TypeError, match=r"not <class 'torch\.nn\.modules\.linear\.Linear'>"):
        ddp().no_sync(nn.Linear(1, 1))
