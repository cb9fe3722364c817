"""task=evaluate equals the run's own evaluation, and leaves the run as it was."""

import hashlib
import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own_metrics
import pytest
from commands import background, error_line, free_port, run_command, wait_for, wait_for_end
from configs import freeze, resolved
from run_folders import metrics, record
from tiers import first_of

from ddp_runner.inference.evaluate import own_evaluation
from ddp_runner.tracking.alive import read_heartbeat
from ddp_runner.tracking.run_dir import RunDir

SHORT = (
    "train.epochs=2",
    "train.max_steps=6",
    "dataset.num_samples=96",
    "batch.per_rank=16",
    "batch.eval_per_rank=7",
    "train.num_threads=1",
)
RUN, EVALUATION = "run", "evaluation"
MODES = {
    "2 ranks, averaged weights": ("model=toy", "world_size=2", "ema.decay=0.5"),
    "single": ("model=toy", "parallelism=single"),
    "3 ranks, bf16, BatchNorm, classes": (
        *("model=mnist_net", "dataset=fake_images", "world_size=3", "train.precision=bf16"),
    ),
    "ddp_mp": ("model=toy_mp", "parallelism=ddp_mp", "world_size=2"),
    "ps": ("model=toy", "parallelism=ps", "world_size=3"),
    "dp": ("model=toy", "parallelism=dp"),  # on CPUs as single
}


def train(folder: Path, *args: str) -> Path:
    """Train a run and return its folder."""
    end = run_command(*SHORT, *args, f"hydra.run.dir={RUN}", folder=folder)
    assert end.exit_code == 0, end.stderr
    return folder / RUN


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two ranks, to be copied."""
    return train(tmp_path_factory.mktemp("trained"), "model=toy", "world_size=2")


def copied(trained: Path, folder: Path) -> Path:
    """Copy a run into a folder, and return the copy."""
    return Path(shutil.copytree(trained, folder / RUN))


def evaluated(folder: Path, *args: str, name: str = EVALUATION) -> dict[str, float]:
    """Evaluate the run in a folder, and return what was logged."""
    end = run_command(
        "task=evaluate", f"resume={RUN}", f"hydra.run.dir={name}", *args, folder=folder
    )
    assert end.exit_code == 0, end.stderr
    (line,) = metrics(folder / name)
    return line


def of_evaluation(line: dict[str, float]) -> dict[str, float]:
    """Return the metrics of an evaluation, with their step and epoch."""
    return {
        name: value
        for name, value in line.items()
        if name in ("step", "epoch") or name.startswith("eval/")
    }


def own_evaluations(run_dir: Path) -> list[dict[str, float]]:
    """Return what a run has logged of its evaluations."""
    return [of_evaluation(line) for line in metrics(run_dir) if "eval/loss" in line]


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a run."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "args", first_of([(args,) for args in MODES.values()], num_full=4), ids=MODES
)
def test_an_evaluation_equals_the_last_one_of_the_run(
    args: tuple[str, ...], tmp_path: Path
) -> None:
    """Same ranks, same batches: every digit of every metric is the run's own."""
    run_dir = train(tmp_path, *args)
    before = digests(run_dir)
    assert of_evaluation(evaluated(tmp_path)) == own_evaluations(run_dir)[-1]
    assert digests(run_dir) == before
    left = record(tmp_path / EVALUATION)
    assert (left["status"], left["task"], left["of_run"]) == ("completed", "evaluate", str(run_dir))
    assert left["world_size"] == record(run_dir)["world_size"]
    assert ("confusion_matrix" in left) == ("confusion_matrix" in record(run_dir))


@pytest.mark.full
def test_best_weights_are_evaluated_unless_others_are_asked_for(tmp_path: Path) -> None:
    """best, last and a step each give the run's own evaluation at that step."""
    run_dir = train(
        tmp_path,
        *("model=toy", "world_size=2", "scheduler=cosine", "checkpoint.monitor=train/lr"),
        *("train.log_every_steps=1", "train.eval_every_steps=1", "checkpoint.every_steps=1"),
        "checkpoint.keep=2",
    )
    own = {line["step"]: line for line in own_evaluations(run_dir)}
    for asked, step in (("best", 1), ("last", 6), (5, 5)):  # the rate falls from the first step on
        line = evaluated(tmp_path, f"inference.weights={asked}", name=f"evaluation-{asked}")
        assert of_evaluation(line) == own[step]
    end = run_command("task=evaluate", f"resume={RUN}", "inference.weights=4711", folder=tmp_path)
    assert "has no checkpoint of that step; it has" in error_line(end)


