"""Fills in the values that follow from other values and from the machine. Torch-free."""

from collections.abc import Collection
from dataclasses import replace

from ddp_runner.config.plan_rules import on_planned_machine
from ddp_runner.config.rules import validate_config, validate_ranks, validate_steps
from ddp_runner.config.schema import CONFIG_DIR, Config, RunConfig, mode_needs, num_shares
from ddp_runner.config.sections import AUTO, INFERENCE, PLAN, SAMPLE, BackendConfig
from ddp_runner.config.targets import validate_targets
from ddp_runner.config.training import ResolvedBatch
from ddp_runner.config.validate import validate_values
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import UserError, counted
from ddp_runner.files import read_yaml
from ddp_runner.host.hardware import BACKENDS, CUDA, FOR_CPU, Hardware

ON_CPU = "backend=gloo backend.device=cpu"
MOST_RANKS_A_CORE = 64  # a rank takes some 100 MiB, and a collective waits for the slowest rank


def resolve(
    config: Config, *, hardware: Hardware, chosen: Collection[str] = (), env: DistEnv | None = None
) -> tuple[RunConfig, list[str]]:
    """Return the config with every derived value filled in, and warnings to print once.

    The `chosen` keys of the command line win over a conflicting key of a YAML. `env` has this
    rank's facts where the ranks run already (torchrun, srun, mpirun).

    Raises:
        UserError: a rule is broken.
    """
    validate_targets(config)
    validate_values(config)
    validate_config(config, chosen=chosen)
    given = {"backend", "backend.name", "backend.device"} & {*chosen}
    if config.resume and given == {"backend.device"}:  # the run's own backend may not support it
        config = replace(config, backend=replace(config.backend, name="auto"))
    config, notes = _fit_to_machine(config, hardware, chosen=chosen)
    if config.task == PLAN:
        config, hardware, notes = on_planned_machine(config, env, chosen=chosen)
    ranks = _num_ranks(config, hardware, env)
    nproc = env.local_world_size if env else _num_local_ranks(config, hardware, ranks)
    # A rank may see only its own GPUs. Unless Slurm says so, that looks like one GPU for all ranks,
    # so the user must ask for it. The ranks then compare their GPUs.
    per_rank = mode_needs(config.parallelism).devices_per_rank
    sees_its_own = env is not None and hardware.num_gpus == per_rank
    backend = _backend(config, hardware, nproc=nproc, sees_its_own=sees_its_own)
    validate_ranks(replace(config, world_size=ranks, backend=backend), env)
    model = {"name": config.model["_target_"].rpartition(".")[2].lower()} | config.model
    batch, train = resolve_batch(config, ranks, chosen), config.train
    if batch.virtual_ranks is not None:  # what else would decide the bytes is part of the config
        is_exact = train.deterministic or backend.device != "cpu"
        train = replace(train, num_threads=train.num_threads or 1, deterministic=is_exact)
    derived = {"world_size": ranks, "backend": backend, "batch": batch, "model": model}
    resolved = RunConfig(**vars(config) | derived | {"train": train})
    validate_steps(resolved)
    warnings = [*notes, *_warnings(resolved, hardware, env, nproc)]
    is_inherited = config.resume is not None and not given - {"backend.name"}  # from its config
    if backend.device == "cpu" and (config.backend.device != "cpu" or is_inherited):
        idle = _idle_gpus(config, hardware, nproc=nproc, sees_its_own=sees_its_own)
        warnings = [*idle, *warnings]
    return resolved, warnings


def _fit_to_machine(
    config: Config, hardware: Hardware, *, chosen: Collection[str]
) -> tuple[Config, list[str]]:
    """Return the config for this machine, and a note if it lacks the GPUs of the run.

    A run's model must be usable where the run could not train. Keys that the command line chose
    stay. Sampling takes one rank, however many ranks trained the model.
    """
    if config.task == SAMPLE:
        single = read_yaml(CONFIG_DIR / "parallelism" / "single.yaml")
        config = replace(config, parallelism=single, world_size=1)
    backend, ranks = config.backend, config.world_size
    gpus = 0 if hardware.unusable else hardware.num_gpus
    per_rank = mode_needs(config.parallelism).devices_per_rank
    needed = per_rank * (ranks if isinstance(ranks, int) else 1)
    fits = backend.device in ("auto", "cpu") or (backend.device == hardware.kind and needed <= gpus)
    if config.task not in INFERENCE or fits or {"backend", "backend.device"} & set(chosen):
        return config, []
    shown = f"{gpus} ({hardware.kind})" if gpus else "none"
    note = f"the run had {counted(needed, 'GPU')} ({backend.device}) and this machine shows {shown}"
    config = replace(config, backend=replace(backend, name=AUTO, device=AUTO))
    if "world_size" not in chosen and config.task != SAMPLE:
        config = replace(config, world_size=AUTO)
    return config, [f"{note}; give world_size and backend to choose"]


