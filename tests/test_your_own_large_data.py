"""Pictures in folders and in tar shards: what their pages show runs as it stands."""

import math
from pathlib import Path

import pytest
from commands import run_command
from pages import commands, write_files
from pictures import write_folders, write_shards
from run_folders import metrics, record

pytestmark = [pytest.mark.full, pytest.mark.slow]

PAGES = ("docs/your_own_data.md", "docs/your_own_streams.md")


def test_each_command_about_pictures_runs(tmp_path: Path) -> None:
    """On two ranks: with pictures in folders, and with shards, copied and streamed."""
    files = [name for page in PAGES for name in write_files(page, tmp_path)]
    assert {"conf/dataset/pets.yaml", "my_package/pets.py"} <= set(files)
    write_folders(tmp_path / "data" / "pets", num_train=30, num_eval=6)
    write_shards(tmp_path / "data" / "pet_shards", num_train=30, num_eval=6)
    found = [words for page in PAGES for words in commands(page)]
    about_pets = [words for words in found if any("dataset=pet" in word for word in words)]
    assert len(about_pets) == 3
    for number, words in enumerate(about_pets):
        run = tmp_path / f"run{number}"
        done = run_command(
            *words,
            *("world_size=2", "batch.per_rank=5", "dataset.num_workers=1", f"hydra.run.dir={run}"),
            folder=tmp_path,
            environ={
                "PYTHONPATH": str(tmp_path),
                "DDP_RUNNER_DATA_ROOT": None,
                "HF_HOME": str(tmp_path / "hf"),
            },
        )
        assert done.exit_code == 0, done.stderr
        losses = [line["eval/loss"] for line in metrics(run) if "eval/loss" in line]
        assert record(run)["status"] == "completed"
        assert len(losses) == 2
        assert all(map(math.isfinite, losses))
