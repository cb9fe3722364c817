"""A mode of a user's own, as docs/parallelism.md shows it, from outside of the project."""

from pathlib import Path

import pytest
from commands import run_command
from pages import commands, write_files
from run_folders import metrics, record
from safetensors.torch import load_file
from torch.testing import assert_close

PAGE = "docs/parallelism.md"


@pytest.mark.full
@pytest.mark.parametrize("mode", ["my_fsdp", "my_zero1"])
def test_a_mode_from_outside_trains_saves_resumes_and_exports(mode: str, tmp_path: Path) -> None:
    """Two ranks stop after four steps and continue: losses and export equal one process's."""
    write_files(PAGE, tmp_path)
    (own,) = (words for words in commands(PAGE) if f"parallelism={mode}" in words)
    keys = (
        *("train.log_every_steps=1", "train.eval_every_epochs=0", "batch.global_size=4"),
        *("dataset.sequence_length=16", "model.num_layers=2", "model.width=32"),
    )
    environ = {"PYTHONPATH": str(tmp_path)}

    def train(name: str, *words: str) -> Path:
        done = run_command(*words, *keys, folder=tmp_path, environ=environ)
        assert done.exit_code == 0, done.stderr
        return tmp_path / name

    train("own", *own, "train.max_steps=4", "hydra.run.dir=own")
    resumed = train("own", "resume=own", "allowed_targets=[my_modes]", "train.max_steps=8")
    single = ("model=gpt", "parallelism=single", "world_size=1", "train.max_steps=8")
    alone = train("alone", *single, "hydra.run.dir=alone")
    assert record(resumed)["status"] == "completed"
    losses = [
        [line["train/loss"] for line in metrics(run) if "train/loss" in line]
        for run in (resumed, alone)
    ]
    assert len(losses[0]) == 8
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    found, expected = (load_file(run / "model.safetensors") for run in (resumed, alone))
    assert_close(found, expected, rtol=1e-3, atol=1e-3)
