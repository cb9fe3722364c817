"""What a sweep asks of what runs its jobs: this machine (``local``) or Slurm. Torch-free."""

from dataclasses import dataclass
from typing import Protocol

from ddp_runner.config.schema import Config, RunConfig
from ddp_runner.dist_env import DistEnv
from ddp_runner.host.hardware import Hardware
from ddp_runner.job import Outcome
from ddp_runner.sweep.jobs import Batch


@dataclass(frozen=True)
class Shape:
    """How many nodes a job takes, with as many ranks on each."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        """The world size."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True)
class Place:
    """Where a job will run, as far as its config depends on it."""

    hardware: Hardware  # that the job may use on a node
    env: DistEnv | None = None  # the facts of its rank 0, where our launcher does not start it


class Executor(Protocol):
    """Runs the batches of one sweep."""

    starts_jobs: bool  # False: the user starts them, so a batch has no results

    def validate(self, config: Config, *, searches: bool) -> None:
        """Reject settings of a sweep that its jobs cannot be run with.

        Only sweep, launch and backend of the config are read. A sweeper that `searches`, such as
        Optuna's, chooses jobs by the results of earlier jobs.

        Raises:
            UserError: a rule is broken.
        """

    def place(self, config: Config) -> Place:
        """Return where a job of this composed config will run.

        Raises:
            UserError: there is no such place.
        """

    def shape(self, config: RunConfig) -> Shape:
        """Return the nodes and ranks of a resolved job."""

    def run(self, batch: Batch) -> list[Outcome]:
        """Run what is left of a batch; return how each job ended, last a signal that stopped it."""

    def close(self) -> None:
        """End what outlives a batch."""
