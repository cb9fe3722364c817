"""A sweep on several machines, as its command line describes it. Torch-free."""

from dataclasses import replace

from omegaconf import DictConfig, OmegaConf, flag_override

from ddp_runner.cli.compose import Invocation, plan
from ddp_runner.config.launching import LaunchConfig, meeting_place
from ddp_runner.config.load import to_config
from ddp_runner.config.schema import AUTO
from ddp_runner.config.values import validate_launch
from ddp_runner.host.hardware import detect
from ddp_runner.job import Job
from ddp_runner.sweep.slurm.settings import slurm_settings


def launch_of_several(composed: DictConfig) -> LaunchConfig | None:
    """Return how the machines of a sweep meet; None: they do not, since there is one, or Slurm.

    Raises:
        UserError: nothing says where they meet.
    """
    launch = to_config(OmegaConf.masked_copy(composed, ["launch"])).launch
    validate_launch(launch)
    is_several = launch.most_nodes > 1 and slurm_settings(composed.hydra.launcher) is None
    if not is_several:
        return None
    meeting_place(launch)
    return launch


def follower(composed: DictConfig, invocation: Invocation) -> Job:
    """Return how a machine that follows a sweep starts ranks; their configs come from rank 0.

    Raises:
        UserError: the config is invalid for each job, whatever the swept keys are.
    """
    own = composed.copy()
    with flag_override(own, ["struct", "readonly"], False):
        own.world_size, own.batch.global_size, own.batch.per_rank = AUTO, None, 1
    return replace(plan(own, detect(), invocation), lacks_run=True, shows_header=False)
