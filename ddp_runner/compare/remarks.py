"""What a reader must know before trusting a speed: warnings, and notes on single runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.compare.rows import ComparisonRow
from ddp_runner.compare.run import Run
from ddp_runner.compare.settings import Setting, label, missing_keys
from ddp_runner.compare.stats import SAMPLES_PER_S

BUSY = 0.1  # share of the cores' time that other work may use


@dataclass(frozen=True)
class RunNote:
    """A sentence about one run."""

    folder: Path
    sentence: str


def speed_remark(row: ComparisonRow) -> str | None:
    """Return in a few words why a row's speed is doubtful; None if it is not."""
    words = []
    if any(scaling.is_superlinear for scaling in row.scalings.values()):
        words.append("superlinear")
    if _busy_shares(row):
        words.append("busy machine")
    return ", ".join(words) or None


def warnings_about(
    rows: Sequence[ComparisonRow], keys: Sequence[str], settings: Sequence[Setting]
) -> Iterator[str]:
    """Yield why the rows may not be comparable, and which of their speeds are doubtful."""
    runs = [run for row in rows for run in row.runs]
    versions = [run.record.get("versions") for run in runs]
    torch_versions = [known.get("torch") if isinstance(known, dict) else None for known in versions]
    origins = {
        "hosts": [run.record.get("host") for run in runs],
        "torch versions": torch_versions,
        "git revisions": [run.record.get("git_revision") for run in runs],
    }
    for name, values in origins.items():
        different = sorted({str(value) for value in values})
        if len(different) > 1:
            yield f"the runs used {len(different)} {name} ({_first_three(different)})"
    if missing := missing_keys(settings):
        yield f"some runs, written by another version, lack keys ({_first_three(missing)})"
    for row in rows:
        name = label(row.setting, keys)
        for kind, scaling in row.scalings.items():
            if scaling.is_superlinear:
                yield (
                    f"{name}: {kind} efficiency {scaling.efficiency:.0%} is superlinear (busy "
                    "machine or cache effects); measure it and its baseline again"
                )
        if shares := _busy_shares(row):
            yield (
                f"{name}: the machine was busy during {len(shares)} of {len(row.runs)} runs: "
                f"other work used up to {max(shares):.0%} of the cores' time; measure it again"
            )


def notes_on(run: Run) -> Iterator[RunNote]:
    """Yield what a reader must know about a run that is in a row."""
    sentences = [*run.notes]
    if len(run.sessions) > 1:
        sentences.append(
            f"resumed: wall s is the sum of its {len(run.sessions)} sessions, start-up s is from "
            "the first"
        )
    if len(run.values(SAMPLES_PER_S)) == 1:
        sentences.append(
            f"no samples/s: {SAMPLES_PER_S} has only one line, the warm-up; lower "
            "train.log_every_steps"
        )
    yield from (RunNote(run.folder, sentence) for sentence in sentences)


def _busy_shares(row: ComparisonRow) -> list[float]:
    """Return the shares above BUSY; parallel jobs have none, because they keep each other busy."""
    shares = [run.busy_share for run in row.runs if not run.is_parallel_job]
    return [share for share in shares if share is not None and share > BUSY]


def _first_three(words: Sequence[str]) -> str:
    return ", ".join(words[:3]) + (", ..." if len(words) > 3 else "")
