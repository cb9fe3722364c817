"""What a run offers to a function of the user's own, and how it answers a wrong call."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import error_line, run_command
from own_loops import run_function
from PIL import Image
from run_folders import checkpoint_dir, checkpoint_steps, metrics, record
from safetensors.torch import load_file

from ddp_runner.own_loop.loop_log import number


@pytest.mark.full
def test_what_else_a_run_offers(tmp_path: Path) -> None:
    """Groups of the config, a torch dataset with workers, plain values, the best checkpoint."""
    source = """
    import torch

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return {"root": torch.full((10,), float(index)), "square": torch.tensor(index**2)}

    def train(run, *, scores, scale):
        model = run.model()
        optimizer = run.optimizer(model.parameters())
        wrapped, best = run.wrap(model), {"score": 0.0, "seen": []}
        loader = run.loader(Squares(), global_size=5, num_workers=1)
        evaluation = run.loader(Squares(), shuffle=False)
        run.restore(model=wrapped, optimizer=optimizer, best=best, loader=loader)
        for step, score in enumerate(scores, start=1):
            for batch in loader:
                wrapped(batch["root"]).sum().mul(scale).backward()
            total = run.sum({"squares": sum(int(one["square"].sum()) for one in evaluation)})
            best["seen"].append(total["squares"])
            best["score"] = max(best["score"], score)
            run.log({"score": score, "squares": torch.tensor(total["squares"])}, step=step)
            run.log_image("flat", torch.full((4, 6), step / 4), step=step)
            run.save(step)
        run.export(wrapped)
    """
    result = run_function(
        source,
        "model=toy",
        "+loop.scores=[1.0,3.0,2.0]",
        "+loop.scale=0.5",
        "checkpoint.monitor=score",
        "checkpoint.keep=1",
        folder=tmp_path,
    )
    assert result.exit_code == 0, result.stderr
    run = result.run_dir
    assert record(run)["uses"] == ["model", "optimizer"]
    assert checkpoint_steps(run) == [2, 3], "the best one, and the last one"
    state = torch.load(checkpoint_dir(run, 3) / "state.pt", weights_only=True)["objects"]
    assert state["best"] == {"score": 3.0, "seen": [285.0] * 3}
    assert state["loader"]["epoch"] == 3
    exported = load_file(run / "model.safetensors")
    assert all(torch.equal(exported[key], one) for key, one in state["model"].items())
    assert [(line["step"], line["score"]) for line in metrics(run)] == [(1, 1), (2, 3), (3, 2)]
    pixels = np.asarray(Image.open(run / "images" / "flat" / "step-00000002.png"))
    assert (pixels.shape, set(pixels.flatten())) == ((4, 6, 3), {128})
    again = run_command(
        f"resume={run}", "allowed_targets=[mine]", "+loop.scores=[]", folder=tmp_path,
        environ={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert again.exit_code == 0, again.stderr
    assert (record(run)["status"], record(run)["step"]) == ("completed", 3)


WRONG = {
    "run.log({'a': 1.0}, step=1)": "the loop began without run.restore; call it before",
    "run.restore(); run.restore()": "run.restore was called twice; call it once",
    "run.restore(); run.save(1)": "run.save has nothing to save; name it in run.restore(",
    "run.restore(best=1.0)": "best, a float, has no state_dict and load_state_dict",
    "run.restore(); run.log({'step': 1}, step=1)": "run.log: step is a field of each line",
    "run.restore(); run.log({'a': torch.ones(2)}, step=1)": "run.log: a is (2,) of float32, not a",
    "run.restore(); run.log_image('a', torch.ones(2, 3, 3), step=1)": "run.log_image: a is (2, 3",
    "run.loader(iter([]))": "run.loader takes a dataset with __len__ and __getitem__, and loader",
    "run.loader(range(0))": "dataset=range has 0 training samples and world_size is 1",
}


def test_a_wrong_call_is_one_line(tmp_path: Path) -> None:
    """Each in a run that is new to it, all in one process."""
    source = f"""
    import json
    from contextlib import ExitStack
    from pathlib import Path

    import torch

    from ddp_runner import Run

    def train(run):
        lines = []
        for call in {list(WRONG)!r}:
            with ExitStack() as stack:
                new = Run(run._session, stop_requested=bool, stack=stack)
                try:
                    exec(call, {{"run": new, "torch": torch}})
                except ValueError as error:
                    lines.append(str(error))
        Path("lines.json").write_text(json.dumps(lines))
    """
    result = run_function(source, "world_size=1", folder=tmp_path)
    assert result.exit_code == 0, result.stderr
    lines = json.loads((tmp_path / "lines.json").read_text())
    for line, sentence in zip(lines, WRONG.values(), strict=True):
        assert line.startswith(sentence)


@pytest.mark.full
def test_arguments_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    """Reported by the ranks, since only they import the function."""
    source = "def train(run, *, latent):\n    pass\n"
    assert "mine.train needs loop.latent; add +loop.latent=VALUE" in error_line(
        run_function(source, folder=tmp_path)
    )


def test_a_logged_loss_may_have_a_gradient() -> None:
    """Torch warns of such a conversion, and the line would be in each log."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert number(torch.tensor(2.5, requires_grad=True)) == number(2.5) == 2.5


@pytest.mark.full
def test_a_mode_whose_engine_would_be_left_out_is_rejected(tmp_path: Path) -> None:
    """The loop would train as if the mode had none."""
    source = """
    from ddp_runner.parallelism.single import Single

    class Compressed(Single):
        def engine(self, state, local):
            raise AssertionError

    def train(run):
        run.restore()
    """
    end = run_function(source, "parallelism._target_=mine.Compressed", folder=tmp_path)
    assert error_line(end).endswith(
        "a loop of your own computes its own steps; write parallelism=ddp"
    )
