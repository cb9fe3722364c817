"""A run on a stream that is killed at a random step goes on bit for bit."""

import signal
from pathlib import Path
from random import Random

import own_streams
import pytest
from commands import background, run_command, wait_for_end
from injection import At, Fault, inject, kill_tree
from run_folders import assert_same_state, metrics, record, reproducible_metrics, run_dirs

pytestmark = pytest.mark.full

# Of the stream's files. The four readers (two ranks, two workers) get 8, 40, 11 and 26 samples.
SIZES = [3, 40, 11, 26, 5]
OWN = ("allowed_targets=[own_streams]",)
STREAM = (
    "dataset=torch_dataset",
    f"dataset.train={{_target_:own_streams.Sharded,sizes:{SIZES}}}".replace(" ", ""),
    "dataset.eval={_target_:own_streams.Plain,size:9}",
    "dataset.num_workers=2",
    "dataset.shuffle_buffer=6",
    "model=toy",
    "model._target_=torch.nn.Linear",
    "+model.in_features=4",
    "+model.out_features=1",
    "train.step=own_streams.numbered",
    *OWN,
    "world_size=2",
    "batch.per_rank=2",
    "train.epochs=3",
    "train.log_every_steps=1",
    "train.num_threads=1",
    "checkpoint.every_steps=2",
    "optimizer=adam",
)


HELPERS = {"PYTHONPATH": own_streams.__file__.rpartition("/")[0]}  # as a user's package


@pytest.mark.slow
def test_a_killed_run_on_a_stream_goes_on_exactly(tmp_path: Path, rng: Random) -> None:
    """Each sample is used once an epoch, and no bit of the weights differs."""
    folder = tmp_path / "killed"
    whole = run_command(*STREAM, folder=tmp_path / "whole", environ=HELPERS)
    assert whole.exit_code == 0, whole.stderr
    fields = record(whole.run_dir)
    assert (fields["status"], fields["epoch"], fields["trains_on_stream"]) == ("completed", 3, True)
    assert whole.stdout.count("outside parity") == 1
    assert "a stream of training and a stream of evaluation samples" in whole.stdout
    assert "3 epochs, an epoch ends with the stream" in whole.stdout

    prepare = inject(Fault(kill_tree, At(1, rng.randrange(4, fields["step"]))))
    with background(*STREAM, folder=folder, environ=HELPERS, prepare=prepare) as process:
        assert wait_for_end(process, folder).exit_code == -signal.SIGKILL
    (run_dir,) = run_dirs(folder)
    resumed = run_command(*OWN, f"resume={run_dir}", folder=folder, environ=HELPERS)
    assert resumed.exit_code == 0, resumed.stderr
    assert_same_state(run_dir, whole.run_dir)
    assert reproducible_metrics(run_dir) == reproducible_metrics(whole.run_dir)
    assert sums_by_epoch(run_dir) == [sum(range(sum(SIZES)))] * 3


def sums_by_epoch(run_dir: Path) -> list[int]:
    """Return the sum of the samples' numbers in each epoch's steps."""
    sums, counts = [0.0] * 3, [0] * 3
    for line in metrics(run_dir):
        if "train/numbers" in line:
            # Each line is of one step.
            count = round(line["perf/samples_per_s"] * line["perf/step_time_ms"] / 1000)
            sums[line["epoch"] - 1] += line["train/numbers"] * count
            counts[line["epoch"] - 1] += count
    assert counts == [sum(SIZES)] * 3
    return [round(one) for one in sums]
