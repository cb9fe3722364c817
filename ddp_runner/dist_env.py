"""This process's rank, world size and so on, from the launcher's variables. Torch-free.

Only this module reads RANK, WORLD_SIZE and the like of torchrun, Slurm, Open MPI and MPICH. They
also say which of a machine's ranks prints a mistake that all of them meet.
"""

import os
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ddp_runner.errors import UserError

# Slurm numbers batch scripts and interactive shells from here on; smaller numbers are srun steps.
# https://github.com/SchedMD/slurm/blob/master/slurm/slurm.h.in (SLURM_MAX_NORMAL_STEP_ID)
FIRST_SPECIAL_STEP = 0xFFFFFFF0
FIRST_PORT, NUM_PORTS = 20_000, 10_000  # below the ports that the kernel gives to clients
FROM_ENVIRONMENT = "env://"
# Variables for rank, local rank, world size and local world size. Open MPI's NODE_RANK does not
# number nodes: it counts ranks within a machine.
OPEN_MPI = [f"OMPI_COMM_WORLD_{fact}" for fact in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")]
MPICH = ["PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"]
RANKS = ("RANK", OPEN_MPI[0], "SLURM_PROCID", MPICH[0])
START = " start "  # separates a job's name from the number of its earlier starts


@dataclass(frozen=True)
class DistEnv:
    """Which of all ranks this process is, in torchrun's words."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int = 0
    restart_count: int = 0
    # environment: variables set by hand
    launcher: Literal["torchrun", "srun", "mpirun", "environment"] = "environment"
    init_method: str | None = FROM_ENVIRONMENT  # where the ranks meet; None: unknown

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes the files that all ranks share."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """The number of machines; each has the same number of ranks."""
        return self.world_size // self.local_world_size


def dist_env(environ: Mapping[str, str] = os.environ) -> DistEnv | None:
    """Return which rank this process is; None if no launcher started it as a rank.

    Raises:
        UserError: a variable is missing or not a number, or the machines run different numbers of
            ranks.
    """
    for read in (_from_variables, _from_mpi, _from_slurm):
        if (env := read(environ)) is not None:
            _integer(environ, "MASTER_PORT", "0")  # torch would raise a bare ValueError
            return replace(env, init_method=FROM_ENVIRONMENT) if environ.get("MASTER_ADDR") else env
    return None


def launch_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the scheduler's job and its number of earlier starts; None without a scheduler.

    A requeued Slurm job keeps its number, and each task of a job array has its own. The number of a
    step cannot identify a run: a restarted script may skip steps that are done. A retry of TorchX
    keeps the name of its job; a torchrun started by hand within the job does not have it.
    """
    job = environ.get("TORCHX_JOB_ID", "")
    if job.rpartition("/")[2] == environ.get("TORCHELASTIC_RUN_ID"):
        return f"torchx {job}"
    if "SLURM_JOB_ID" not in environ:
        return None
    job = f"slurm {environ.get('SLURM_CLUSTER_NAME', '-')} {environ['SLURM_JOB_ID']}"
    return f"{job}{START}{_integer(environ, 'SLURM_RESTART_COUNT', '0')}"


def continues(launch: str, earlier: Collection[str]) -> bool:
    """Return whether a launch continues a run that the earlier launches worked on.

    A job may contain several equal commands: each continues a run of an earlier start that no other
    command of this start has taken.
    """
    job, _, start = launch.rpartition(START)
    if not job:
        return launch in earlier
    starts = [
        name.removeprefix(f"{job}{START}") for name in earlier if name.startswith(f"{job}{START}")
    ]
    return bool(starts) and max(map(int, starts)) < int(start)


def starts_our_launchers(env: DistEnv, *, nnodes: int) -> bool:
    """Return whether srun started one launcher per machine, each of which starts the ranks there.

    If srun starts the ranks itself, `nnodes` (launch.nnodes) is 1.
    """
    return env.launcher == "srun" and env.local_world_size == 1 and nnodes > 1


def prints_errors(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process prints an error that the machine's other ranks also meet."""
    try:
        env = dist_env(environ)
    except UserError:  # the variables are wrong, on all ranks of all machines
        rank = next((environ[name] for name in RANKS if name in environ), "")
        return not rank.isdigit() or int(rank) == 0
    return env is None or env.local_rank == 0


def validate_rendezvous(env: DistEnv, *, init_method: str | None, backend: str) -> None:
    """Reject ranks if nothing says where they meet; backend=mpi needs no address."""
    if env.init_method is not None or init_method is not None or backend == "mpi":
        return
    hints = {
        "mpirun": " for every rank (Open MPI: -x NAME=VALUE, MPICH: -genv NAME VALUE)",
        "srun": " before srun",
    }
    who = f"{env.launcher} started" if env.launcher in hints else "RANK and WORLD_SIZE describe"
    raise UserError(
        f"{who} {env.world_size} ranks and nothing says where they meet",
        "set MASTER_ADDR and "
        f"MASTER_PORT{hints.get(env.launcher, '')}, or give launch.init_method=tcp://HOST:PORT",
    )


def _from_variables(environ: Mapping[str, str]) -> DistEnv | None:
    """Read torchrun's variables, which may also be set by hand."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    world_size = _integer(environ, "WORLD_SIZE")
    return DistEnv(
        rank=_integer(environ, "RANK"),
        local_rank=_integer(environ, "LOCAL_RANK", environ["RANK"]),
        world_size=world_size,
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", str(world_size)),
        node_rank=_integer(environ, "GROUP_RANK", "0"),
        restart_count=_integer(environ, "TORCHELASTIC_RESTART_COUNT", "0"),
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
        init_method=None,
    )


def _from_mpi(environ: Mapping[str, str]) -> DistEnv | None:
    """Read the variables of mpirun: Open MPI's, or those of MPICH and Intel MPI.

    A single process of MPICH is no worker group. Slurm's PMI has no MPI_LOCALRANKID.
    """
    names = OPEN_MPI if OPEN_MPI[0] in environ else MPICH
    if names is MPICH and not {*names[:2]} <= environ.keys():
        return None
    rank, local_rank, world_size, local_world_size = (_integer(environ, name) for name in names)
    if names is MPICH and world_size == 1:
        return None
    namespace = environ.get("PMIX_NAMESPACE") if world_size == local_world_size else None
    return DistEnv(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
        launcher="mpirun",
        init_method=f"tcp://127.0.0.1:{_port(namespace)}" if namespace else None,
    )


def _from_slurm(environ: Mapping[str, str]) -> DistEnv | None:
    """Read the variables of an srun step; None elsewhere, where our own launcher starts the ranks.

    A batch script and a shell of salloc have most of the variables but no step; a step of a single
    task is not a worker group.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    is_step = step.isdigit() and int(step) < FIRST_SPECIAL_STEP
    if not is_step or not {"SLURM_JOB_ID", "SLURM_PROCID"} <= environ.keys():
        return None
    world_size = _integer(environ, "SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if world_size == 1:
        return None
    tasks = _tasks_per_node(environ, world_size)
    if len(set(tasks)) > 1:
        raise UserError(
            f"srun started {', '.join(map(str, tasks))} tasks on its {len(tasks)} machines and "
            "each must run the same number",
            "give srun --ntasks-per-node=N",
        )
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    host = "127.0.0.1" if len(tasks) == 1 else _first_host(nodes)
    port = _port(f"slurm {environ['SLURM_JOB_ID']}.{step}")
    return DistEnv(
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=tasks[0],
        node_rank=_integer(environ, "SLURM_NODEID", "0"),
        launcher="srun",
        init_method=f"tcp://{host}:{port}" if host else None,
    )


def _tasks_per_node(environ: Mapping[str, str], world_size: int) -> list[int]:
    """Return the number of tasks on each machine: Slurm writes 2(x3),1 for 2, 2, 2, 1."""
    written = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not written:
        num_nodes = _integer(environ, "SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1"))
        fewest, rest = divmod(world_size, num_nodes)
        return [fewest + (node < rest) for node in range(num_nodes)]
    if not (parts := re.findall(r"(\d+)(?:\(x(\d+)\))?", written)):
        raise UserError(f"SLURM_STEP_TASKS_PER_NODE ({written}) is not as Slurm writes it")
    return [int(tasks) for tasks, num in parts for _ in range(int(num or 1))]


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: n01 of n[01-03,07],gpu5."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # at a comma that no brackets surround
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _port(name: str) -> int:
    """Return the port of a launch: equal on all its ranks, rarely equal to another launch's."""
    return FIRST_PORT + zlib.crc32(name.encode()) % NUM_PORTS


def _integer(environ: Mapping[str, str], key: str, default: str | None = None) -> int:
    value = environ.get(key, default)
    if value is None or not value.strip().isdecimal():
        raise UserError(
            f"{key} ({value}) must be a whole number in a launcher's rank",
            "unset RANK and WORLD_SIZE to let the runner start its own ranks",
        )
    return int(value)


def mistake_is_noted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a mistake ended an earlier attempt of this torchrun: do not repeat it."""
    note = _note(environ)
    return note is not None and note.exists()


def note_mistake(environ: Mapping[str, str] = os.environ) -> bool:
    """Note a mistake for other ranks and later attempts; return whether this rank prints it.

    All attempts of a torchrun share a folder, which it removes at its end. The first rank that
    creates the file ``mistake`` there prints.
    """
    if (note := _note(environ)) is None:
        return prints_errors(environ)
    try:
        note.touch(exist_ok=False)
    except FileExistsError:  # another rank was first
        return False
    return True


def _note(environ: Mapping[str, str]) -> Path | None:
    """Return FOLDER/mistake if a rank's file is FOLDER/attempt_N/RANK/error.json."""
    attempt = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return attempt.with_name("mistake") if re.fullmatch(r"attempt_\d+", attempt.name) else None
