"""Under torchrun a user's mistake is printed once, and no further attempt repeats it."""

import sys
from pathlib import Path

import pytest
from commands import TORCHRUN, WATCH_TORCH, run_command
from run_folders import rank_log

from ddp_runner.launch.mistakes import is_noted, note_mistake

# The samples of rank 1 alone are wrong.
ODD = """
import os
from dataclasses import dataclass
from ddp_runner.data.sources.offline import RandomRegression
from ddp_runner.errors import UserError

@dataclass(frozen=True)
class Odd(RandomRegression):
    def build(self, *args, **keys):
        if os.environ["RANK"] == "1":
            raise UserError("the shard of rank 1 is empty; fill it")
        return super().build(*args, **keys)
"""


def rank_of(folder: Path, rank: int, attempt: int = 0) -> dict[str, str]:
    """Return the variables that an agent gives a rank."""
    file = folder / f"attempt_{attempt}" / str(rank) / "error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    facts |= {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": attempt}
    return {key: str(value) for key, value in facts.items()} | {
        "TORCHELASTIC_ERROR_FILE": str(file)
    }


def test_the_first_rank_that_notes_a_mistake_prints_it(tmp_path: Path) -> None:
    """Whichever it is; another agent has a folder of its own."""
    first, second = rank_of(tmp_path / "one", 1), rank_of(tmp_path / "one", 0)
    again, other = rank_of(tmp_path / "one", 0, attempt=1), rank_of(tmp_path / "other", 0)
    assert not is_noted(first)
    assert [note_mistake(one) for one in (first, second, again)] == [True, False, False]
    assert [is_noted(one) for one in (first, again, other)] == [True, True, False]


def test_without_an_agents_folder_the_first_rank_of_a_machine_prints(tmp_path: Path) -> None:
    """As under srun, or where torchrun keeps no logs."""
    for file in ("", str(tmp_path / "error.json")):
        zero, one = (rank_of(tmp_path, rank) | {"TORCHELASTIC_ERROR_FILE": file} for rank in (0, 1))
        assert [note_mistake(env) for env in (zero, one, zero)] == [True, False, True]
        assert not is_noted(zero)


def test_the_next_attempt_ends_before_torch_is_imported(tmp_path: Path) -> None:
    """In silence: the line has been printed."""
    here = tmp_path / "here"
    ends = [
        run_command("train.epochs=-3", folder=here, environ=rank_of(tmp_path, rank))
        for rank in (0, 1)
    ]
    assert [end.exit_code for end in ends] == [2, 2]
    assert [end.stderr for end in ends] == ["error: train.epochs (-3) must be greater than 0\n", ""]
    watched = (sys.executable, "-c", WATCH_TORCH)
    again = rank_of(tmp_path, 0, attempt=1)
    end = run_command("train.epochs=-3", folder=here, program=watched, environ=again)
    assert (end.exit_code, end.stdout, end.stderr) == (2, "False\n", "")


ON_ONE_RANK = (
    *("dataset._target_=odd.Odd", "dataset.num_samples=8", "dataset.eval_samples=8"),
    *("dataset.input_size=10", "dataset.target_size=5", "dataset.seed=0"),
)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(ON_ONE_RANK, id="one"),
        # Before torch a mistake is found as above, with the variables that torchrun sets.
        pytest.param(("train.epochs=-3",), id="all", marks=pytest.mark.slow),
    ],
)
def test_torchrun_prints_a_mistake_once(keys: tuple[str, ...], tmp_path: Path) -> None:
    """Found by every rank before torch, or by rank 1 alone, whose output goes to its log."""
    (tmp_path / "odd.py").write_text(ODD)
    end = run_command(
        *("-m", "ddp_runner", "model=toy", "allowed_targets=[odd]", *keys),
        folder=tmp_path,
        program=(*TORCHRUN, "--max-restarts=3"),
        environ={"PYTHONPATH": str(tmp_path)},
    )
    assert end.exit_code == 1
    lines = [line for line in end.stderr.splitlines() if line.startswith("error: ")]
    expected = "train.epochs (-3) must be greater than 0"
    if "odd" in keys[0]:
        expected = "the shard of rank 1 is empty; fill it"
        assert rank_log(end.run_dir, 1).count("resumed") == 0
    assert lines == [f"error: {expected}"]