def _warnings(config: RunConfig, hardware: Hardware, env: DistEnv | None, nproc: int) -> list[str]:
    """Return warnings about effects of a resolved config that the user may not expect."""
    warnings = []
    if env is not None and env.launcher == "torchrun" and config.launch.init_method is not None:
        warnings.append("launch.init_method is not used: torchrun has its own rendezvous")
    # Under another launcher this rank may be bound to a part of the cores.
    if env is None and config.backend.device == "cpu" and nproc > hardware.num_cores:
        warnings.append(
            f"{nproc} ranks on {hardware.num_cores} cores: they take turns, expect no speedup"
        )
    if (env.num_nodes if env else config.launch.nnodes) > 1:
        warnings.append(
            "torch.distributed has no authentication: whoever reaches the ports of these machines "
            "can run code as you; keep them on a trusted network"
        )
    has_one_device = hardware.num_gpus < 2 or config.backend.device == "cpu"
    if mode_needs(config.parallelism).data_parallel and has_one_device:
        name = config.parallelism.get("name")
        warnings.append(f"parallelism={name} has fewer than two GPUs: it runs as one device")
    return warnings


def _num_ranks(config: Config, hardware: Hardware, env: DistEnv | None) -> int:
    """Return the number of ranks over all machines."""
    world_size, launch = config.world_size, config.launch
    if env is not None:
        if world_size not in ("auto", env.world_size):
            raise UserError(
                f"world_size ({world_size}) differs from the {env.world_size} ranks that were "
                "launched",
                "leave it out, or launch as many",
            )
        return env.world_size
    if world_size != "auto":
        return int(world_size)
    if launch.nproc_per_node is not None:
        return launch.nproc_per_node * launch.nnodes
    needs = mode_needs(config.parallelism)
    if needs.max_ranks is not None:
        return needs.max_ranks
    no_backend = hardware.backend in FOR_CPU  # no backend sends the accelerators' tensors
    gpus = 0 if no_backend or config.backend.device == "cpu" else hardware.num_gpus
    per_node = gpus // needs.devices_per_rank
    return max(needs.min_ranks, (per_node or min(2, hardware.num_cores)) * launch.nnodes)


def _num_local_ranks(config: Config, hardware: Hardware, ranks: int) -> int:
    launch, num_nodes = config.launch, config.launch.nnodes
    if num_nodes > 1 and launch.rdzv_endpoint is None:
        raise UserError(
            f"launch.nnodes ({launch.nnodes}) needs launch.rdzv_endpoint=HOST:PORT, "
            "the same on every machine"
        )
    nproc = launch.nproc_per_node or ranks // num_nodes
    most = MOST_RANKS_A_CORE * hardware.num_cores
    if nproc > most:
        raise UserError(
            f"{nproc} ranks are too many for a machine of {hardware.num_cores} cores",
            f"write world_size={most * num_nodes} or less",
        )
    if nproc * num_nodes != ranks:
        raise UserError(
            f"launch.nnodes ({num_nodes}) times launch.nproc_per_node ({nproc}) is not "
            f"world_size ({ranks})",
            "leave world_size out, or make them agree",
        )
    return nproc


