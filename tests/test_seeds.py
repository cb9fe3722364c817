"""Streams of random numbers do not meet."""

import torch

from ddp_runner.seeds import derive


def test_each_seed_purpose_epoch_and_rank_has_a_stream_of_its_own() -> None:
    """No two of a thousand are equal, and torch takes every one, of absurdly large seeds too."""
    found = {
        derive(seed, purpose, number)
        for seed in (0, 1, 2, -1, 2**32, 2**63, 10**30)
        for purpose in ("order", "dropout", "augmentation")
        for number in range(50)
    }
    assert len(found) == 7 * 3 * 50
    assert all(0 <= one < 2**63 for one in found)
    assert torch.rand(1, generator=torch.Generator().manual_seed(max(found)))
    assert derive(3, "order", 12) != derive(3, "order", 1, 2)


def test_a_stream_stays_the_same() -> None:
    """A resumed run draws what the interrupted one would have drawn, also in a later version."""
    assert derive(0, "order", 0) == 8407243675484231436
