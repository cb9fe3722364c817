"""The numbers of a comparison, from generated run folders with known numbers."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from generated_runs import SINGLE, lines_of, write_run

from ddp_runner.compare.analysis import Comparison, ComparisonRow, compare
from ddp_runner.compare.formats import as_text
from ddp_runner.compare.plots import figures
from ddp_runner.compare.recorded_run import Stat, Target, stat
from ddp_runner.compare.run_reader import read_run, read_runs
from ddp_runner.config.identity import leaves
from ddp_runner.errors import UserError
from ddp_runner.tracking.run_dir import RunDir

STRONG = {1: (64, 64), 2: (64, 32), 4: (64, 16)}  # global batch, batch per rank
WEAK = {1: (64, 64), 2: (128, 64), 4: (256, 64)}


def write_scaling(
    folder: Path,
    speeds: dict[int, float],
    *,
    batches: dict[int, tuple[int, int]],
    config: dict[str, Any] | None = None,
    record: dict[str, Any] | None = None,
) -> None:
    """Write a run for each world size, with a speed that its first line does not reach."""
    for world_size, speed in speeds.items():
        sizes = dict(zip(("batch.global_size", "batch.per_rank"), batches[world_size], strict=True))
        write_run(
            folder / f"{(config or {}).get('parallelism.name', 'ddp')}-{world_size}",
            config={"world_size": world_size, **sizes, **(config or {})},
            lines=lines_of([1.0, speed - 10, speed + 30, speed]),
            record=record,
        )


def compared(folder: Path, **options: Any) -> Comparison:
    """Compare all runs below a folder."""
    return compare(read_runs([folder]), **options)


def at(comparison: Comparison, world_size: int) -> ComparisonRow:
    """Return the only row with a world size."""
    (only,) = [row for row in comparison.rows if row.runs[0].world_size == world_size]
    return only


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_speedup_and_efficiency_are_relative_to_the_fewest_devices(
    tmp_path: Path, kind: str
) -> None:
    """Strong scaling keeps the global batch, weak scaling the batch per rank."""
    batches = STRONG if kind == "strong" else WEAK
    write_scaling(tmp_path, {1: 200.0, 2: 360.0, 4: 640.0}, batches=batches)
    comparison = compared(tmp_path)
    assert comparison.keys == ("parallelism.name", "world_size")
    for world_size, speedup, efficiency in ((1, 1.0, 1.0), (2, 1.8, 0.9), (4, 3.2, 0.8)):
        row = at(comparison, world_size)
        scaling = row.scalings[kind]
        assert (scaling.speedup, scaling.efficiency) == pytest.approx((speedup, efficiency))
        assert (scaling.base, scaling.base_num_devices) == ("1 rank", 1)
        assert row.scalings.keys() == {kind}
    assert at(comparison, 2).stats["perf/samples_per_s"] == Stat(360.0, None, 1)


def test_tensor_parallelism_has_no_weak_scaling(tmp_path: Path) -> None:
    """With more ranks each computes less of a sample, so a batch per rank is no constant work."""
    write_scaling(tmp_path, {1: 200.0}, batches=WEAK)
    keys = {"parallelism.name": "tp", "parallelism.tensor_parallel_size": 2}
    same_batch = {2: WEAK[1]}  # two ranks compute it together
    write_scaling(tmp_path, {2: 300.0}, batches=same_batch, config=keys)
    row = at(compared(tmp_path), 2)
    assert row.scalings.keys() == {"strong"}
    assert row.scalings["strong"].speedup == pytest.approx(1.5)


def test_virtual_ranks_have_no_weak_scaling(tmp_path: Path) -> None:
    """The batch per virtual rank is constant, and each rank has fewer of them."""
    batches = dict.fromkeys((1, 2), (64, 8))
    write_scaling(
        tmp_path, {1: 200.0, 2: 300.0}, batches=batches, config={"batch.virtual_ranks": 8}
    )
    row = at(compared(tmp_path), 2)
    assert row.scalings.keys() == {"strong"}


def test_strong_and_weak_scaling_share_the_run_with_one_rank(tmp_path: Path) -> None:
    """With two ranks, one run has its global batch and the other its batch per rank."""
    write_scaling(tmp_path / "strong", {1: 200.0, 2: 300.0}, batches=STRONG)
    write_scaling(tmp_path / "weak", {2: 380.0}, batches=WEAK)
    comparison = compared(tmp_path)
    assert comparison.keys == ("parallelism.name", "world_size", "batch.global_size")
    two_ranks = {row.setting["batch.global_size"]: row for row in comparison.rows[1:]}
    speedups = {
        batch: {kind: scaling.speedup for kind, scaling in row.scalings.items()}
        for batch, row in two_ranks.items()
    }
    assert speedups[64] == {"strong": pytest.approx(1.5)}
    assert speedups[128] == {"weak": pytest.approx(1.9)}


def test_a_mode_without_a_run_on_one_device_takes_another_mode_as_baseline(tmp_path: Path) -> None:
    """The name of the baseline contains that mode."""
    write_scaling(tmp_path, {1: 200.0}, batches=STRONG, config=SINGLE)
    write_scaling(tmp_path, {2: 300.0, 4: 500.0}, batches=STRONG)
    comparison = compared(tmp_path)
    for world_size, speedup in ((1, 1.0), (2, 1.5), (4, 2.5)):
        scaling = at(comparison, world_size).scalings["strong"]
        assert (scaling.speedup, scaling.base) == (pytest.approx(speedup), "single, 1 rank")


def write_modes(folder: Path, *runs: tuple[str, int, int, float]) -> None:
    """Write runs of (mode, world size, GPUs, samples per second) with one global batch."""
    for mode, world_size, num_devices, speed in runs:
        one_batch = {world_size: (64, 64 // world_size)}
        config = SINGLE | {"parallelism.name": mode, "parallelism._target_": mode}
        record = {"num_devices": num_devices, "devices": ["cuda:0"]}
        write_scaling(folder, {world_size: speed}, batches=one_batch, config=config, record=record)


def test_efficiency_counts_devices_and_not_processes(tmp_path: Path) -> None:
    """Two ranks with four GPUs are four devices, and one process with four GPUs is no baseline."""
    modes = (("single", 1, 1, 1000.0), ("dp", 1, 4, 2000.0), ("ddp", 4, 4, 3800.0))
    write_modes(tmp_path, *modes, ("ddp_mp", 2, 4, 1900.0))
    comparison = compared(tmp_path)
    assert comparison.keys == ("parallelism.name", "world_size", "num_devices")
    scalings = {row.setting["parallelism.name"]: row.scalings["strong"] for row in comparison.rows}
    expected = {"single": (1, 1), "dp": (2, 0.5), "ddp": (3.8, 0.95), "ddp_mp": (1.9, 0.475)}
    for mode, (speedup, efficiency) in expected.items():
        scaling = scalings[mode]
        assert (scaling.speedup, scaling.efficiency) == pytest.approx((speedup, efficiency))
        assert (scaling.base, scaling.base_num_devices) == ("single, 1 rank", 1)
    table = as_text(comparison)
    assert "ddp_mp                2        4" in table
    assert "the speedup divided by the ratio of devices" in table
    plot = figures(comparison)["scaling"]
    assert not isinstance(plot, str)
    assert plot.axes[0].get_xlabel() == "devices (on a CPU: ranks)"
    lines = {str(line.get_label()): list(line.get_xdata()) for line in plot.axes[0].get_lines()}
    assert lines["ddp_mp: 1.90x (48%)"] == lines["dp: 2.00x (50%)"] == [1, 4]


def test_without_any_run_on_one_device_the_fewest_devices_are_the_baseline(tmp_path: Path) -> None:
    """The name of the baseline contains their number."""
    write_modes(tmp_path, ("ddp_mp", 1, 2, 1000.0), ("ddp_mp", 2, 4, 1900.0))
    scaling = at(compared(tmp_path), 2).scalings["strong"]
    assert (scaling.speedup, scaling.efficiency) == pytest.approx((1.9, 0.95))
    assert scaling.base == "1 rank, 2 devices"


def test_a_baseline_of_another_mode_is_the_fastest(tmp_path: Path) -> None:
    """A slower baseline would flatter the speedup."""
    modes = (("dp", 1, 1, 100.0), ("single", 1, 1, 200.0), ("ps", 1, 1, 50.0))
    write_modes(tmp_path, *modes, ("ddp", 2, 2, 300.0))
    scaling = at(compared(tmp_path), 2).scalings["strong"]
    assert (scaling.speedup, scaling.base) == (pytest.approx(1.5), "single, 1 rank")


def test_the_baseline_is_the_mean_of_all_on_the_fewest_devices(tmp_path: Path) -> None:
    """Here one process with two devices, and two processes with one each."""
    modes = (("ddp_mp", 1, 2, 100.0), ("ddp_mp", 2, 2, 300.0), ("ddp_mp", 4, 4, 400.0))
    write_modes(tmp_path, *modes)
    scalings = [at(compared(tmp_path), size).scalings["strong"] for size in (1, 2, 4)]
    assert [scaling.speedup for scaling in scalings] == pytest.approx([0.5, 1.5, 2.0])
    assert [scaling.efficiency for scaling in scalings] == pytest.approx([0.5, 1.5, 1.0])


def test_runs_on_one_and_on_four_gpus_are_different_settings(tmp_path: Path) -> None:
    """For one process too, as with DataParallel: they are not averaged, and they scale."""
    write_modes(tmp_path / "one", ("dp", 1, 1, 1000.0))
    write_modes(tmp_path / "four", ("dp", 1, 4, 2000.0))
    one, four = compared(tmp_path).rows
    assert (one.runs[0].num_devices, four.runs[0].num_devices) == (1, 4)
    assert four.scalings["strong"].efficiency == pytest.approx(0.5)


def test_parallel_jobs_have_no_speedup(tmp_path: Path) -> None:
    """They have rows of their own, and slow each other down."""
    record = {"parallel_jobs": True}
    write_scaling(tmp_path, {1: 200.0, 2: 300.0}, batches=STRONG, record=record)
    write_scaling(tmp_path, {4: 500.0}, batches=STRONG)
    assert [row.scalings for row in compared(tmp_path).rows] == [{}, {}, {}]


def test_seeds_are_one_row_with_mean_and_standard_deviation(tmp_path: Path) -> None:
    """With `each`, every run has its own row."""
    for seed, accuracy in enumerate((0.9, 0.92, 0.97)):
        lines = lines_of([1.0, 100.0 + 10 * seed], eval__accuracy=[0.1, accuracy])
        write_run(tmp_path / str(seed), config={"seed": seed}, lines=lines)
    (only,) = compared(tmp_path).rows
    accuracy, speed = only.stats["eval/accuracy"], only.stats["perf/samples_per_s"]
    assert accuracy.mean == pytest.approx(0.93)
    assert accuracy.sd == pytest.approx(math.sqrt((0.03**2 + 0.01**2 + 0.04**2) / 2))
    assert (accuracy.count, speed) == (3, Stat(110.0, pytest.approx(10.0), 3))
    each = compared(tmp_path, each=True)
    assert [row.setting["seed"] for row in each.rows] == [0, 1, 2]
    assert each.rows[2].stats["eval/accuracy"] == Stat(0.97, None, 1)


def test_a_key_has_a_column_unless_another_key_implies_it(tmp_path: Path) -> None:
    """The keys of a mode follow from the mode; a learning rate is a choice."""
    write_run(tmp_path / "a", config=SINGLE)
    write_run(tmp_path / "b")
    assert compared(tmp_path).keys == ("parallelism.name", "world_size")
    write_run(tmp_path / "c", config={"optimizer.lr": 0.5, "parallelism.bucket_cap_mb": 50})
    names = ("parallelism.name", "world_size", "optimizer.lr", "parallelism.bucket_cap_mb")
    assert compared(tmp_path).keys == names


@pytest.mark.parametrize(
    ("drift", "first_break"), [(0.0, None), (0.0005, None), (0.1, 20), (float("nan"), 20)]
)
def test_loss_parity_breaks_at_the_first_step_that_differs(
    tmp_path: Path, drift: float, first_break: int | None
) -> None:
    """Only runs with one seed and one global batch are compared; NaN differs from any loss."""
    losses = [2.0, 1.0, 0.5]
    write_run(tmp_path / "single", config=SINGLE, lines=lines_of([1.0] * 3, losses=losses))
    other = [losses[0], losses[1] + drift, losses[2] + drift]
    two = {"world_size": 2, "batch.per_rank": 32}
    for name, keys in {"ddp": {}, "seed": {"seed": 7}, "lr": {"optimizer.lr": 1.0}}.items():
        write_run(tmp_path / name, config={**two, **keys}, lines=lines_of([1.0] * 3, losses=other))
    (parity,) = compared(tmp_path, tolerance=0.001).parity
    assert (parity.run.folder.name, parity.reference.folder.name) == ("ddp", "single")
    assert (parity.first_break, parity.num_steps) == (first_break, 3)


def test_time_to_target_is_the_time_of_the_first_line_that_reached_it(tmp_path: Path) -> None:
    """An accuracy from below, a loss from above; runs that never reached it do not count."""
    for seed, accuracies in enumerate(([0.5, 0.95, 0.99], [0.5, 0.6, 0.9], [0.1, 0.2, 0.3])):
        lines = lines_of([1.0] * 3, losses=[2.0, 1.0, 0.5], eval__accuracy=accuracies)
        write_run(tmp_path / str(seed), config={"seed": seed}, lines=lines)
    (only,) = compared(tmp_path, target=Target("eval/accuracy", 0.9)).rows
    assert only.stats["time_to_target_s"] == Stat(2.5, pytest.approx(math.sqrt(0.5)), 2)
    (only,) = compared(tmp_path, target=Target("train/loss", 0.7)).rows
    assert only.stats["time_to_target_s"] == Stat(3.0, 0.0, 3)
    with pytest.raises(UserError, match=r"eval/f1.*no run has.*; use one of eval/accuracy"):
        compared(tmp_path, target=Target("eval/f1", 0.9))


def test_the_best_run_has_the_highest_or_the_lowest_value(tmp_path: Path) -> None:
    """Highest accuracy or lowest loss, unless a mode is given; zero counts as a value."""
    for name, loss, accuracy in (("a", 0.0, 0.8), ("b", 0.5, 0.9)):
        lines = lines_of([1.0, 2.0], losses=[1.0, loss], eval__accuracy=[0.0, accuracy])
        write_run(tmp_path / name, config={"optimizer.name": name}, lines=lines)
    bests = {
        (metric, mode): compared(tmp_path, best=metric, mode=mode).best
        for metric, mode in (("eval/accuracy", None), ("train/loss", None), ("train/loss", "max"))
    }
    names = [best.row.runs[0].folder.name for best in bests.values() if best is not None]
    assert names == ["b", "a", "b"]


def write_folds(folder: Path, rates: dict[float, list[float]]) -> None:
    """Write a run for each fold and rate: by its accuracy, with the fold in two keys and a path."""
    for rate, accuracies in rates.items():
        for fold, accuracy in enumerate(accuracies):
            keys = {
                "optimizer.lr": rate,
                "dataset.train.fold": fold,
                "dataset.eval.fold": fold,
                "dataset.path": f"fold-{fold}.csv",
            }
            lines = lines_of([1.0, 2.0], eval__accuracy=[0.0, accuracy])
            write_run(folder / f"{rate}-{fold}", config=keys, lines=lines)


def test_folds_are_averaged_and_the_best_is_a_setting(tmp_path: Path) -> None:
    """Each fold counts once, whatever keys follow from it, and the easiest one is not the best."""
    write_folds(tmp_path, {0.1: [0.7, 0.99], 0.2: [0.9, 0.8]})
    (tmp_path / "0.2-1" / "model.safetensors").touch()
    comparison = compared(tmp_path, over="dataset.train.fold", best="eval/accuracy")
    assert comparison.keys == ("parallelism.name", "world_size", "optimizer.lr")
    assert set(comparison.over) == {
        *("seed", "dataset.train.fold", "dataset.eval.fold", "dataset.path")
    }
    assert comparison.best is not None
    assert comparison.best.value == Stat(pytest.approx(0.85), pytest.approx(math.sqrt(0.005)), 2)
    text = as_text(comparison)
    assert "0.8500 ± 0.07071 over 2 runs (optimizer.lr 0.2)" in text
    assert f"its models: {tmp_path}/0.2-1/model.safetensors" in " ".join(text.split())
    for over in ("model.name", "model"):
        with pytest.raises(UserError, match=rf"--over \({over}\) is equal in all runs"):
            compared(tmp_path, over=over)
    with pytest.raises(
        UserError, match=r"--over \(dataset.train.flod\) is not a key.*dataset.train.fold"
    ):
        compared(tmp_path, over="dataset.train.flod")


@pytest.mark.parametrize("over", ["world_size", "num_devices"])
def test_world_sizes_can_be_averaged(over: str, tmp_path: Path) -> None:
    """Both numbers of ranks and of devices are left out, one of which tells the other."""
    for world_size, loss in ((1, 1.0), (2, 3.0)):
        write_run(
            tmp_path / str(world_size),
            config={"world_size": world_size},
            lines=lines_of([2.0, loss]),
        )
    (row,) = compared(tmp_path, over=over, each=False).rows
    assert len(row.runs) == 2


def test_a_key_that_repeats_another_is_named_with_it(tmp_path: Path) -> None:
    """One column for both: an interpolation is no second difference."""
    write_folds(tmp_path, {0.1: [0.7, 0.9], 0.2: [0.8, 0.8]})
    comparison = compared(tmp_path)
    assert comparison.copies["dataset.eval.fold"] == ["dataset.train.fold"]
    assert "dataset.eval.fold = dataset.train.fold" in as_text(comparison)
    assert "dataset.train.fold" not in comparison.keys


def test_many_settings_are_not_repeated_in_each_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tells the settings apart and the metrics come first; each other key is there once."""
    monkeypatch.setenv("COLUMNS", "100")
    for number in range(3):
        keys = {f"model.a_long_name_{key}": number * 10 + key for key in range(12)}
        lines = lines_of([1.0, 2.0], eval__loss=[0.5, 0.25], eval__accuracy=[0.5, 0.75])
        write_run(tmp_path / str(number), config=keys, lines=lines)
    text = as_text(compared(tmp_path))
    assert text.count("a_long_name_7") == 1
    table = text.partition("\n\ncolumns:")[0]
    assert max(map(len, table.splitlines()[2:])) <= 100
    assert "1  model.a_long_name_0 0   " in table
    order = ("setting", "eval/accuracy", "a_long_name_10", "a_long_name_11", "samples/s")
    places = [table.index(word) for word in order]
    assert places == sorted(places)


