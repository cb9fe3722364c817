"""Faults on several hosts: of which kinds they are, where they happen, and how they come about.

A training waits at the place of its fault until the fault is there, so the same draw gives the same
fault on any machine.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster_training import MEETING, NUM_STEPS, SAVE_EVERY, TRAINING, Command, Training

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from commands import wait_for
from injection import At, Call, Fault, pause, raise_error
from undisturbed import rank_pids

SHORT_CUT_S = 2.0
EARLY_S = 2.5  # start-up takes about so long
KINDS = {  # the phases in which each kind of fault can happen
    "rank killed": ("start-up", "training", "saving", "ending"),
    "rank suspended": ("start-up", "training", "saving", "ending"),
    "rank raises": ("start-up", "training", "saving", "ending"),
    "launcher killed": ("start-up", "waiting", "training", "saving", "ending"),
    "host killed": ("start-up", "waiting", "training", "saving", "ending"),
    "link cut for 2 s": ("start-up", "waiting", "training", "saving", "ending"),
    "link cut for good": ("start-up", "waiting", "training", "saving", "ending"),
    "SIGTERM": ("start-up", "waiting", "training", "saving", "ending"),
    "SIGINT": ("start-up", "waiting", "training", "saving", "ending"),
    "host comes late": ("waiting",),
    "host comes back": ("start-up", "training", "saving"),
}


@dataclass(frozen=True)
class Draw:
    """A fault and its place."""

    kind: str
    phase: str
    setting: str
    seed: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.phase}, {self.setting} (seed {self.seed!r})"


class Injection:
    """A fault: it starts the commands of a training, and happens.

    Args:
        run: not started yet.
        draw: the fault.
        chance: of its place.
        num_calls: the file system calls of all saves of a run.
    """

    def __init__(self, run: Training, draw: Draw, chance: random.Random, *, num_calls: int) -> None:
        self.run, self.kind, self.phase, self._chance = run, draw.kind, draw.phase, chance
        self.victim = chance.randrange(run.setting.num_hosts)
        self.keys = (*TRAINING, *MEETING, *run.setting.keys)
        if self.kind == "host comes back":
            self.keys += ("resume=auto",)  # as after a boot, when nobody knows what was there
        self._num_calls = num_calls
        self.saved = 0  # the newest checkpoint's step at the fault
        self.killed: list[Command] = []  # these could not end in order

    def inject(self) -> bool:
        """Start the commands and do it; return whether the place was reached."""
        num_hosts = self.run.setting.num_hosts
        order = self._chance.sample(range(num_hosts), num_hosts)
        if self.phase == "waiting":
            return self._while_waiting(order)
        own, where = self._place(), self.run.base / "pause"
        where.mkdir()
        raises = self.kind == "rank raises"
        what = raise_error if raises else partial(pause, str(where))
        faults = [Fault(what, own)] if own else []
        for place in order:
            self.run.start(place, *self.keys, faults=faults)
        if own is None:
            time.sleep(self._chance.uniform(0.0, EARLY_S))
        elif raises:
            return True
        else:
            ends = [one.process for one in self.run.commands]
            wait_for(
                lambda: (where / "reached").exists() or all(one.poll() is not None for one in ends)
            )
            if not (where / "reached").exists():
                return False
        self.saved = self.run.saved()
        self._strike()
        (where / "go").touch()
        if self.kind == "link cut for 2 s":
            time.sleep(SHORT_CUT_S)
            self.run.net.hosts[self.victim].mend()
        return True

    def _place(self) -> At | Call | None:
        """Return where a rank waits for the fault; None: at any instant of the start."""
        chance, num_ranks = self._chance, self.run.setting.num_hosts
        is_own = self.kind == "rank raises" or self.phase == "ending"  # others end, and are gone
        rank = self.victim if is_own else chance.randrange(num_ranks)
        if self.phase == "start-up":
            return At(rank, 1, of="evaluation") if self.kind == "rank raises" else None
        if self.phase == "training":
            return At(rank, chance.randint(2, NUM_STEPS - SAVE_EVERY))
        if self.phase == "saving":
            if self.kind == "rank raises":
                self.victim = 0
            return Call(chance.randint(1, self._num_calls), half=chance.random() < 0.5)
        return At(rank, 1, of="end")

    def _while_waiting(self, order: Sequence[int]) -> bool:
        run, others = self.run, [place for place in order if place != self.victim]
        first = run.start(self.victim, *self.keys)
        wait_for(lambda: "waiting for" in first.text("stdout") or first.process.poll() is not None)
        if "waiting for" not in first.text("stdout"):
            return False
        if self.kind != "host comes late":
            self._strike()
        if self.kind == "link cut for 2 s":
            time.sleep(SHORT_CUT_S)
            run.net.hosts[self.victim].mend()
        for place in others:
            run.start(place, *self.keys)
        return True

    def _strike(self) -> None:
        """Do it to the victim."""
        host = self.run.net.hosts[self.victim]
        found = [one for one in self.run.commands if one.host == host]
        if self.kind in ("rank killed", "rank suspended"):
            self._signal_rank(found[0])
        elif self.kind == "launcher killed":
            found[0].process.send_signal(signal.SIGKILL)
            self.killed = found
        elif self.kind in ("host killed", "host comes back"):
            host.kill()
            self.killed = found
            if self.kind == "host comes back":
                self.run.start(self.victim, *self.keys)
        elif self.kind.startswith("link cut"):
            host.cut()
        else:
            found[0].process.send_signal(signal.Signals[self.kind])
            time.sleep(0.1)

    def _signal_rank(self, command: Command) -> None:
        process = command.process

        def pids() -> list[int]:
            return list(rank_pids(process.pid))

        wait_for(lambda: pids() or process.poll() is not None)
        signum = signal.SIGKILL if self.kind == "rank killed" else signal.SIGSTOP
        for pid in pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
