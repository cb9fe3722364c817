"""Seeds of a run's streams of random numbers: one for each purpose, epoch and rank. Torch-free."""

import hashlib
import json


def derive(seed: int, *labels: str | int) -> int:
    """Return the seed of one stream, in 0 to 2**63 - 1, as torch.Generator takes it.

    The labels say what the stream is for, and its epoch, rank or step: ("order", 3). A hash and not
    a sum: with seed + epoch the second epoch of seed 0 would be the first of seed 1, and runs that
    differ in their seed alone would not be independent.
    """
    text = json.dumps([seed, *labels])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