def test_the_metrics_are_those_of_the_step_that_is_exported(tmp_path: Path) -> None:
    """The note is one line for all runs."""
    for seed in range(3):
        write_run(tmp_path / str(seed), config={"seed": seed}, lines=lines_of([1.0, 2.0]),
                  record={"step": 20, "exported_step": 10 + 10 * (seed == 2)})  # fmt: skip
    comparison = compared(tmp_path)
    notes = [note for note in comparison.notes if "from its best step" in note.sentence]
    assert [note.run.folder.name for note in notes] == ["0", "1"]
    text = as_text(comparison)
    assert text.count("from its best step") == 1
    runs = f" 2 runs ({tmp_path / '0'}, {tmp_path / '1'}): losses and metrics are from its best"
    assert runs in " ".join(text.split())


def test_a_run_with_one_line_has_only_its_warm_up(tmp_path: Path) -> None:
    """It has no speed, and a note with the fix."""
    write_run(tmp_path / "short", lines=lines_of([100.0]))
    comparison = compared(tmp_path)
    assert "perf/samples_per_s" not in comparison.rows[0].stats
    (note,) = comparison.notes
    assert "lower train.log_every_steps" in note.sentence


def test_warnings_name_what_else_differs_between_runs(tmp_path: Path) -> None:
    """Here two hosts, and a key that a run does not have."""
    write_run(tmp_path / "a", record={"host": "elsewhere"})
    write_run(tmp_path / "b", config={"train.clip_norm": 1.0})
    sentences = " ".join(compared(tmp_path).warnings)
    assert "2 hosts (elsewhere, here)" in sentences
    assert "lack keys (train.clip_norm)" in sentences


