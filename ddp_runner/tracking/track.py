"""The command ``python -m ddp_runner.tracking.track``: sends a run to a tracker, live or later.

python -m ddp_runner.tracking.track RUN mlflow tracking_uri=http://mlflow.example:5000
python -m ddp_runner.tracking.track RUN csv _target_=my_package.csv_tracker.CsvTracker path=all.csv

It reads metrics.jsonl, so an unreachable server loses nothing and the run never waits for it.
A run starts this command for each of its trackers; see ``start_trackers``. Torch-free.
"""

import argparse
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from ddp_runner.config.load import frozen_config
from ddp_runner.config.rules import validate_trackers
from ddp_runner.config.schema import CONFIG_DIR, Config
from ddp_runner.config.secrets import Secrets
from ddp_runner.config.targets import package_of
from ddp_runner.errors import UserError, any_error, exit_with, os_errors, printable, typed
from ddp_runner.host.processes import ignore_stop_signals
from ddp_runner.host.streams import print_line, send_nowhere
from ddp_runner.job import EXIT_COMPLETED, EXIT_FAILED, Status
from ddp_runner.tracking.alive import LOST, standing
from ddp_runner.tracking.run_dir import RunDir
from ddp_runner.tracking.run_record import read_run_record
from ddp_runner.tracking.trackers.follower import Follower
from ddp_runner.tracking.trackers.start_trackers import (
    EXIT_REPORTED,
    FAILED_S,
    LAST_S,
    ORDER,
    Order,
    is_loaded,
)

POLL_S = 0.5  # time between two reads of the run's files
MOST_PAUSE_S = 60.0  # longest pause before a failed call is repeated; the first is POLL_S
NICENESS = 5  # the import of a client keeps a core busy for seconds
MOST_CHARACTERS = 300  # longest error text: MLflow's errors quote whole requests
ENDED = (Status.COMPLETED, Status.PREEMPTED, Status.FAILED)


def main() -> None:
    """Run the command and exit."""
    order = os.environ.pop(ORDER, None)  # it holds secrets: hide it from the client's processes
    if order is None:
        exit_with(run)
    else:
        sys.exit(follow_live(Order(**json.loads(order)), RunDir(Path(sys.argv[1])), sys.argv[2]))


def run(arguments: Sequence[str]) -> int:
    """Send the run that the command line names; follow it to its end if it is alive.

    Raises:
        UserError: the run or the tracker does not exist, or another process sends the run now.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ddp_runner.tracking.track", description="Send a run to a tracker."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of the run")
    parser.add_argument("name", metavar="NAME", help="mlflow, wandb, or a name for your own")
    parser.add_argument("keys", metavar="KEY=VALUE", nargs="*", help="keys of the tracker")
    options = parser.parse_args(arguments)
    run_dir, name = RunDir(options.run.absolute()), options.name
    if "loaded" not in read_run_record(run_dir):
        raise UserError(f"{run_dir} has no metrics to send: it never began", "name another run")
    run_dir.validate_content()
    settings = _settings(run_dir, name, options.keys)
    allowed = [package_of(settings["_target_"])]
    follower = Follower(run_dir, name, settings=settings, allowed=allowed)

    def report(error: BaseException) -> None:
        print(f"error: trackers.{name} failed ({_reason(error)})", file=sys.stderr, flush=True)

    fix = "wait for the process that sends this run, or make the folder writable"
    with os_errors(f"{run_dir.trackers} cannot be used", fix=fix), follower.locked(wait_s=0.0):
        try:
            is_complete = follow(follower, lambda: _end_of(run_dir), report)
        except KeyboardInterrupt:  # the user stops following a live run
            return 128 + signal.SIGINT
    if is_complete:
        print(f"trackers.{name} has all of {run_dir}")
    return EXIT_COMPLETED if is_complete else EXIT_FAILED


def _settings(run_dir: RunDir, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the tracker's keys: the defaults of its YAML, overridden by the command's.

    Ignore the keys in the run folder, which may be somebody else's: they could send this
    environment's secrets to another server, or run code.

    Raises:
        UserError: the run was sent with keys that the command does not name.
    """
    with any_error(" ".join(words), "write KEY=VALUE"):
        keys: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)), resolve=True)
    path = CONFIG_DIR / "trackers" / f"{name}.yaml"
    is_ours = re.fullmatch(r"\w+", name) and path.is_file()
    shipped: Any = OmegaConf.to_container(OmegaConf.load(path)) if is_ours else {}
    defaults = shipped.get(name, {})
    frozen: Any = OmegaConf.to_container(frozen_config(run_dir.config))  # nothing is resolved
    missing = [
        f"{key}={value if type(value) is str else json.dumps(value)}"
        for key, value in frozen["trackers"].get(name, {}).items()
        if key != "wait_s" and key not in keys and defaults.get(key) != value
    ]
    if missing:
        raise UserError(
            f"{run_dir} was sent to trackers.{name} with keys that this command does not name, and "
            "keys from a run folder are not trusted",
            f"add {shlex.join(missing)}, or other values",
        )
    settings = {key: value for key, value in {**defaults, **keys}.items() if key != "wait_s"}
    if "_target_" not in settings:
        raise UserError(f"{name} is not a known tracker", "add _target_=PACKAGE.MODULE.CLASS")
    validate_trackers(Config(trackers={name: settings}))
    return settings


