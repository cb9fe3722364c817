"""What must hold for DDP's communication hooks and its static graph. Torch-free.

Each pair was tried with torch 2.15: only what fails, or is wrong silently, is rejected.
"""

from collections.abc import Mapping

from ddp_runner.config.schema import Config, mode_needs
from ddp_runner.errors import UserError

COMM_HOOKS = ("bf16", "fp16")


def validate_ddp(config: Config) -> None:
    """Reject keys of DDP that do not fit each other, or the rest of the run.

    `config` has its backend and its number of ranks filled in.

    Raises:
        UserError: a rule is broken.
    """
    mode, train = config.parallelism, config.train
    hook, cap_mb = mode.get("comm_hook"), mode.get("bucket_cap_mb")
    if train.compile and cap_mb is not None and cap_mb < 1:
        raise UserError(
            f"parallelism.bucket_cap_mb ({cap_mb:g}) must be 1 or greater with train.compile=true, "
            "which cuts the model at DDP's first bucket of 1 MiB; write 1 or more"
        )
    if mode.get("static_graph") and train.grad_accum_steps > 1:
        raise UserError(
            "parallelism.static_graph=true cannot skip gradient syncs, which "
            f"train.grad_accum_steps ({train.grad_accum_steps}) does; turn one of them off"
        )
    if hook is not None:
        _validate_hook(config, hook)


def _validate_hook(config: Config, hook: object) -> None:
    is_own = isinstance(hook, Mapping) and "_target_" in hook
    if not is_own and hook not in COMM_HOOKS:
        raise UserError(
            f"parallelism.comm_hook ({hook}) must be null, {' or '.join(COMM_HOOKS)}, or a mapping "
            "with the _target_ of your own"
        )
    devices = mode_needs(config.parallelism).devices_per_rank
    if devices > 1:
        raise UserError(
            "parallelism.comm_hook needs a replica on one device, as torch's hooks do, and "
            f"parallelism={config.parallelism.get('name')} cuts it over {devices}; write "
            "parallelism.comm_hook=null"
        )
    if not is_own and config.backend.name == "mpi":
        raise UserError(
            f"parallelism.comm_hook={hook} does not work with backend=mpi, which has no 16-bit "
            "numbers in torch; write backend=gloo or parallelism.comm_hook=null"
        )
