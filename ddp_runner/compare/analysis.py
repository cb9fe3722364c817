"""Compare runs: compute a row per setting with its speed, cost and results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby

from ddp_runner.compare.parity import Parity, parities
from ddp_runner.compare.recorded_run import RecordedRun, Stat, Target, nested, stat
from ddp_runner.compare.settings import (
    Setting,
    identity,
    labels,
    missing_keys,
    same_keys,
    sort_key,
    tied_keys,
    varied_keys,
)
from ddp_runner.compare.speedup import AllReduceFit, Scaling, Stats, fit_all_reduces, speedups
from ddp_runner.errors import UserError, counted, listed, nearest
from ddp_runner.metric_names import LINE_FIELDS, METRICS, best_end
from ddp_runner.tracking.git import code_version

TOLERANCE = 1e-3  # relative difference of losses that still counts as parity
SUPERLINEAR = 1.1  # a higher efficiency has another cause than the additional devices
NO_METRICS = {"startup_s", "wall_s", "time_to_target_s", "sessions"}  # stats that are not metrics
BUSY = 0.1  # share of the cores' time that other work may use
NO_QUANTITIES = {metric.name for metric in METRICS if not metric.is_quantity}
# The first of these tasks that has runs gets the rows. Evaluations have no training to compare
# with, and benchmarks beside other runs only serve predictions.
TASKS = ("train", "evaluate", "plan", "collectives")


@dataclass(frozen=True)
class ComparisonRow:
    """The runs of one setting, which differ only in their seeds; or a single run."""

    label: str  # the setting in a few words
    setting: Setting  # values of Comparison.keys
    runs: tuple[RecordedRun, ...]
    stats: Stats  # results by metric, and those of NO_METRICS; startup_s of the first session
    scalings: Mapping[str, Scaling]  # strong, weak, both or none
    parity: tuple[Parity, ...]  # for each run that was compared with a reference

    @cached_property
    def speed_remark(self) -> str | None:
        """Why the speed is doubtful, in a few words; None if it is reliable."""
        efficiencies = [scaling.efficiency for scaling in self.scalings.values()]
        remarks = ["superlinear"] if max(efficiencies, default=0.0) > SUPERLINEAR else []
        shares = [run.busy_share or 0.0 for run in self.runs if not run.is_parallel_job]
        remarks += ["busy machine"] if max(shares, default=0.0) > BUSY else []
        return ", ".join(remarks) or None


@dataclass(frozen=True)
class Best:
    """The setting with the best mean of a metric: a single run may be lucky."""

    metric: str
    mode: str  # max or min
    row: ComparisonRow
    value: Stat


@dataclass(frozen=True)
class RunNote:
    """A sentence about a run."""

    run: RecordedRun
    sentence: str


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of comparing runs."""

    keys: tuple[str, ...]  # keys in which rows differ
    copies: Mapping[str, Sequence[str]]  # for each of these keys, other keys with the same values
    over: tuple[str, ...]  # keys in which the runs of a row differ
    same: Setting  # the main keys that are equal in all rows
    rows: tuple[ComparisonRow, ...]  # ordered by their settings
    ran_out: tuple[ComparisonRow, ...]  # ran out of memory or time, so without results
    all_reduces: tuple[AllReduceFit, ...]  # basis of the predictions
    parity: tuple[Parity, ...]
    tolerance: float  # for parity
    target: Target | None
    best: Best | None
    warnings: tuple[str, ...]  # why rows may not be comparable, and doubtful speeds
    notes: tuple[RunNote, ...]  # about runs in rows
    skipped: tuple[RunNote, ...]  # why a run has no results

    @property
    def all_rows(self) -> tuple[ComparisonRow, ...]:
        """The rows of a table."""
        return self.rows + self.ran_out


def compare(
    runs: Sequence[RecordedRun],
    *,
    target: Target | None = None,
    best: str | None = None,
    mode: str | None = None,
    over: str = "seed",
    tolerance: float = TOLERANCE,
    each: bool = False,
) -> Comparison:
    """Compare runs, grouped by their settings; the keywords are the command's options.

    Raises:
        UserError: no run has the metric of `target` or of `best`, or no two differ in `over`.
    """
    complete = [run for run in runs if run.reason is None]
    usable = {task: [run for run in complete if run.task == task] for task in TASKS}
    task = next((task for task in TASKS if usable[task]), TASKS[0])
    compared, fits = usable[task], fit_all_reduces(usable["collectives"])
    evaluations = usable["evaluate"] if task == "train" else []
    if target and compared:
        logged = {name for run in compared for line in run.lines for name in line}
        _ensure_logged("--target", target.metric, logged - LINE_FIELDS)
    shown = [*compared, *(run for run in runs if run.ran_out and run.task == task)]
    settings = [run.setting for run in shown]
    averaged = tied_keys(settings, over) if over != "seed" else ()
    settings = [
        {key: value for key, value in setting.items() if key not in averaged}
        for setting in settings
    ]
    copies = varied_keys(settings)
    keys = (*copies, *(["seed"] if each else []))
    named_groups: dict[object, list[RecordedRun]] = {}
    for run in shown:
        name = run.folder if each else identity(run.setting, without=averaged)
        named_groups.setdefault((run.ran_out, name), []).append(run)
    parity = parities(compared, tolerance=tolerance)
    rows = _rows([*named_groups.values()], keys, target=target, fits=fits, parity=parity)
    completed = tuple(row for row in rows if not row.runs[0].ran_out)
    skipped = [RunNote(run, run.reason) for run in runs if run.reason is not None]
    hint = "an evaluation of {}; name only evaluations to compare them"
    skipped += [RunNote(run, hint.format(run.record.get("of_run"))) for run in evaluations]
    return Comparison(
        keys=keys,
        copies=copies,
        over=("seed", *averaged),
        same=same_keys(settings),
        rows=completed,
        ran_out=tuple(row for row in rows if row.runs[0].ran_out),
        all_reduces=fits,
        parity=tuple(parity),
        tolerance=tolerance,
        target=target,
        best=_best(completed, best, mode=mode) if best and completed else None,
        warnings=tuple(_warnings(completed, compared)),
        notes=tuple(RunNote(run, note) for run in compared for note in run.notes),
        skipped=tuple(skipped),
    )


