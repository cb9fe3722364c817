"""DDP without a process group: what it builds."""

from typing import Any

import pytest
import torch
import yaml
from ranks import run_ranks
from torch import nn

from ddp_runner.config.schema import CONFIG_DIR
from ddp_runner.dist_env import DistEnv
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


def graphs_of_a_compiled_model(env: DistEnv) -> int:
    """Return how many graphs torch.compile makes of a model of 8 MiB with buckets of 1 MiB."""
    graphs = list[Any]()

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    keys: dict[str, Any] = {"bucket_cap_mb": 1}
    model = ddp(**keys).wrap(torch.compile(net, backend=backend), (CPU,))
    model(torch.ones(2, 512)).sum().backward()
    return len(graphs)


@pytest.mark.full
def test_a_compiled_model_is_cut_at_the_buckets() -> None:
    """So a bucket is exchanged while the backward of those before it computes."""
    (number,) = run_ranks(graphs_of_a_compiled_model, 1, fresh=True)
    assert number == 8
