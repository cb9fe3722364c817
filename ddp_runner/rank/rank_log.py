"""The log of one rank: its own file, with its rank in every line; rank 0 prints as well."""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOBase
from types import TracebackType

from ddp_runner.dist_env import DistEnv
from ddp_runner.host.streams import keep_streams, print_line
from ddp_runner.tracking.run_dir import RunDir


class RankLog:
    """The log file of one rank, open for the length of a ``with`` block.

    Warnings of libraries go to the file only. So does whatever a rank other than 0 prints, C++ code
    included.

    Args:
        run_dir: the run's folder.
        env: this rank's place.
        hide: removes secrets from a line before it is written.
    """

    def __init__(self, run_dir: RunDir, env: DistEnv, *, hide: Callable[[str], str] = str) -> None:
        self._env = env
        self._path = run_dir.rank_log(env.rank)
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        self._logger = logging.getLogger("ddp_runner")
        self._handler = _File(self._path, encoding="utf-8")
        self._handler.setFormatter(_EachLine(env.rank, hide))

    def __enter__(self) -> "RankLog":
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._logger.addHandler(self._handler)
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addHandler(self._handler)
        logging.getLogger("py.warnings").propagate = False
        if self._env.is_rank_zero:
            keep_streams(self._logger.warning)
        else:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
            sys.stdout = sys.stderr = _Lines(self._logger)
        return self

    def write(self, text: str) -> None:
        """Log the text; rank 0 also prints it."""
        log_to_file(text)
        if self._env.is_rank_zero:
            print_line(text, stream=sys.stdout)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._logger.error("this rank ends with an error", exc_info=error)
        self._logger.removeHandler(self._handler)
        with suppress(OSError):  # a full disk, which the handler has reported
            self._handler.close()


def log_to_file(text: str) -> None:
    """Log the text to this rank's file alone."""
    for line in text.splitlines():
        logging.getLogger("ddp_runner").info(line)


class _File(logging.FileHandler):
    """A log file whose disk may be full; logging alone would print a traceback for each line."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's own name
        """Print, once, that the file cannot be written."""
        error = sys.exc_info()[1]
        if not self._has_failed:
            self._has_failed = True
            print(f"warning: {self.baseFilename} cannot be written ({error})", file=sys.stderr)


class _EachLine(logging.Formatter):
    """Puts time, rank and level before every line, even those of warnings and tracebacks."""

    def __init__(self, rank: int, hide: Callable[[str], str]) -> None:
        super().__init__()
        self._rank, self._hide = rank, hide

    def format(self, record: logging.LogRecord) -> str:
        start = f"{self.formatTime(record)} rank {self._rank} {record.levelname} "
        return "\n".join(start + self._hide(line) for line in super().format(record).splitlines())


class _Lines(TextIOBase):
    """A stream that logs each line written to it."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._rest = logger, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._logger.info(line)
        return len(text)
