"""A rank is bound to the cores near its GPU, whatever this torch calls the helper's keyword."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import resolved
from torch.distributed.launcher import api
from torch.numa import binding

from ddp_runner.config.schema import RunConfig
from ddp_runner.launch.rank_process import bound_to_cores

OPTIONS = binding.NumaOptions(affinity_mode=binding.AffinityMode.NODE)


@pytest.fixture
def config() -> RunConfig:
    """Return a resolved config."""
    return resolved("model=toy", "world_size=2")[0]


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's launcher bind ranks, as it does where each has a GPU."""
    for kind in (torch.accelerator, torch.cuda):  # torch 2.11 asks CUDA
        monkeypatch.setattr(kind, "is_available", lambda: True)
        monkeypatch.setattr(kind, "device_count", lambda: 2)
    monkeypatch.setattr(api, "get_default_numa_options", lambda: OPTIONS)


def named_as_now(work: Any, *, device_index: int, numa_options: Any) -> Any:
    """Stand for torch's helper in 2.15."""
    return lambda: (work(), device_index, numa_options)


def named_as_before(work: Any, *, gpu_index: int, numa_options: Any) -> Any:
    """Stand for torch's helper in 2.11."""
    return lambda: (work(), gpu_index, numa_options)


@pytest.mark.parametrize("helper", [named_as_now, named_as_before])
def test_ranks_are_bound_under_either_name(
    helper: Any, monkeypatch: pytest.MonkeyPatch, bind: None, config: RunConfig
) -> None:
    """Torch has renamed the keyword of its helper, which is private."""
    monkeypatch.setattr(binding, "_maybe_wrap_with_numa_binding", helper)
    assert bound_to_cores(lambda: "done", 1, config)() == ("done", 1, OPTIONS)


def test_the_helper_of_this_torch_is_known(bind: None, config: RunConfig) -> None:
    """The helper returns a wrapped function, without calling it."""
    assert callable(bound_to_cores(lambda: "done", 0, config))


def test_torchs_launcher_makes_no_folder_for_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: RunConfig
) -> None:
    """Nobody would remove it: torch's own launcher leaves it to the user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert bound_to_cores(len, 0, config) is len
    assert not list(tmp_path.iterdir())
