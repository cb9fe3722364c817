"""The log file of a rank, with the rank in every line. Rank 0 also prints."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOBase

from ddp_runner.dist_env import DistEnv
from ddp_runner.host.streams import keep_streams, line_width, print_line, wrap_lines
from ddp_runner.tracking.run_dir import RunDir

LOGGER = logging.getLogger("ddp_runner")
log_to_file = LOGGER.info  # the file of this rank, and nothing else


@contextmanager
def rank_log(
    run_dir: RunDir, env: DistEnv, *, hide: Callable[[str], str] = str, prefix: str = ""
) -> Iterator[Callable[[str], None]]:
    """Open this rank's log file; yield a function that logs a text and prints it on rank 0.

    Library warnings, and all output of ranks other than 0, go to the file only. `hide` removes
    secrets from each line of the file. Rank 0 prints `prefix` before each line.
    """
    path = run_dir.logs / f"rank-{env.rank}.log"
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_RankFormatter(env.rank, hide))
    LOGGER.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for logger in (LOGGER, logging.getLogger("py.warnings")):
        logger.addHandler(handler)
        logger.propagate = False
    if env.is_rank_zero:
        keep_streams(LOGGER.warning, prefix=prefix)
    else:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = _LoggedStream()

    def log(text: str) -> None:
        log_to_file(text)
        if env.is_rank_zero:
            print_line(wrap_lines(text, line_width(sys.stdout)), stream=sys.stdout)

    try:
        yield log
    except BaseException as error:
        LOGGER.error("this rank ends with an error", exc_info=error)
        raise
    finally:
        LOGGER.removeHandler(handler)
        with suppress(OSError):  # a full disk, which the handler has already reported
            handler.close()


class _LogFile(logging.FileHandler):
    """A log file that survives a full disk, where logging would print a traceback per line."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging calls it by this name
        """Print a single warning that the file cannot be written."""
        error = sys.exc_info()[1]
        if not self._has_failed:
            self._has_failed = True
            print(f"warning: {self.baseFilename} cannot be written ({error})", file=sys.stderr)


class _RankFormatter(logging.Formatter):
    """Puts time, rank and level before every line, also of warnings and tracebacks."""

    def __init__(self, rank: int, hide: Callable[[str], str]) -> None:
        super().__init__()
        self._rank, self._hide = rank, hide

    def format(self, record: logging.LogRecord) -> str:
        label = f"{self.formatTime(record)} rank {self._rank} {record.levelname} "
        return "\n".join(label + self._hide(line) for line in super().format(record).splitlines())


class _LoggedStream(TextIOBase):
    """A stream that logs each line written to it."""

    _rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            LOGGER.info(line)
        return len(text)
