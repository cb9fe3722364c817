"""The process of one tracker: it follows the files of a run, and hands them to the tracker.

``sender`` starts it and tells it by stdin which run to follow, and how the run has ended. It reads
metrics.jsonl instead of a queue: nothing is lost while a server is away, and nothing piles up in
rank 0. What it reports are lines of JSON on stdout. Torch-free.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ddp_runner.errors import UserError, typed
from ddp_runner.files import locked
from ddp_runner.host.processes import ignore_stop_signals, outlive_launcher
from ddp_runner.job import Status
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.trackers.follower import Follower, Request

POLL_S = 1.0  # between two looks at metrics.jsonl
MOST_PAUSE_S = 60.0  # before a call that has failed is repeated; the first time after POLL_S
LAST_S = 10.0  # for the end, once rank 0 is gone and cannot stop this process
NICENESS = 5  # importing a client takes seconds of a core


def follow(
    follower: Follower, ended: "queue.Queue[str]", report: Callable[[Mapping[str, str]], None]
) -> bool:
    """Hand a run to its tracker until it has ended; return whether the tracker has all of it.

    Args:
        follower: of the run.
        ended: gets the status with which the run has ended.
        report: gets the first error.
    """
    pause_s, has_failed = 0.0, False
    while True:
        status = _wait(ended, pause_s)
        try:
            if status is not None:
                follower.end(status)
                return True
            follower.catch_up()
            pause_s = POLL_S
        except BaseException as error:  # a tracker may raise what it likes, also SystemExit
            if not has_failed:
                has_failed = True
                report(_described(error))
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
    outlive_launcher()  # what the client holds back is sent in the last seconds
    os.nice(NICENESS)
    # Clients print: of what they print, rank 0 shows nothing.
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    request = Request(**json.loads(sys.stdin.readline()))
    ended: queue.Queue[str] = queue.Queue()

    def report(content: Mapping[str, str]) -> None:
        with suppress(BrokenPipeError):  # rank 0 is gone
            print(json.dumps(content), file=reports, flush=True)

    def listen() -> None:  # a rank 0 that is gone says nothing
        ended.put(sys.stdin.readline().strip() or Status.FAILED)

    def watch() -> None:
        while os.getppid() == request.parent:
            time.sleep(POLL_S)
        ended.put(Status.FAILED)  # a child of rank 0 may hold stdin open, so `listen` hears nothing
        time.sleep(LAST_S)
        os.killpg(0, signal.SIGKILL)  # this process leads its group: a client's service ends, too

    folder = RunDir(Path(request.folder)).trackers
    try:
        folder.mkdir(exist_ok=True)
        with locked(folder / f".{request.name}.lock"):  # an earlier attempt's may still end
            for target in (listen, watch):
                threading.Thread(target=target, daemon=True).start()
            if follow(Follower(request), ended, report):
                report({"complete": ""})
    except BaseException as error:  # the folder cannot be used, or the tracker not imported
        report(_described(error))
    if os.getppid() != request.parent:  # rank 0 is gone: nobody else ends what the client started
        os.killpg(0, signal.SIGKILL)


def _described(error: BaseException) -> dict[str, str]:
    reason = str(error) if isinstance(error, UserError) else typed(error)
    return {"error": reason, "traceback": "".join(traceback.format_exception(error))}


if __name__ == "__main__":
    main()
