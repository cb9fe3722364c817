"""How fast the loop goes; used by ``train``."""

import time


class Pace:
    """Throughput between two log lines, on this rank's clock; saving and evaluating excluded."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a new interval."""
        self._started, self._steps, self._samples = time.perf_counter(), 0, 0

    def add(self, *, samples: int) -> None:
        """Count one step of the whole gang."""
        self._steps += 1
        self._samples += samples

    def lap(self) -> dict[str, float]:
        """Return the interval's throughput and begin a new one."""
        elapsed_s = time.perf_counter() - self._started
        figures = {
            "perf/samples_per_s": self._samples / elapsed_s,
            "perf/step_time_ms": 1000 * elapsed_s / self._steps,
        }
        self.restart()
        return figures
