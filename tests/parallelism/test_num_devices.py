"""How many devices a run uses in each mode: what its efficiency is divided by."""

import pytest
import torch
from train_states import compose_config

from ddp_runner.config.schema import mode_needs
from ddp_runner.dist_env import DistEnv
from ddp_runner.parallelism.mode import count_devices, rank_devices


@pytest.mark.parametrize(
    ("mode", "world_size", "on_cpu", "on_cuda"),
    [("single", 1, 1, 1), ("dp", 1, 1, 4), ("ddp", 4, 4, 4), ("ddp_mp", 2, 2, 4), ("ps", 3, 3, 3)],
)
def test_each_mode_counts_its_devices(
    mode: str, world_size: int, on_cpu: int, on_cuda: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two nodes' worth of GPUs as on one; on the CPU a rank is one, whatever its stages."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    model = "toy_mp" if mode == "ddp_mp" else "toy"
    keys = (f"parallelism={mode}", f"model={model}", "batch.global_size=24")
    config = compose_config(*keys, world_size=world_size)
    needs, env = mode_needs(config.parallelism), DistEnv(0, 0, world_size, world_size)
    for kind, expected in (("cpu", on_cpu), ("cuda", on_cuda)):
        devices = rank_devices(env, kind=kind, per_rank=needs.devices_per_rank)
        assert count_devices(env, devices, data_parallel=needs.data_parallel) == expected
