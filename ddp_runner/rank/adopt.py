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
    """Return the job, with rank 0's config if the run to resume is not here. Collective.

    Rank 0 sends no secrets: each rank takes them from its own environment. What a config may name
    is what this rank's own command allows.

    Raises:
        UserError: rank 0 does not have the run either, or joined with another backend.
    """
    places = gather_objects((socket.gethostname(), job.lacks_run))
    if not any(lacks_run for _, lacks_run in places):
        return job
    host, rank_zero_lacks_run = places[0]
    if rank_zero_lacks_run:
        has_run = next((other for other, lacks_run in places if not lacks_run), None)
        if has_run is None:
            fix = f"no folder of a run, on none of the {len({one for one, _ in places})} machines"
        else:
            fix = f"on {has_run}, and {host} has rank 0; copy it to {host}"
            if job.wire is not None:  # our launcher, which can give rank 0 to another machine
                fix += f", or give {has_run} launch.node_rank=0"
        raise UserError(f"resume={job.config.resume} is {fix}")
    written = from_rank_zero(lambda: asdict(job.secrets.written(job.config)))
    if not job.lacks_run:
        return job
    own = job.config
    raw = OmegaConf.create(written)
    raw.allowed_targets, raw.data_root = own.allowed_targets, own.data_root
    secrets = find_secrets(raw)
    with secrets.hidden_in_errors():
        config = to_config(raw)
    batch = ResolvedBatch(**vars(config.batch))
    found = RunConfig(**vars(config) | {"batch": batch, "launch": own.launch})
    if found.backend.name != own.backend.name:
        raise UserError(
            f"the run was begun with backend={found.backend.name}, and {socket.gethostname()}, "
            f"which does not have its folder, has joined with {own.backend.name}; add "
            f"backend={found.backend.name} to the command"
        )
    return replace(job, config=found, secrets=secrets)