@pytest.mark.full
def test_an_unfinished_run_is_evaluated_at_its_newest_checkpoint(
    trained: Path, tmp_path: Path
) -> None:
    """Without an export the newest checkpoint is taken."""
    run_dir = copied(trained, tmp_path)
    (run_dir / "model.safetensors").unlink()
    assert of_evaluation(evaluated(tmp_path)) == own_evaluations(run_dir)[-1]


@pytest.mark.full
def test_the_train_split_and_both_splits_are_evaluated_by_any_number_of_ranks(
    trained: Path, tmp_path: Path
) -> None:
    """Each sample counts once, whoever computes it."""
    copied(trained, tmp_path)
    losses = {
        (split, ranks): evaluated(
            tmp_path, f"inference.split={split}", f"world_size={ranks}", name=f"{split}-{ranks}"
        )["eval/loss"]
        for split in ("eval", "train", "all")
        for ranks in (1, 3)
    }
    for split in ("eval", "train", "all"):
        assert losses[split, 1] == pytest.approx(losses[split, 3], rel=1e-6)
    num_train, num_eval = 96, 40
    both = (num_train * losses["train", 1] + num_eval * losses["eval", 1]) / (num_train + num_eval)
    assert losses["all", 1] == pytest.approx(both, rel=1e-9)
    assert losses["train", 1] != pytest.approx(losses["eval", 1], rel=1e-3)


@pytest.mark.full
def test_another_dataset_is_evaluated_with_its_own_keys(trained: Path, tmp_path: Path) -> None:
    """Other keys of the dataset count, and data that do not fit are named."""
    copied(trained, tmp_path)
    other = evaluated(tmp_path, "dataset.eval_samples=8", "seed=0", name="fewer")
    assert other["eval/loss"] != evaluated(tmp_path)["eval/loss"]
    end = run_command("task=evaluate", f"resume={RUN}", "dataset=digits", folder=tmp_path)
    assert error_line(end).startswith(f"the model of {tmp_path / RUN} cannot take dataset=digits")


@pytest.mark.full
def test_a_metric_that_is_added_must_merge_rightly(tmp_path: Path) -> None:
    """Its run has not tried it."""
    train(tmp_path, "model=toy")
    mine = ("+metrics.mine._target_=own_metrics.SumOfLargest", "allowed_targets=[own_metrics]")
    environ = {"PYTHONPATH": str(Path(own_metrics.__file__).parent)}
    end = run_command("task=evaluate", f"resume={RUN}", *mine, folder=tmp_path, environ=environ)
    assert error_line(end).startswith("metrics.mine (SumOfLargest) depends on the number of ranks")


@pytest.mark.full
def test_the_last_run_is_never_an_evaluation(tmp_path: Path) -> None:
    """resume=last still means the run that was trained."""
    assert run_command(*SHORT, "model=toy", folder=tmp_path).exit_code == 0
    for _ in range(2):
        end = run_command("task=evaluate", "resume=last", folder=tmp_path)
        assert end.exit_code == 0, end.stderr
        assert "to the last digit" in end.stdout


@pytest.mark.full
def test_an_evaluation_that_is_resumed_is_done_again_in_its_folder(
    trained: Path, tmp_path: Path
) -> None:
    """A requeued evaluation takes its own folder and leaves one line."""
    copied(trained, tmp_path)
    first = evaluated(tmp_path)
    end = run_command(f"resume={EVALUATION}", folder=tmp_path)
    assert end.exit_code == 0, end.stderr
    (again,) = metrics(tmp_path / EVALUATION)
    assert of_evaluation(again) == of_evaluation(first)


