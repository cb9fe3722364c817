"""The content of a copy of a training state, and its memory."""

import torch
from torch import nn

from ddp_runner.checkpoint.staging import Stager


def test_a_copy_equals_its_state_and_shares_no_memory_with_it() -> None:
    """Strides, offsets, an empty tensor, nested lists, and the metadata of state_dict()."""
    whole = torch.arange(12.0).reshape(3, 4)
    model = nn.BatchNorm1d(3)
    state = {
        "cut": [whole.t(), whole[1:, 2]],
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "small": (torch.tensor(7, dtype=torch.int16), torch.ones(2, dtype=torch.bfloat16)),
        "model": model.state_dict(),
        "plain": {"rate": 0.5, "names": ["a", None, True]},
    }
    copied = Stager(pinned=False).stage(state)
    given = [*state["cut"], state["empty"], *state["small"], *state["model"].values()]
    found = [*copied["cut"], copied["empty"], *copied["small"], *copied["model"].values()]
    for one, other in zip(given, found, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        if one.numel():
            assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    assert copied["plain"] == state["plain"]
    assert copied["plain"]["names"] is not state["plain"]["names"]
    assert copied["model"]._metadata == state["model"]._metadata
    assert type(copied["small"]) is tuple
    storages = {one.untyped_storage().data_ptr() for one in copied["cut"]}
    assert len(storages) == 1  # two views of one tensor, as before


def test_the_next_copy_takes_the_memory_of_the_one_before() -> None:
    """Allocation takes most of the first copy's time. Memory of dropped tensors is released."""
    weights, once = torch.zeros(1000), torch.zeros(10)
    stager = Stager(pinned=False)
    first = stager.stage({"weights": weights, "once": once})
    weights += 1
    second = stager.stage({"weights": weights})
    assert first["weights"].data_ptr() == second["weights"].data_ptr()
    assert second["weights"].tolist() == [1.0] * 1000
    assert len(stager._memory) == 1
