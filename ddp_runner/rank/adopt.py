"""The config of a resumed run, on ranks whose machine does not have the run's folder."""

import socket
from dataclasses import asdict, replace

from omegaconf import OmegaConf

from ddp_runner.config.load import find_secrets, to_config
from ddp_runner.config.schema import RunConfig
from ddp_runner.config.training import ResolvedBatch
from ddp_runner.distributed import from_rank_zero, gather_objects
from ddp_runner.errors import UserError
from ddp_runner.job import Job


def with_config_of_rank_zero(job: Job) -> Job:
    """Return the job, with rank 0's config if this machine lacks the run to resume. Collective.

    Rank 0 sends no secrets: each rank takes them from its own environment. Only this rank's own
    command decides which targets are allowed.

    Raises:
        UserError: rank 0 lacks the run as well, or uses another backend.
    """
    machines = gather_objects((socket.gethostname(), job.lacks_run))
    if not any(lacks_run for _, lacks_run in machines):
        return job
    host_with_run = next((host for host, lacks_run in machines if not lacks_run), None)
    if host_with_run is None:
        raise UserError(
            f"resume={job.config.resume} is not a run folder on any of the {len(dict(machines))} "
            "machines",
            "name a run's folder",
        )
    first_host, rank_zero_lacks_run = machines[0]
    if rank_zero_lacks_run:
        fix = f"copy it to {first_host}"
        if job.wire is not None:  # only our launcher can move rank 0 to another machine
            fix += f", or give {host_with_run} launch.node_rank=0"
        raise UserError(
            f"resume={job.config.resume} is on {host_with_run}, and {first_host} has rank 0", fix
        )
    shared = from_rank_zero(lambda: asdict(job.secrets.written(job.config)))
    if not job.lacks_run:
        return job
    raw = OmegaConf.create(shared)
    raw.allowed_targets, raw.data_root = job.config.allowed_targets, job.config.data_root
    secrets = find_secrets(raw)
    with secrets.hidden_in_errors():
        config = to_config(raw)
    batch = ResolvedBatch(**vars(config.batch))
    adopted = RunConfig(**vars(config) | {"batch": batch, "launch": job.config.launch})
    if adopted.backend.name != job.config.backend.name:
        raise UserError(
            f"the run uses backend={adopted.backend.name}, but {socket.gethostname()}, which lacks "
            f"the run folder, joined with {job.config.backend.name}",
            f"add backend={adopted.backend.name} to the command",
        )
    return replace(job, config=adopted, secrets=secrets)