def test_lists_of_several_lengths_are_values_of_one_key(tmp_path: Path) -> None:
    """As the groups of parameters are: no version lacks the items of a longer list."""
    for count in range(3):
        groups = [{"match": f"layer{index}.*", "lr": 0.1} for index in range(count)]
        write_run(tmp_path / str(count), config={"params.groups": groups})
    comparison = compared(tmp_path)
    assert comparison.keys == ("parallelism.name", "world_size", "params.groups")
    assert comparison.warnings == ()
    assert len(comparison.rows) == 3


def test_a_loop_of_ones_own_has_the_settings_that_it_used(tmp_path: Path) -> None:
    """Beside a training: neither groups that it left nor the training's defaults are its own."""
    own = {"task": "mine.train", "train.epochs": 10, "loop.latent": 8}
    for latent in (8, 16):
        write_run(
            tmp_path / f"own-{latent}",
            config={**own, "loop.latent": latent},
            record={"uses": ["dataset"], "task": "mine.train"},
            lines=[{"step": 1, "epoch": 1, "time_s": 1.0, "d/loss": 0.5}],
        )
    comparison = compared(tmp_path)
    assert comparison.keys == ("parallelism.name", "world_size", "loop.latent")
    assert "model.name" not in comparison.same
    assert (comparison.same["task"], comparison.same["dataset.name"]) == ("mine.train", "digits")
    assert [row.stats["d/loss"].mean for row in comparison.rows] == [0.5, 0.5]
    assert "d/loss" in as_text(comparison)
    write_run(tmp_path / "train", config={"train.epochs": 10}, lines=lines_of([1.0, 2.0]))
    mixed = compared(tmp_path)
    assert "task" in mixed.keys
    assert not [line for line in mixed.warnings if "lack keys" in line]


