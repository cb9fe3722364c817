"""Fills in the values that follow from other values and from the machine. Torch-free."""

from collections.abc import Collection
from dataclasses import replace

import yaml

from ddp_runner.config.rules import validate_config, validate_ranks, validate_steps
from ddp_runner.config.schema import CONFIG_DIR, Config, RunConfig, mode_needs
from ddp_runner.config.sections import AUTO, INFERENCE, SAMPLE
from ddp_runner.config.targets import validate_targets
from ddp_runner.config.validate import validate_values
from ddp_runner.config.world_size import (
    idle_gpus,
    num_local_ranks,
    num_ranks,
    resolve_backend,
    resolve_batch,
)
from ddp_runner.dist_env import DistEnv
from ddp_runner.errors import counted
from ddp_runner.host.hardware import Hardware


def resolve(
    config: Config, *, hardware: Hardware, chosen: Collection[str] = (), env: DistEnv | None = None
) -> tuple[RunConfig, list[str]]:
    """Return the config with every derived value filled in, and warnings to print once.

    Args:
        config: as composed.
        hardware: this machine's.
        chosen: the keys given on the command line; they win over a conflicting key of a YAML.
        env: this rank's facts where the ranks run already (torchrun, srun, mpirun).

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
    ranks = num_ranks(config, hardware, env)
    nproc = env.local_world_size if env else num_local_ranks(config, hardware, ranks)
    # A rank may see only its own GPUs. Unless Slurm says so, that looks like one GPU for all ranks,
    # so the user must ask for it. The ranks then compare their GPUs.
    per_rank = mode_needs(config.parallelism).devices_per_rank
    sees_its_own = env is not None and hardware.num_gpus == per_rank
    backend = resolve_backend(config, hardware, nproc=nproc, sees_its_own=sees_its_own)
    validate_ranks(replace(config, world_size=ranks, backend=backend), env)
    model = {"name": config.model["_target_"].rpartition(".")[2].lower()} | config.model
    batch = resolve_batch(config, ranks, chosen)
    resolved = RunConfig(
        **vars(config) | {"world_size": ranks, "backend": backend, "batch": batch, "model": model}
    )
    validate_steps(resolved)
    warnings = [*notes, *_warnings(resolved, hardware, env, nproc)]
    # A resumed run has the device of its frozen config, even if nobody chose it.
    is_inherited = config.resume is not None and not given - {"backend.name"}
    if backend.device == "cpu" and (config.backend.device != "cpu" or is_inherited):
        idle = idle_gpus(config, hardware, nproc=nproc, sees_its_own=sees_its_own)
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
        single = (CONFIG_DIR / "parallelism" / "single.yaml").read_text(encoding="utf-8")
        config = replace(config, parallelism=yaml.safe_load(single), world_size=1)
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
        warnings.append("parallelism=dp has fewer than two GPUs: it runs as one device")
    return warnings
