"""The process of one tracker: it follows the files of a run, and hands them to the tracker.

``sender`` starts it and tells it by stdin which run to follow, and how the run has ended. It reads
metrics.jsonl instead of a queue: nothing is lost while a server is away, and nothing piles up in
rank 0. What it reports are lines of JSON on stdout. Torch-free.
"""

import fcntl
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from ddp_runner.errors import UserError, typed
from ddp_runner.host.processes import ignore_stop_signals
from ddp_runner.job import EXIT_FAILED, Status
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.trackers.follower import Follower, Request

POLL_S = 1.0  # between two looks at metrics.jsonl
MOST_PAUSE_S = 60.0  # before a call that has failed is repeated; the first time after POLL_S
MOST_CHARACTERS = 300  # of an error: MLflow's quote whole requests
LAST_S = 10.0  # for the end, once rank 0 is gone and cannot stop this process
NICENESS = 5  # importing a client takes seconds of a core


def follow(
    follower: Follower, ended: "queue.Queue[str]", report: Callable[[Mapping[str, str]], None]
) -> bool:
    """Hand a run to its tracker until it has ended; return whether the tracker has all of it.

    Args:
        follower: of the run.
        ended: gets the status with which the run has ended.
        report: gets the first error, and that the tracker is ready.
    """
    pause_s, has_failed, is_ready = 0.0, False, False
    while True:
        status = _wait(ended, pause_s)
        try:
            if not is_ready:
                follower.build()
                is_ready = True
                report({"ready": ""})
            if status is not None:
                follower.end(status)
                return True
            follower.catch_up()
            pause_s = POLL_S
        except Exception as error:  # a tracker may raise what it likes
            if not has_failed:
                has_failed = True
                reason = str(error) if isinstance(error, UserError) else typed(error)
                if len(reason) > MOST_CHARACTERS:
                    reason = reason[:MOST_CHARACTERS] + " …"
                report({"error": reason, "traceback": traceback.format_exc()})
            if status is not None:
                return False
            pause_s = min(MOST_PAUSE_S, max(POLL_S, 2 * pause_s))


def _wait(ended: "queue.Queue[str]", pause_s: float) -> str | None:
    try:
        return ended.get(timeout=pause_s) if pause_s else ended.get_nowait()
    except queue.Empty:
        return None


def main() -> None:
    """Follow the run that stdin names."""
    ignore_stop_signals()  # the run decides when this process ends
    os.nice(NICENESS)
    # Clients print: of what they print, rank 0 shows nothing.
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    request = Request(**json.loads(sys.stdin.readline()))
    ended: queue.Queue[str] = queue.Queue()

    def report(content: Mapping[str, str]) -> None:
        print(json.dumps(content), file=reports, flush=True)

    def listen() -> None:
        ended.put(
            sys.stdin.readline().strip() or Status.FAILED
        )  # a rank 0 that is gone says nothing
        while os.getppid() == request.parent:
            time.sleep(POLL_S)
        time.sleep(LAST_S)
        os._exit(EXIT_FAILED)

    folder = RunDir(Path(request.folder)).trackers
    folder.mkdir(exist_ok=True)
    with (folder / f".{request.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # an earlier attempt's process may be about to end
        threading.Thread(target=listen, daemon=True).start()
        follow(Follower(request), ended, report)


if __name__ == "__main__":
    main()
