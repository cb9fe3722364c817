"""What must hold for a sweep as a whole, checked before any job starts. Torch-free."""

import sys

from ddp_runner.config.schema import Config
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware


def validate_sweep(config: Config, hardware: Hardware, *, searches: bool) -> None:
    """Reject settings that a sweep cannot run its jobs with.

    Only sweep, launch and backend of the composed config are read. A sweeper that `searches`, such
    as Optuna's, chooses jobs by the results of earlier jobs.

    Raises:
        UserError: a rule is broken.
    """
    sweep, launch = config.sweep, config.launch
    if searches and sweep.objective is None:
        raise UserError(
            "sweep.objective is null and this hydra/sweeper looks for the best of a metric; "
            "write sweep.objective=eval/accuracy hydra.sweeper.direction=maximize"
        )
    if launch.most_nodes > 1:
        raise UserError(
            f"-m runs its jobs on one machine and launch.nnodes is {launch.nnodes}: two launchers "
            "would take different jobs and wait for each other; run the jobs one by one, without -m"
        )
    slots = sweep.parallel_jobs
    if slots == 1:
        return
    if slots < 1:
        raise UserError(f"sweep.parallel_jobs ({slots}) must be greater than 0")
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
    if launch.init_method is not None:
        raise UserError(
            f"sweep.parallel_jobs ({slots}) would let jobs meet at one address, which "
            f"launch.init_method ({launch.init_method}) gives; leave one of them out"
        )
    if sweep.calibrate:
        raise UserError(
            f"sweep.calibrate measures what the jobs beside it disturb, sweep.parallel_jobs is "
            f"{slots}; leave one of them out"
        )