def test_each_run_is_read_once(tmp_path: Path) -> None:
    """Even if paths overlap, go through a link or contain a copy; a repetition is another run."""
    run = write_run(tmp_path / "sweep" / "run", lines=lines_of([1.0]))
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    shutil.copytree(run, tmp_path / "copies" / "run")
    (write_run(tmp_path / "sweep" / "broken") / "run.json").unlink()
    runs = read_runs([tmp_path, run, tmp_path / "link", tmp_path / "sweep"])
    assert sorted(run.folder.name for run in runs) == ["broken", "run"]
    write_run(tmp_path / "sweep" / "again", record={"started_at": 1.0})
    (only,) = compared(tmp_path).rows
    assert len(only.runs) == 2
    began = {"started_at": 1.0, "sessions": [{"started_at": 1.0}, {"started_at": 2.0}]}
    write_run(tmp_path / "sweep" / "a copy that was resumed", record=began)
    (only,) = compared(tmp_path).rows
    assert len(only.runs) == 3


def test_how_a_run_was_started_is_no_setting(tmp_path: Path) -> None:
    """A run alone and the same run in a sweep, with another launcher, are two of one setting."""
    alone = {"sweep.skip_invalid": False, "launch.max_restarts": 0, "verbose": False, "seed": 0}
    swept = {"sweep.skip_invalid": True, "launch.max_restarts": 3, "verbose": True, "seed": 1}
    write_run(tmp_path / "alone", config=alone, lines=lines_of([100.0] * 3))
    write_run(tmp_path / "swept", config=swept, lines=lines_of([100.0] * 3))
    (row,) = compare(read_runs([tmp_path])).rows
    assert len(row.runs) == 2


