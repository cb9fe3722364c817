"""Files of all ranks come to rank 0."""

from pathlib import Path

import pytest
from ranks import run_ranks

from ddp_runner.dist_env import DistEnv
from ddp_runner.profiling import gather


def send(env: DistEnv, folder: Path, piece_bytes: int) -> None:
    """Gather files of a few hundred bytes, in pieces."""
    gather.PIECE_BYTES = piece_bytes
    own = folder / f"own-{env.rank}"
    own.mkdir()
    (own / f"rank-{env.rank}").write_bytes(bytes(range(env.rank, 200)))
    (own / f"empty-{env.rank}").touch()
    gather.gather_files(own, folder / "all" if env.is_rank_zero else None)


@pytest.mark.parametrize("piece_bytes", [64, 199, 1000])
def test_rank_zero_has_each_file_whole(tmp_path: Path, piece_bytes: int) -> None:
    """Whether or not it fits in a piece."""
    (tmp_path / "all").mkdir()
    run_ranks(send, 3, tmp_path, piece_bytes)
    found = {path.name: path.read_bytes() for path in (tmp_path / "all").iterdir()}
    assert found == {f"rank-{rank}": bytes(range(rank, 200)) for rank in range(3)} | {
        f"empty-{rank}": b"" for rank in range(3)
    }