def follow_live(order: Order, run_dir: RunDir, name: str) -> int:
    """Follow a run for the process that started this one, and end soon after the run."""
    ignore_stop_signals()  # the run decides when this process ends
    os.nice(NICENESS)
    terminal, log = map(_hidden_stream, (1, 2))
    hide, has_failed = Secrets(values=order.secrets).hide, threading.Event()

    def is_orphan() -> bool:
        return os.getppid() != order.parent

    def status() -> str | None:
        end = _end_of(run_dir) or (Status.FAILED if is_orphan() else None)
        if end == Status.FAILED:
            has_failed.set()
        return end

    def watch() -> None:
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            if is_orphan():
                os.dup2(1, terminal.fileno())  # readers of the run's output wait for its end
            if deadline is None and (is_orphan() or has_failed.is_set()):
                deadline = time.monotonic() + LAST_S + (0.0 if is_orphan() else FAILED_S)
            time.sleep(POLL_S)
        os.killpg(0, signal.SIGKILL)  # the whole group: a client may have started a service

    def report(error: BaseException) -> None:
        sentence = (
            f"trackers.{name} failed ({_reason(error, hide=hide)}); the run continues, and the "
            "tracker retries until it has everything"
        )
        with suppress(OSError):  # the terminal was closed, or the disk is full
            print_line(f"{order.prefix}warning: {sentence}", stream=terminal)
            text = _shown("".join(traceback.format_exception(error)), hide)
            print(sentence, text, sep="\n", file=log, flush=True)

    threading.Thread(target=watch, daemon=True).start()
    is_complete = False
    try:
        while not is_loaded(run_dir, started_at=order.started_at):
            if is_orphan():
                return EXIT_COMPLETED  # there is nothing to send
            time.sleep(POLL_S)
        follower = Follower(run_dir, name, settings=order.settings, allowed=order.allowed)
        with follower.locked():  # waits for the tracker of an earlier attempt
            is_complete = follow(follower, status, report)
    except BaseException as error:  # an unusable folder
        report(error)
    if is_orphan():  # nobody else ends the client's service
        os.killpg(0, signal.SIGKILL)
    return EXIT_COMPLETED if is_complete else EXIT_REPORTED


def _hidden_stream(descriptor: int) -> TextIO:
    """Return stdout or stderr as a file, and discard the client's output: it may hold secrets."""
    stream = os.fdopen(os.dup(descriptor), "w", encoding="utf-8")
    send_nowhere(descriptor)
    return stream


def follow(
    follower: Follower,
    end_status: Callable[[], str | None],
    report: Callable[[BaseException], None],
) -> bool:
    """Send a run to its tracker until it has ended; return whether the tracker has all of it.

    `end_status` returns the status of a run that has ended, else None; `report` gets the first
    error.
    """
    pause_s, has_failed = 0.0, False
    while True:
        until = time.monotonic() + pause_s
        while (status := end_status()) is None and (wait_s := until - time.monotonic()) > 0:
            time.sleep(min(POLL_S, wait_s))
        try:
            if status is not None:
                follower.end(status)
                return True
            follower.catch_up()
            pause_s = POLL_S
        except (Exception, SystemExit) as error:  # a tracker may raise anything
            if not has_failed:
                has_failed = True
                report(error)
            if status is not None:
                return False
            pause_s = min(MOST_PAUSE_S, max(POLL_S, 2 * pause_s))


def _end_of(run_dir: RunDir) -> str | None:
    """Return the status of a run that has ended, failed if its process is gone; None: alive."""
    status = standing(run_dir).status
    return Status.FAILED if status == LOST else status if status in ENDED else None


def _reason(error: BaseException, *, hide: Callable[[str], str] = str) -> str:
    """Return an error in one line without secrets. Hide before cutting, or half may remain."""
    reason = _shown(str(error) if isinstance(error, UserError) else typed(error), hide)
    return reason if len(reason) <= MOST_CHARACTERS else reason[:MOST_CHARACTERS] + " …"


def _shown(text: str, hide: Callable[[str], str]) -> str:
    """Return a server's text without secrets, passwords in addresses and terminal escapes."""
    text = re.sub(r"://[^/\s]+@", "://…@", hide(text))
    return "\n".join(map(printable, text.splitlines()))


if __name__ == "__main__":
    main()