def test_a_warning_names_three_of_many(tmp_path: Path) -> None:
    """And counts the others."""
    for number in range(5):
        write_run(tmp_path / str(number), record={"git_revision": str(number)})
    (sentence,) = compared(tmp_path).warnings
    assert sentence == "the runs used 5 versions of the code (0, 1, 2 and 2 more)"


def write_evaluated(folder: Path, errors: list[float], **record: Any) -> None:
    """Write a run whose own metric, an error, has a value at each step."""
    lines = [
        {"step": step, "epoch": 1, "time_s": float(step), "eval/error_rate": value}
        for step, value in enumerate(errors)
    ]
    write_run(folder, lines=lines, record={"metrics": {"eval/error_rate": errors[-1]}, **record})


@pytest.mark.parametrize(
    ("directions", "best", "reached_s"),
    [({"eval/error_rate": "min"}, 0.1, 2.0), ({}, 0.3, 0.0), ("damaged", 0.3, 0.0)],
)
def test_the_best_end_of_an_own_metric_is_in_run_json(
    tmp_path: Path, directions: Any, best: float, reached_s: float
) -> None:
    """Without it, the name decides."""
    write_evaluated(tmp_path / "a", [0.9, 0.5, 0.1], directions=directions)
    write_evaluated(tmp_path / "b", [0.9, 0.5, 0.3], directions=directions)
    comparison = compared(
        tmp_path, best="eval/error_rate", target=Target("eval/error_rate", 0.2), each=True
    )
    assert comparison.best is not None
    assert comparison.best.value.mean == best
    times = [row.stats.get("time_to_target_s") for row in comparison.rows]
    assert min(stat.mean for stat in times if stat) == reached_s