@pytest.mark.full
def test_ranks_of_another_launcher_evaluate(trained: Path, tmp_path: Path) -> None:
    """With the variables that torchrun sets."""
    run_dir = copied(trained, tmp_path)
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    where |= {"LOCAL_WORLD_SIZE": "2"}
    keys = ("task=evaluate", f"resume={run_dir}", f"hydra.run.dir={tmp_path / EVALUATION}")
    with ExitStack() as stack:
        folders = [tmp_path / f"rank-{rank}" for rank in (0, 1)]
        ranks = [
            stack.enter_context(
                background(
                    *keys,
                    folder=folder,
                    environ={**where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
            for rank, folder in enumerate(folders)
        ]
        for rank, folder in zip(ranks, folders, strict=True):
            end = wait_for_end(rank, folder)
            assert end.exit_code == 0, end.stderr
    assert of_evaluation(metrics(tmp_path / EVALUATION)[0]) == own_evaluations(run_dir)[-1]


@pytest.mark.slow
@pytest.mark.full
def test_an_evaluation_is_seen_to_evaluate(trained: Path, tmp_path: Path) -> None:
    """It takes no steps, so a reader of its heartbeat must not wait for any."""
    copied(trained, tmp_path)
    long = ("dataset.eval_samples=30000", "batch.eval_per_rank=1", f"hydra.run.dir={EVALUATION}")
    path = tmp_path / EVALUATION / ".heartbeat"

    def is_evaluating() -> bool:
        return read_heartbeat(path)[0].get("doing") == "evaluating"

    with background("task=evaluate", f"resume={RUN}", *long, folder=tmp_path) as command:
        wait_for(is_evaluating)
        end = wait_for_end(command, tmp_path)
    assert end.exit_code == 0, end.stderr


@pytest.mark.full
def test_a_sweep_evaluates_several_runs(tmp_path: Path) -> None:
    """-m with several runs evaluates each of them."""
    sweep = ("-m", "model=toy", *SHORT, "seed=1,2", "hydra.sweep.dir=sweep")
    assert run_command(*sweep, folder=tmp_path).exit_code == 0
    runs = ",".join(f"'sweep/seed={seed}'" for seed in (1, 2))
    end = run_command(
        "-m", "task=evaluate", f"resume={runs}", "hydra.sweep.dir=evaluated", folder=tmp_path
    )
    assert end.exit_code == 0, end.stderr
    for seed in (1, 2):
        (found,) = metrics(tmp_path / "evaluated" / f"resume=sweep-seed={seed}")
        assert of_evaluation(found) == own_evaluations(tmp_path / "sweep" / f"seed={seed}")[-1]


@pytest.mark.full
def test_a_model_that_draws_evaluates_to_the_runs_own_digits(tmp_path: Path) -> None:
    """As a VAE does: an evaluation draws the numbers of its step."""
    mine = ("train.step=own_steps.random", "allowed_targets=[own_steps]")
    environ = {"PYTHONPATH": str(Path(own_metrics.__file__).parent)}
    keys = ("model=toy", "world_size=2", *mine, f"hydra.run.dir={RUN}")
    end = run_command(*SHORT, *keys, folder=tmp_path, environ=environ)
    assert end.exit_code == 0, end.stderr
    end = run_command("task=evaluate", f"resume={RUN}", mine[1], folder=tmp_path, environ=environ)
    assert "to the last digit" in end.stdout, end.stderr


@pytest.mark.parametrize("here", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_not_equal(here: float, tmp_path: Path) -> None:
    """A comparison with NaN is neither larger nor smaller."""
    config = resolved("model=toy")[0]
    config.inference.split = "eval"
    freeze(tmp_path, config)
    logged = {"eval/loss": 0.25, "eval/perplexity": 1.5}
    model: Any = SimpleNamespace(
        run_dir=RunDir(tmp_path), logged=logged, weights=SimpleNamespace(step=5)
    )
    sentence = own_evaluation(model, {"eval/loss": 0.25, "eval/perplexity": here}, config)
    assert sentence.endswith(f"eval/perplexity 1.5, here {here}, inf apart")
