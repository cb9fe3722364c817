"""A checkpoint that only rank 0's machine has, and the copies on the others."""

import tempfile
from pathlib import Path

import pytest
from ranks import run_ranks

from ddp_runner.checkpoint.between_ranks import on_every_machine
from ddp_runner.checkpoint.manifest import MANIFEST, STATE, facts_of, manifest_text, read_manifest
from ddp_runner.dist_env import DistEnv

CONTENT = b"weights" * 1000

FILES = (STATE, "shard-00001-of-00001.safetensors")


def loaded_in(env: DistEnv, folder: str) -> tuple[str, str]:
    """Load on rank 0's machine, on a second with ranks 1 and 2, and on a third with rank 3.

    Return the temporary folder of a rank's machine, and the folder from which it has loaded. All
    have one host name, as containers may, and none sees the disk of another.
    """
    disk = Path(folder, str((env.rank + 1) // 2))
    disk.mkdir(exist_ok=True)
    path = disk / "checkpoint"
    if env.is_rank_zero:
        path.mkdir()
        for name in FILES:
            (path / name).write_bytes(CONTENT + name.encode())
        facts = {name: facts_of(path / name) for name in FILES}
        (path / MANIFEST).write_text(manifest_text(facts, step=1, metrics={}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(disk))
        exists = Path.is_dir
        patch.setattr(Path, "is_dir", lambda one: disk in one.parents and exists(one))
        with on_every_machine(path) as found:
            for name in FILES:
                assert (found / name).read_bytes() == CONTENT + name.encode()
            assert [*read_manifest(found).files] == [*FILES]
    return str(disk), str(found)


def test_each_machine_without_the_checkpoint_gets_one_copy(tmp_path: Path) -> None:
    """Its ranks share it, and no copy stays."""
    places = run_ranks(loaded_in, 4, str(tmp_path))
    assert all(found.startswith(disk) for disk, found in places)
    assert places[1] == places[2] != places[3]
    assert [one.name for one in tmp_path.glob("*/*")] == ["checkpoint"]
