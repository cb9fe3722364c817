"""What must hold for DDP's communication hooks, its static graph and post-local SGD. Torch-free.

Each pair was tried with torch 2.15: only what fails, or is wrong silently, is rejected.
"""

from ddp_runner.config.own_loop import has_own_loop
from ddp_runner.config.schema import Config, mode_needs
from ddp_runner.errors import UserError

COMM_HOOKS = ("bf16", "fp16", "powersgd")
FIRST_START = 2  # step of PowerSGD: DDP forms its buckets anew after the first one


def validate_ddp(config: Config) -> None:
    """Reject keys of DDP that do not fit each other, or the rest of the run.

    `config` has its backend and its number of ranks filled in.

    Raises:
        UserError: a rule is broken.
    """
    mode, train = config.parallelism, config.train
    hook, cap_mb = mode.get("comm_hook"), mode.get("bucket_cap_mb")
    period = (mode.get("post_local_sgd") or {}).get("period")
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
    if period is not None:
        _validate_post_local_sgd(config, period)


def _validate_hook(config: Config, hook: object) -> None:
    if hook not in COMM_HOOKS:
        raise UserError(
            f"parallelism.comm_hook ({hook}) must be null or one of {', '.join(COMM_HOOKS)}"
        )
    _validate_place(config, f"parallelism.comm_hook={hook}", fix="parallelism.comm_hook=null")
    if config.backend.name == "mpi":
        reason = (
            "whose one thread would wait for itself"
            if hook == "powersgd"
            else "which has no 16-bit numbers in torch"
        )
        raise UserError(
            f"parallelism.comm_hook={hook} does not work with backend=mpi, {reason}; write "
            "backend=gloo or parallelism.comm_hook=null"
        )
    if hook != "powersgd":
        return
    mode = config.parallelism
    keys = mode.get("powersgd") or {}
    for key, least in (("matrix_approximation_rank", 1), ("start_step", FIRST_START)):
        value = keys.get(key)
        if type(value) is not int or value < least:
            raise UserError(
                f"parallelism.powersgd.{key} ({value}) must be a whole number, {least} or greater"
                + ("; DDP forms its buckets anew in the first steps" if least > 1 else "")
            )
    if config.train.precision == "fp16":
        raise UserError(
            "parallelism.comm_hook=powersgd keeps what it has not sent, and the first overflow of "
            "train.precision=fp16 would make that NaN for good; write train.precision=bf16"
        )
    if mode.get("find_unused_parameters"):
        raise UserError(
            "parallelism.comm_hook=powersgd divides by a gradient's norm, which is 0 for an unused "
            "parameter and makes it NaN; write parallelism.find_unused_parameters=false, or "
            "parallelism.comm_hook=bf16"
        )
    _validate_own_loop(config, "parallelism.comm_hook=powersgd", fix="parallelism.comm_hook=bf16")


def _validate_post_local_sgd(config: Config, period: object) -> None:
    key, fix = "parallelism.post_local_sgd.period", "parallelism.post_local_sgd.period=null"
    start_step = config.parallelism["post_local_sgd"].get("start_step")
    if type(period) is not int or period < 1:
        raise UserError(f"{key} ({period}) must be null or a whole number, 1 or greater")
    if type(start_step) is not int or start_step < 0:
        raise UserError(
            f"parallelism.post_local_sgd.start_step ({start_step}) must be a whole number, 0 or "
            "greater"
        )
    named = f"{key}={period}"
    _validate_place(config, named, fix=fix)
    _validate_own_loop(config, named, fix=fix)
    hook = config.parallelism.get("comm_hook")
    if hook is not None:
        raise UserError(
            f"{named} and parallelism.comm_hook={hook} are both hooks, and DDP takes one; set one "
            "of them to null"
        )
    if config.ema.decay is not None:
        raise UserError(
            f"ema.decay ({config.ema.decay:g}) averages the weights of one model, and with {named} "
            f"each rank has its own; write ema.decay=null or {fix}"
        )
    if config.train.precision == "fp16":
        raise UserError(
            f"train.precision=fp16 skips a step whose gradients overflow, and with {named} ranks "
            "would skip different ones; write train.precision=bf16"
        )
    if config.task == "check":
        raise UserError(f"task=check compares equal ranks, and {named} trains unequal; write {fix}")


def _validate_place(config: Config, named: str, *, fix: str) -> None:
    devices = mode_needs(config.parallelism).devices_per_rank
    if devices > 1:
        raise UserError(
            f"{named} needs a replica on one device, as torch's hooks do, and "
            f"parallelism={config.parallelism.get('name')} cuts it over {devices}; write {fix}"
        )


def _validate_own_loop(config: Config, named: str, *, fix: str) -> None:
    if has_own_loop(config.task):
        raise UserError(
            f"{named} has a state that a loop of your own (task={config.task}) would not save; "
            f"write {fix}"
        )


def validate_starts(config: Config, *, num_steps: int | None) -> None:
    """Reject a hook that would begin only after the run, of so many steps; None: not known.

    Raises:
        UserError: the run would do nothing of what its keys ask for.
    """
    mode = config.parallelism
    starts = []
    if mode.get("comm_hook") == "powersgd":
        starts.append(("powersgd", "compress"))
    if (mode.get("post_local_sgd") or {}).get("period") is not None:
        starts.append(("post_local_sgd", "train on its own"))
    for group, verb in starts:
        start_step = mode[group]["start_step"]
        if config.task == "train" and num_steps is not None and start_step >= num_steps:
            raise UserError(
                f"parallelism.{group}.start_step ({start_step}) must be less than the run's steps "
                f"({num_steps}), or no step would {verb}; begin earlier or train longer"
            )