def test_an_own_metric_is_a_column_and_splits_no_row(tmp_path: Path) -> None:
    """A metric changes neither the work nor its speed; a name with two meanings is a warning."""
    key = "metrics.error_rate.k"
    write_run(tmp_path / "none", lines=lines_of([1.0, 2.0]))
    for k in (1, 2):
        write_evaluated(tmp_path / f"with-{k}", [0.5])
    comparison = compared(tmp_path)
    (row,) = comparison.rows
    assert len(row.runs) == 3
    assert "eval/error_rate" in as_text(comparison)
    assert not [line for line in comparison.warnings if "error_rate" in line]
    for k in (1, 2):
        write_run(
            tmp_path / f"of-{k}", config={key: k}, record={"metrics": {"eval/error_rate": 0.5}}
        )
    assert [line for line in compared(tmp_path).warnings if "error_rate" in line] == [
        f"eval/error_rate is not the same metric in all runs: {key}=1 or {key}=2; do not compare it"
    ]


def test_the_lines_of_a_run_share_the_names_of_their_metrics(tmp_path: Path) -> None:
    """Else the names take as much memory as the numbers of ten thousand runs."""
    write_scaling(tmp_path, {1: 200.0}, batches=STRONG)
    (run,) = read_runs([tmp_path])
    names = [next(key for key in line if key == "train/loss") for line in run.lines[-2:]]
    assert names[0] is names[1]


