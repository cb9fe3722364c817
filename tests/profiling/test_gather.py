"""Files of all ranks come to rank 0."""

from pathlib import Path

import pytest
from ranks import run_ranks

from ddp_runner.dist_env import DistEnv
from ddp_runner.distributed import gather_objects
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


def send_to_nowhere(env: DistEnv, folder: Path) -> tuple[str, list[int]]:
    """Gather files that rank 0 cannot write, and then something else."""
    gather.PIECE_BYTES = 64
    (folder / f"own-{env.rank}").mkdir()
    (folder / f"own-{env.rank}" / f"rank-{env.rank}").write_bytes(bytes(200))
    target = folder / "none" if env.is_rank_zero else None
    failure = gather.gather_files(folder / f"own-{env.rank}", target)
    return type(failure).__name__, gather_objects(env.rank)


def test_rank_zero_takes_all_files_even_if_it_cannot_write_them(tmp_path: Path) -> None:
    """The others would wait, or give it the rest in place of what comes next."""
    assert run_ranks(send_to_nowhere, 3, tmp_path) == [
        ("FileNotFoundError", [0, 1, 2]),
        *2 * [("NoneType", [0, 1, 2])],
    ]