def resolve_batch(config: Config, ranks: int, chosen: Collection[str] = ()) -> ResolvedBatch:
    """Return the batch sizes with both filled in.

    Raises:
        UserError: neither or both sizes are given, or the ranks do not divide the global size.
    """
    total, per_rank = config.batch.global_size, config.batch.per_rank
    if total is not None and per_rank is not None:
        # The key on the command line wins over the default or an experiment's key.
        explicit = {"batch.global_size", "batch.per_rank"} & set(chosen)
        if len(explicit) == 2:
            raise UserError(
                f"batch.global_size ({total}) and batch.per_rank ({per_rank}) exclude each other",
                "give one, and the other follows",
            )
        if explicit == {"batch.per_rank"}:
            total = None
    shares, virtual = num_shares(config, ranks), config.batch.virtual_ranks
    num_micro_steps = config.train.grad_accum_steps
    parts = shares * num_micro_steps
    if total is None:
        if per_rank is None:
            raise UserError(
                "batch.global_size and batch.per_rank are both null", "give one of them"
            )
        total = per_rank * parts
    elif total % parts:
        below, above = total // parts * parts, (total // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        factor = "world_size" if shares == ranks else "the ranks with samples of their own"
        factor = factor if virtual is None else "batch.virtual_ranks"
        divisor = f"{factor} ({shares})"
        if num_micro_steps > 1:
            divisor += f" x train.grad_accum_steps ({num_micro_steps})"
        raise UserError(
            f"batch.global_size ({total}) is not divisible by {divisor}", f"use {nearest}"
        )
    return ResolvedBatch(**vars(config.batch) | {"global_size": total, "per_rank": total // parts})


def _backend(
    config: Config, hardware: Hardware, *, nproc: int, sees_its_own: bool
) -> BackendConfig:
    """Return the backend with its name and device filled in."""
    if config.task == PLAN:  # it computes nothing, in any precision
        return config.backend
    name, device, gpus = config.backend.name, config.backend.device, hardware.num_gpus
    needs, kinds = mode_needs(config.parallelism), BACKENDS | {hardware.kind: hardware.backend}
    for key, value, options, fix in (
        ("name", name, {"auto", *FOR_CPU, *kinds.values()}, "backend"),
        ("device", device, {"auto", "cpu", *kinds}, "backend.device"),
    ):
        if value not in options:
            choices = ", ".join(sorted(options))
            raise UserError(
                f"backend.{key} ({value}) must be one of {choices}", f"write {fix}=auto"
            )
    kind_of = {backend: kind for kind, backend in kinds.items() if backend not in FOR_CPU}
    wanted = kind_of.get(name) or (device if device in kinds else None)
    if wanted is not None:
        choice = f"backend={name}" if name in kind_of else f"backend.device={device}"
        if gpus == 0 or hardware.kind != wanted:
            reason = f" ({hardware.unusable})" if hardware.unusable else ""
            raise UserError(
                f"{choice} needs {wanted.upper()} devices and this machine shows "
                f"{f'{gpus} {hardware.kind}' if gpus else 'none'}{reason}",
                f"write {choice.partition('=')[0]}=auto",
            )
        if device not in ("auto", wanted):
            raise UserError(
                f"{choice} sends only {wanted.upper()} tensors",
                f"backend.device={device} needs {kinds.get(device, 'gloo')}",
            )
    num_devices = nproc * needs.devices_per_rank
    fits = num_devices <= gpus or (sees_its_own and (wanted is not None or hardware.binds_gpus))
    if wanted is not None and not fits:
        most = gpus // needs.devices_per_rank
        raise UserError(
            f"{counted(nproc, 'rank')} with {counted(needs.devices_per_rank, 'device')} each need "
            f"{counted(num_devices, f'{wanted.upper()} device')} and this machine shows {gpus}",
            f"{f'write world_size={most}, or' if most else 'write'} {ON_CPU}",
        )
    obstacle = _obstacle(config, hardware)
    if wanted is not None and obstacle is not None:
        raise UserError(f"{choice} cannot be used, {obstacle}, or backend.device=cpu")
    if device == "auto":
        device = wanted or (hardware.kind if gpus and fits and obstacle is None else "cpu")
    if name == "auto":
        name = kinds.get(device, "gloo")
    if config.train.precision == "fp16" and device == "cpu":
        raise UserError("train.precision=fp16 needs a GPU", "on a CPU write bf16")
    if config.train.precision == "tf32" and device != CUDA:
        raise UserError("train.precision=tf32 needs a CUDA device", "elsewhere write fp32")
    return replace(config.backend, name=name, device=device)


def _obstacle(config: Config, hardware: Hardware) -> str | None:
    """Return why a config cannot use any accelerators, and the fix; None if it can."""
    name, kind, needs = config.backend.name, hardware.kind, mode_needs(config.parallelism)
    if hardware.backend in FOR_CPU and needs.max_ranks != 1:
        return f"since no backend sends {kind.upper()} tensors; write parallelism=single"
    if needs.data_parallel and kind != CUDA:
        other = "single" if hardware.backend in FOR_CPU else "ddp"
        return f"since torch's DataParallel needs CUDA; write parallelism={other}"
    if name == "mpi" or (name == "gloo" and kind != CUDA and hardware.backend != name):
        return f"since backend={name} sends CPU tensors; write backend=auto"
    return None


def _idle_gpus(config: Config, hardware: Hardware, *, nproc: int, sees_its_own: bool) -> list[str]:
    """Return why a run on the CPU leaves GPUs idle, and the fix; an empty list without GPUs.

    `config` has the backend that the user chose.
    """
    backend, gpus = config.backend, hardware.num_gpus
    per_rank = mode_needs(config.parallelism).devices_per_rank
    meant = "or write backend.device=cpu if you meant this"
    if hardware.unusable:
        return [f"the run computes on the CPU: {hardware.unusable}, {meant}"]
    if gpus == 0:
        return []
    obstacle = _obstacle(config, hardware)
    if backend.device == "cpu":
        reason = "as it did before it was resumed; add backend=auto to use them"
    elif obstacle is not None:
        reason = f"{obstacle} to use them"
    else:
        most = gpus // per_rank * config.launch.nnodes
        fix = f"write world_size={most}" if most else "choose a model with one stage"
        if sees_its_own:
            fix = f"write backend.device={hardware.kind} if each rank has its own GPU,"
        reason = f"since its {nproc} ranks need {nproc * per_rank}; {fix} to use them"
    noun = "GPU is" if gpus == 1 else "GPUs are"
    return [f"{gpus} {noun} visible and the run computes on the CPU, {reason}, {meant}"]
