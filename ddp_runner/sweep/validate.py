"""What must hold for a sweep as a whole, checked before any job starts. Torch-free."""

import sys

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import VISIBLE, Hardware


def validate_sweep(config: Config, hardware: Hardware, *, searches: bool) -> None:
    """Reject settings that a sweep cannot run its jobs on this machine with; see ``Executor``.

    Raises:
        UserError: a rule is broken.
    """
    sweep, launch = config.sweep, config.launch
    _validate_objective(config, searches=searches)
    if launch.nnodes > 1:
        raise UserError(
            f"launch.nnodes ({launch.nnodes}) must be 1 in a sweep, which runs on this machine; "
            "write hydra/launcher=slurm, or start each job by a command of its own, without -m"
        )
    slots = sweep.parallel_jobs
    if slots < 1:
        raise UserError(f"sweep.parallel_jobs ({slots}) must be greater than 0")
    if slots == 1:
        return
    if launch.init_method is not None:
        raise UserError(
            f"sweep.parallel_jobs ({slots}) would let jobs meet at one address, which "
            f"launch.init_method ({launch.init_method}) gives; leave one of them out"
        )
    if sweep.calibrate:
        raise UserError(
            "sweep.calibrate measures what the jobs beside it disturb, sweep.parallel_jobs is "
            f"{slots}; leave one of them out"
        )
    if sys.platform != "linux":
        raise UserError(
            f"sweep.parallel_jobs ({slots}) gives each job cores of its own, which only Linux can; "
            "leave it out"
        )
    if slots > hardware.num_cores:
        raise UserError(
            f"sweep.parallel_jobs ({slots}) is more than the {hardware.num_cores} cores that this "
            f"process may use; write {hardware.num_cores} or fewer"
        )
    if hardware.num_gpus and slots > hardware.num_gpus and config.backend.device != "cpu":
        raise UserError(
            f"sweep.parallel_jobs ({slots}) is more than the {hardware.num_gpus} GPUs that its "
            f"jobs use; write {hardware.num_gpus} or fewer, or backend.device=cpu"
        )
    if hardware.num_gpus and hardware.kind not in VISIBLE and config.backend.device != "cpu":
        raise UserError(
            f"sweep.parallel_jobs ({slots}) shares out {' and '.join(VISIBLE)} devices, not "
            f"{hardware.kind}; leave it out, or write backend.device=cpu"
        )


def validate_slurm_sweep(config: Config, *, searches: bool, submits: bool) -> None:
    """Reject settings that Slurm cannot run the jobs of a sweep with.

    The arguments are those of ``validate_sweep``, and whether this command `submits` the jobs.

    Raises:
        UserError: a rule is broken.
    """
    _validate_objective(config, searches=searches)
    slots, address = config.sweep.parallel_jobs, config.launch.init_method
    if slots != 1:
        raise UserError(
            f"sweep.parallel_jobs ({slots}) shares one machine among jobs, and Slurm runs as many "
            "as fit; to limit them, write hydra.launcher.array_parallelism=N"
        )
    if address is not None:
        raise UserError(
            f"launch.init_method ({address}) lets all jobs of a sweep meet at one address, and "
            "Slurm runs them at the same time; leave it out"
        )
    if searches and not submits:
        raise UserError(
            "hydra.launcher.submit=false leaves the jobs to you, and a search chooses the next "
            "ones by their results; leave it out"
        )


def _validate_objective(config: Config, *, searches: bool) -> None:
    if searches and config.sweep.objective is None:
        raise UserError(
            "sweep.objective is null and this hydra/sweeper looks for the best of a metric; "
            "write sweep.objective=eval/accuracy hydra.sweeper.direction=maximize"
        )