def test_configs_that_share_blocks_are_read_as_yaml_reads_them(tmp_path: Path) -> None:
    """Whatever stands at the beginning of a line: a list, a comment, the end of a text."""
    texts = (
        "---\na:\n- 1\n- {b: 2}\nc: {d: [3]}\n...\n",
        "---\na:\n- 1\n- {b: 2}\nc: {d: [4]}\n...\n",
        "# a comment\na: {\nb: 1\n}\nc: |\n  d\n\n  e\n",
        "a: 'one\n  b: 2'\nc: {}\n",
        "{a: 1, c: 2}",
    )
    for index, text in enumerate(texts):
        folder = tmp_path / str(index)
        write_run(folder)
        RunDir(folder).config.write_text(text)
        assert read_run(folder).config == dict(leaves(yaml.safe_load(text), whole_lists=True))


@pytest.mark.parametrize("value", [0.1, 0.7, 1e-300, 3.0])
def test_equal_values_have_no_deviation(value: float) -> None:
    """Three times 0.1 is not 0.3, so the mean of equal values must not be computed."""
    assert stat([value] * 3) == Stat(value, 0.0, 3)
    assert stat([value]) == Stat(value, None, 1)
    assert stat([1.0, 2.0, None]) == Stat(1.5, pytest.approx(0.5**0.5), 2)
