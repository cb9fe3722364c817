"""What can only be seen with ranks on several machines: equal software, shared folders, locks.

Every function here is a collective; all ranks get the same levels, and so the same exit code. The
first look that fails ends the looks, since a group that has lost a rank stays broken.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from ddp_runner.distributed import from_rank_zero, gather_objects
from ddp_runner.doctor import links
from ddp_runner.doctor.finding import Finding, ok, problem, warning
from ddp_runner.doctor.machines import Machines
from ddp_runner.doctor.storage import trial_folder
from ddp_runner.errors import counted, listed, one_line
from ddp_runner.tracking.provenance import git_revision, versions

SEEN_S = 10.0  # for a new file to be seen: NFS asks the server every few seconds


def examine(
    machines: Machines, *, outputs: Path, data_root: Path, timeout_s: float
) -> Iterator[Finding]:
    """Yield what is found between the machines. Collective: every rank must take all.

    Args:
        machines: of this launch.
        outputs: the folder of the runs, as this rank was started with it.
        data_root: the folder of the datasets, the same.
        timeout_s: the longest wait for another rank.
    """
    yield from _software(machines)
    if len(machines.names) > 1:
        yield from _shared(machines, outputs)
        yield from _data(machines, data_root)
        yield from links.pairs(machines)
    yield from links.all_reduce(torch.device("cpu"), group=None, name="gloo")
    yield from links.nccl(machines.env.local_rank, timeout_s=timeout_s)


def _software(machines: Machines) -> Iterator[Finding]:
    own: dict[str, Any] = {**versions(), "the code's commit": git_revision()}
    found = gather_objects(own)
    is_equal = True
    for name in own:
        where: dict[Any, list[str]] = {}  # the machines with each value
        for rank in machines.first_ranks:
            if found[rank][name] is not None:
                where.setdefault(found[rank][name], []).append(machines.names[rank])
        if len(where) > 1:
            is_equal = False
            parts = [f"{value} on {listed(hosts)}" for value, hosts in where.items()]
            advice = "ranks with different software do not start: install the same everywhere"
            yield problem("software", f"{name} is {' and '.join(parts)}", advice)
    if is_equal:
        yield ok("software", f"equal on {counted(len(machines.names), 'machine')}")


def _shared(machines: Machines, outputs: Path) -> Iterator[Finding]:
    """Yield whether all machines see what rank 0 writes, and whether its locks hold there."""
    with ExitStack() as stack:
        places = [outputs.absolute(), *outputs.absolute().parents]

        def make() -> tuple[int, str]:
            try:
                folder = stack.enter_context(trial_folder(outputs))
                path = folder / "held"
                path.touch()
                # Closed, and so released, before the folder is removed.
                fcntl.flock(stack.enter_context(path.open("r+")), fcntl.LOCK_EX)
            except OSError:
                return 0, ""  # the machine's own report says why
            return places.index(folder.parent), folder.name

        place, name = from_rank_zero(make)
        if not name:
            return
        answer = _try_lock(places[place] / name / "held") if machines.is_first else ""
        answers = dict(enumerate(gather_objects(answer)))
    others = machines.first_ranks[1:]
    blind = [rank for rank in others if answers[rank] == "unseen"]
    if blind:
        yield warning(
            "outputs",
            f"{machines.listed(blind)} cannot see {outputs} of {machines.names[0]}",
            "give a folder on a shared disk (start there, or --outputs, hydra.run.dir): else only "
            f"{machines.names[0]} has the run and its checkpoints",
        )
    else:
        yield ok("outputs", f"all {len(machines.names)} machines see {outputs}")
    loose = [rank for rank in others if answers[rank] not in ("unseen", "held")]
    if loose:
        yield warning(
            "lock",
            f"{machines.listed(loose)} does not see the lock of {machines.names[0]}: "
            f"{answers[loose[0]]}",
            "two commands on two machines could write in one run folder: mount it with locks that "
            "the server keeps (NFS: without nolock and local_lock; Lustre: -o flock)",
        )
    elif len(blind) < len(others):
        yield ok("lock", "keeps processes of other machines out")


def _try_lock(path: Path) -> str:
    """Return unseen, held (by rank 0), free, or why the lock failed."""
    deadline = time.monotonic() + SEEN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return "unseen"
        with suppress(OSError):  # there is no such folder here
            os.scandir(path.parent.parent).close()  # makes NFS look again
        time.sleep(0.1)
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError as error:
        return error.strerror or "an error"
    return "free"


def _data(machines: Machines, data_root: Path) -> Iterator[Finding]:
    answers = gather_objects(data_root.is_dir())
    without = [rank for rank in machines.first_ranks if not answers[rank]]
    if not without:
        yield ok("data", f"all {len(machines.names)} machines see {data_root}")
    elif len(without) == len(machines.names):
        yield ok("data", f"no machine has {data_root}; bundled and random data need none")
    else:
        yield problem(
            "data",
            f"{machines.listed(without)} cannot see {data_root}",
            "copy the data there, or give data_root=FOLDER on a shared disk",
        )


def guarded(looks: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings until a look fails, then that failure."""
    try:
        yield from looks()
    except (RuntimeError, OSError) as error:
        yield problem(
            "group",
            cause(error),
            "a machine is gone, or its network does not let the ranks through: look at its own "
            "report, and at firewalls",
        )


def cause(error: BaseException) -> str:
    """Return the first sentence of an error of torch's, without its place in the C++ code."""
    first = one_line(error).partition(". ")[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first)
