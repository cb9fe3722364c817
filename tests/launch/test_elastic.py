"""What torch's launcher settles for the ranks of a machine, and how its versions name it."""

from typing import Any

import pytest
from torch.numa import binding as numa

from ddp_runner.launch.elastic import numa_bound

OPTIONS = numa.NumaOptions(affinity_mode=numa.AffinityMode.NODE)


def named_as_now(work: Any, *, device_index: int, numa_options: Any) -> Any:
    """Torch's helper as 2.15 has it."""
    return lambda: (work(), device_index, numa_options)


def named_as_before(work: Any, *, gpu_index: int, numa_options: Any) -> Any:
    """Torch's helper as 2.11 has it."""
    return lambda: (work(), gpu_index, numa_options)


@pytest.mark.parametrize("helper", [named_as_now, named_as_before])
def test_ranks_are_bound_under_either_name(helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has renamed the keyword of its helper, which is private."""
    monkeypatch.setattr(numa, "_maybe_wrap_with_numa_binding", helper)
    assert numa_bound(lambda: "done", 1, OPTIONS)() == ("done", 1, OPTIONS)
    assert numa_bound(len, 1, None) is len


def test_the_helper_of_this_torch_is_known() -> None:
    """A wrapped function comes back, which is not called yet."""
    assert callable(numa_bound(lambda: "done", 0, OPTIONS))
