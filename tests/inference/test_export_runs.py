"""Exports to ONNX and torch.export give what the model gives, for batches of any size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import error_line, run_command
from run_folders import record
from safetensors.torch import load_file
from texts import write_reviews
from tiers import first_of

import ddp_runner

RUN = "run"
OWN_DATA = {"DDP_RUNNER_DATA_ROOT": "data"}
BOTH = "checkpoint.export=[onnx,torch_export]"
MODELS: dict[str, tuple[tuple[str, ...], Any]] = {
    "two stages": (
        ("model=toy_mp", "parallelism=ddp_mp", "world_size=1", "dataset.num_samples=64"),
        lambda size: torch.randn(size, 10),
    ),
    "pictures": (
        ("model=mnist_net", "dataset=fake_images", "dataset.num_samples=64"),
        lambda size: torch.randn(size, 1, 28, 28),
    ),
    "texts": (
        (
            *("model=bert", "dataset=csv_text", "dataset.path=reviews.csv", "model.width=16"),
            *("model.num_layers=1", "model.feedforward=16", "dataset.vocab_size=200"),
        ),
        lambda size: torch.randint(5, 100, (size, size + 3), dtype=torch.int32),
    ),
}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("args", "samples"), first_of(MODELS.values(), num_full=1), ids=MODELS)
def test_programs_give_what_the_model_gives(
    args: tuple[str, ...], samples: Any, tmp_path: Path
) -> None:
    """Batches of other sizes than were traced.

    By task=export, and in the default tier at the end of the training, too: both call one function.
    """
    import onnxruntime

    (tmp_path / "data").mkdir()
    write_reviews(tmp_path / "data" / "reviews.csv")
    folders = [RUN, "exported"] if args == MODELS["two stages"][0] else ["exported"]
    at_the_end = [BOTH] if RUN in folders else []
    keys = (*args, "train.max_steps=2", *at_the_end, f"hydra.run.dir={RUN}")
    end = run_command(*keys, folder=tmp_path, environ=OWN_DATA)
    assert end.exit_code == 0, end.stderr
    keys = ("task=export", f"resume={RUN}", BOTH, "hydra.run.dir=exported")
    again = run_command(*keys, folder=tmp_path, environ=OWN_DATA)
    assert again.exit_code == 0, again.stderr
    for one in (end, again):
        assert "torch.onnx" not in one.stdout + one.stderr
    model = ddp_runner.load(tmp_path / RUN)
    for folder in folders:
        program = torch.export.load(tmp_path / folder / "model.pt2").module()
        session = onnxruntime.InferenceSession(tmp_path / folder / "model.onnx")
        (name,) = (one.name for one in session.get_inputs())
        for size in (1, 2, 5):
            inputs = samples(size)
            with torch.no_grad():
                expected = model(inputs)
                assert torch.allclose(program(inputs), expected, atol=1e-5)
            (found,) = session.run(None, {name: inputs.numpy()})
            assert torch.allclose(torch.from_numpy(found), expected, atol=1e-5)
    weights = [load_file(tmp_path / one / "model.safetensors") for one in (RUN, "exported")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.full
def test_a_model_that_cannot_be_traced_fails_the_export_and_not_the_training(
    tmp_path: Path,
) -> None:
    """A training that is complete stays complete; the warning is in run.json."""
    (tmp_path / "branching.py").write_text(
        "from torch import Tensor, nn\n\n\n"
        "class Branching(nn.Module):\n"
        "    def __init__(self) -> None:\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(10, 5)\n\n"
        "    def forward(self, x: Tensor) -> Tensor:\n"
        "        return self.layer(x) if x.sum().item() > 0 else -self.layer(x)\n"
    )
    own = ("allowed_targets=[branching]",)
    args = (*own, "model=toy", "model._target_=branching.Branching", "dataset.num_samples=64")
    end = run_command(
        *args,
        "train.max_steps=2",
        "checkpoint.export=[torch_export]",
        f"hydra.run.dir={RUN}",
        folder=tmp_path,
    )
    assert end.exit_code == 0, end.stderr
    left = record(tmp_path / RUN)
    assert left["status"] == "completed"
    assert "torch cannot make a program of model=branching" in left["warnings"][-1]
    assert (tmp_path / RUN / "model.safetensors").exists()
    end = run_command(
        "task=export", f"resume={RUN}", "checkpoint.export=[torch_export]", *own, folder=tmp_path
    )
    assert "torch cannot make a program of model=branching" in error_line(end)