def _rows(
    groups: Sequence[Sequence[RecordedRun]],
    keys: Sequence[str],
    *,
    target: Target | None,
    fits: Sequence[AllReduceFit],
    parity: Sequence[Parity],
) -> list[ComparisonRow]:
    """Return a row for each group of runs, ordered by the values of the `keys`."""
    firsts = [group[0] for group in groups]
    values = [{key: {**run.setting, "seed": run.seed}.get(key) for key in keys} for run in firsts]
    stats = [_stats(group, target) for group in groups]
    results = {result.run.folder: result for result in parity}
    verdicts = [
        tuple(results[run.folder] for run in group if run.folder in results) for group in groups
    ]
    scalings = speedups([*zip(firsts, stats, strict=True)], fits)
    fields = labels(values), values, map(tuple, groups), stats, scalings, verdicts
    rows = [ComparisonRow(*row) for row in zip(*fields, strict=True)]
    return sorted(rows, key=lambda row: sort_key(row.setting))


def _ensure_logged(option: str, metric: str, logged: set[str]) -> None:
    if metric not in logged:
        meant = nearest(metric if "/" in metric else f"eval/{metric}", logged, cutoff=0.7)
        hint = f"did you mean {meant}? The metrics are" if meant else "use one of"
        raise UserError(
            f"{option} ({metric}): no run has this metric", f"{hint} {', '.join(sorted(logged))}"
        )


def _stats(runs: Sequence[RecordedRun], target: Target | None) -> dict[str, Stat]:
    """Return the results of runs that differ only in their seeds.

    Results of only one seed have no deviation: it would say nothing about other seeds.
    """
    if runs[0].ran_out:
        return {}
    logged = dict.fromkeys(chain.from_iterable(chain.from_iterable(run.lines for run in runs)))
    final = sorted({name for run in runs for name in run.final if not name.startswith("perf/")})
    names = [*(name for name in logged if name.startswith("perf/")), *final]
    stats = {
        name: stat(run.result(name) for run in runs) for name in names if name not in NO_QUANTITIES
    }
    stats |= {
        "time_to_target_s": stat(target.time_s(run) for run in runs) if target else None,
        "startup_s": stat(run.number("startup_s") for run in runs),
        "wall_s": stat(run.number("wall_s") for run in runs),
        "sessions": stat(len(run.sessions) or None for run in runs),
    }
    present = {name: value for name, value in stats.items() if value is not None}
    if len({str(run.seed) for run in runs}) == 1 == len({identity(run.setting) for run in runs}):
        present |= {name: replace(present[name], sd=None) for name in final if name in present}
    return present


def _best(rows: Sequence[ComparisonRow], metric: str, *, mode: str | None) -> Best:
    """Return the best row by a metric, the first of equal rows; see ``compare``."""
    _ensure_logged("--best", metric, {name for row in rows for name in row.stats} - NO_METRICS)
    is_lower = any(best_end(metric, run.directions) == "min" for row in rows for run in row.runs)
    mode = mode or ("min" if is_lower else "max")
    sign = 1 if mode == "max" else -1
    measured = [row for row in rows if metric in row.stats]
    row = max(measured, key=lambda row: sign * row.stats[metric].mean)
    return Best(metric, mode, row, row.stats[metric])


def _warnings(rows: Sequence[ComparisonRow], runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Yield why the runs of rows may not be comparable, and which speeds are doubtful."""
    origins = {
        "hosts": [run.record.get("host") for run in runs],
        "torch versions": [nested(run.record, "versions", "torch") for run in runs],
        "versions of the code": [code_version(run.record) for run in runs],
    }
    for name, values in origins.items():
        names = sorted({str(value) for value in values})
        if len(names) > 1:
            yield f"the runs used {len(names)} {name} ({listed(names)})"
    if missing := missing_keys([run.setting for run in runs]):
        yield f"some runs lack keys ({listed(missing)})"
    definitions: dict[str, set[str]] = {}  # by metric: its keys and values in each run
    for run in runs:
        keys = sorted(key for key in run.config if key.startswith("metrics."))
        for name, group in groupby(keys, key=lambda key: key.split(".")[1]):
            text = ", ".join(f"{key}={run.config[key]}" for key in group)
            definitions.setdefault(name, set()).add(text)
    for name, texts in definitions.items():
        if len(texts) > 1:
            different = listed(sorted(texts), separator=" or ")
            yield f"eval/{name} is not the same metric in all runs: {different}; do not compare it"
    if doubtful := [f"{row.label}: {row.speed_remark}" for row in rows if row.speed_remark]:
        speeds = counted(len(doubtful), "doubtful speed")
        details = listed(doubtful, separator="; ")
        yield f"{speeds} ({details}); measure again, with the baseline"
