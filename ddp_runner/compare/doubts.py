"""Speeds in doubt: more than the devices explain, or measured while others used the machine."""

from collections.abc import Iterator, Sequence

from ddp_runner.compare.rows import Row
from ddp_runner.compare.settings import label

BUSY = 0.1  # of the cores' time, taken by others
LEGEND = (
    "superlinear: an efficiency over 110%: the machine was busy, or cache effects; busy machine: "
    f"others took over {BUSY:.0%} of the cores' time in one of the runs (load in run.json)"
)


def remark(row: Row) -> str | None:
    """Return why a row's speed is in doubt, in a few words; None: it is not."""
    words = ["superlinear"] if any(one.is_superlinear for one in row.scalings.values()) else []
    words += ["busy machine"] if _busy_shares(row) else []
    return ", ".join(words) or None


def doubts(rows: Sequence[Row], keys: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each doubt; `keys` tell the rows apart."""
    for row in rows:
        name = label(row.setting, keys)
        for kind, scaling in row.scalings.items():
            if scaling.is_superlinear:
                yield (
                    f"{name}: {kind} efficiency {scaling.efficiency:.0%} is superlinear: the "
                    "machine was busy, or cache effects; measure it and its baseline again"
                )
        if shares := _busy_shares(row):
            yield (
                f"{name}: the machine was busy during {len(shares)} of {len(row.runs)} runs: "
                f"others took up to {max(shares):.0%} of the cores' time"
            )


def _busy_shares(row: Row) -> list[float]:
    """Return the shares above BUSY; of packed runs none, as their row says that they are packed."""
    shares = [run.busy_share for run in row.runs if not run.is_packed]
    return [share for share in shares if share is not None and share > BUSY]
