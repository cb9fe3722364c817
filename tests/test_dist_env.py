"""Each launcher's variables say which rank a process is, and where its ranks meet."""

import sys
from pathlib import Path

import pytest
from commands import TORCHRUN, WATCH_TORCH, run_command
from run_folders import rank_log

from ddp_runner.dist_env import (
    DistEnv,
    continues,
    dist_env,
    launch_id,
    mistake_is_noted,
    note_mistake,
    prints_errors,
    starts_our_launchers,
    validate_rendezvous,
)
from ddp_runner.errors import UserError

BATCH_STEP = str(0xFFFFFFFB)
SLURM = {
    **{"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"},
    **{"SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"},
    **{"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1"},
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# The samples of rank 1 alone are wrong.
ODD = """
import os
from dataclasses import dataclass
from ddp_runner.data.sources.offline import RandomRegression
from ddp_runner.errors import UserError

@dataclass(frozen=True)
class Odd(RandomRegression):
    def build(self, *args, **keys):
        if os.environ["RANK"] == "1":
            raise UserError("the shard of rank 1 is empty; fill it")
        return super().build(*args, **keys)
"""


def read(environ: dict[str, str]) -> DistEnv:
    """Return the facts of a process that is a worker."""
    env = dist_env(environ)
    assert env is not None
    return env


def test_a_srun_step_says_who_a_rank_is_and_where_all_meet() -> None:
    """Tasks per machine, address and port come from Slurm's own facts."""
    env = read(SLURM)
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (3, 1, 4, 2)
    assert (env.node_rank, env.num_nodes, env.launcher) == (1, 2, "srun")
    assert env.init_method is not None
    assert env.init_method.startswith("tcp://gpu07:")
    others = [read({**SLURM, "SLURM_PROCID": str(rank)}).init_method for rank in range(4)]
    assert others == [env.init_method] * 4
    assert read({**SLURM, "SLURM_STEP_ID": "1"}).init_method != env.init_method
    assert read({**SLURM, "MASTER_ADDR": "h", "MASTER_PORT": "1"}).init_method == "env://"
    one_machine = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "n1"}
    assert str(read(one_machine).init_method).startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[1-3,7],m2", "n1"), ("a-b,c", "a-b"), ("r[2-3]n[04,06]", "r2n04")],
)
def test_the_first_machine_of_slurms_list_is_where_ranks_meet(nodes: str, first: str) -> None:
    """Lists are as Slurm shortens them."""
    assert f"tcp://{first}:" in str(read({**SLURM, "SLURM_STEP_NODELIST": nodes}).init_method)


def test_a_job_that_is_queued_again_goes_on_with_its_own_runs() -> None:
    """Whatever its steps and launchers are, and once for each of its commands."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "h"}
    for launcher in (SLURM, {**torchrun, **SLURM}, {**SLURM, **OPEN_MPI}):
        first = launch_id(launcher)
        again = launch_id({**launcher, "SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "5"})
        assert first is not None
        assert again is not None
        assert not continues(first, [])
        assert not continues(first, [first])  # another command of the same start
        assert continues(again, ["agent here 1", first])
        assert not continues(again, [first, again])  # an equal command has taken it
        other = launch_id({**SLURM, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
        assert other is not None
        assert not continues(other, [first])
    assert launch_id({}) is None
    assert continues("agent here 1", ["agent here 1"])


def test_a_batch_scripts_own_launcher_knows_its_job() -> None:
    """The script has no rank but a job: our launcher starts the ranks there."""
    batch = {**SLURM, "SLURM_STEP_ID": BATCH_STEP}
    assert dist_env(batch) is None
    assert launch_id(batch) == launch_id(SLURM)


def test_one_task_a_machine_can_be_our_launcher() -> None:
    """It is our launcher if the command asks for several machines."""
    one = read({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2"})
    assert [starts_our_launchers(one, nnodes=number) for number in (1, 2)] == [False, True]
    assert not starts_our_launchers(read(SLURM), nnodes=2)


@pytest.mark.parametrize(
    ("changed", "prints"),
    [
        ({}, False),
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_PROCID": "0"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, False),
        ({"SLURM_PROCID": "first"}, True),
        ({"SLURM_STEP_ID": BATCH_STEP}, True),
    ],
)
def test_one_rank_of_a_machine_prints_an_error(changed: dict[str, str], prints: bool) -> None:
    """If the variables themselves are wrong, one rank of all prints."""
    assert prints_errors({**SLURM, **changed}) == prints


def test_a_retry_of_torchx_keeps_the_name_of_its_job() -> None:
    """The name is of the ranks that TorchX's own torchrun started, not of all that a job starts."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "toy-x1", "MASTER_ADDR": "h"}
    job = {**torchrun, "TORCHX_JOB_ID": "kubernetes://torchx/toy-x1"}
    assert launch_id(job) == "torchx kubernetes://torchx/toy-x1"
    assert launch_id({**job, **SLURM}) == launch_id(job)  # a requeue's step may differ
    assert launch_id({**job, "TORCHELASTIC_RUN_ID": "by-hand"}) is None
    assert launch_id(torchrun) is None


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_STEP_ID": BATCH_STEP}, {"SLURM_STEP_ID": ""}, {"SLURM_STEP_NUM_TASKS": "1"}],
    ids=["batch script", "no step", "one task"],
)
def test_only_a_step_of_several_tasks_makes_workers(changed: dict[str, str]) -> None:
    """In a batch script our own launcher starts the ranks, whatever tasks the job has."""
    assert dist_env({**SLURM, "SLURM_NTASKS": "4", **changed}) is None


def test_machines_with_different_numbers_of_tasks_are_rejected() -> None:
    """The sentence says what srun did, and its option that mends it."""
    uneven = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_TASKS": "3"}
    with pytest.raises(UserError, match=r"started 2, 1 tasks.*--ntasks-per-node=N"):
        dist_env(uneven)


@pytest.mark.parametrize("key", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_a_variable_that_is_not_a_number_is_named(key: str) -> None:
    """Torch would raise a bare ValueError for the port."""
    facts = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(UserError, match=rf"^{key} \(abc\) must be a whole number.*; unset RANK"):
        dist_env({**facts, "MASTER_PORT": "29500", key: "abc"})


def test_open_mpis_node_rank_is_no_number_of_a_machine() -> None:
    """It counts ranks within a machine; the machine follows from the ranks before it."""
    env = read(OPEN_MPI)
    assert (env.rank, env.local_rank, env.node_rank, env.num_nodes) == (5, 1, 1, 2)
    assert env.init_method is None
    alone = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "x.1"}
    assert str(read(alone).init_method).startswith("tcp://127.0.0.1:")


def test_mpich_and_intel_mpi_start_workers() -> None:
    """Their variables are PMI's; a single process of theirs is no worker."""
    env = read(MPICH)
    assert (env.rank, env.local_rank, env.node_rank, env.launcher) == (3, 1, 1, "mpirun")
    assert dist_env({**MPICH, "PMI_SIZE": "1"}) is None
    assert read({**SLURM, **MPICH}).launcher == "mpirun"  # srun has started its helpers


def test_ranks_that_know_no_address_are_reported_by_their_launchers_name() -> None:
    """The way out is the launcher's; MPI's own backend needs no address."""
    env = read(OPEN_MPI)
    with pytest.raises(
        UserError, match=r"^mpirun started 8 ranks.*-x NAME=VALUE, MPICH: -genv NAME VALUE"
    ):
        validate_rendezvous(env, init_method=None, backend="gloo")
    validate_rendezvous(env, init_method=None, backend="mpi")
    validate_rendezvous(env, init_method="tcp://h:1", backend="gloo")
    by_hand = read({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(UserError, match=r"^RANK and WORLD_SIZE describe 2 ranks"):
        validate_rendezvous(by_hand, init_method=None, backend="gloo")


def rank_of(folder: Path, rank: int, attempt: int = 0) -> dict[str, str]:
    """Return the variables that an agent gives a rank."""
    file = folder / f"attempt_{attempt}" / str(rank) / "error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    facts |= {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": attempt}
    return {key: str(value) for key, value in facts.items()} | {
        "TORCHELASTIC_ERROR_FILE": str(file)
    }


def test_the_first_rank_that_notes_a_mistake_prints_it(tmp_path: Path) -> None:
    """Any rank may be first; another agent has its own folder."""
    first, second = rank_of(tmp_path / "one", 1), rank_of(tmp_path / "one", 0)
    again, other = rank_of(tmp_path / "one", 0, attempt=1), rank_of(tmp_path / "other", 0)
    assert not mistake_is_noted(first)
    assert [note_mistake(one) for one in (first, second, again)] == [True, False, False]
    assert [mistake_is_noted(one) for one in (first, again, other)] == [True, True, False]


def test_without_an_agents_folder_the_first_rank_of_a_machine_prints(tmp_path: Path) -> None:
    """Under srun there is no such folder, nor if torchrun keeps no logs."""
    for file in ("", str(tmp_path / "error.json")):
        zero, one = (rank_of(tmp_path, rank) | {"TORCHELASTIC_ERROR_FILE": file} for rank in (0, 1))
        assert [note_mistake(env) for env in (zero, one, zero)] == [True, False, True]
        assert not mistake_is_noted(zero)


def test_the_next_attempt_ends_before_torch_is_imported(tmp_path: Path) -> None:
    """It ends in silence, because the line has been printed."""
    here = tmp_path / "here"
    ends = [
        run_command("train.epochs=-3", folder=here, environ=rank_of(tmp_path, rank))
        for rank in (0, 1)
    ]
    assert [end.exit_code for end in ends] == [2, 2]
    assert [end.stderr for end in ends] == ["error: train.epochs (-3) must be greater than 0\n", ""]
    watched = (sys.executable, "-c", WATCH_TORCH)
    again = rank_of(tmp_path, 0, attempt=1)
    end = run_command("train.epochs=-3", folder=here, program=watched, environ=again)
    assert (end.exit_code, end.stdout, end.stderr) == (2, "False\n", "")


ON_ONE_RANK = (
    *("dataset._target_=odd.Odd", "dataset.num_samples=8", "dataset.eval_samples=8"),
    *("dataset.input_size=10", "dataset.target_size=5", "dataset.seed=0"),
)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(ON_ONE_RANK, id="one"),
        # Before torch a mistake is found as above, with the variables that torchrun sets.
        pytest.param(("train.epochs=-3",), id="all", marks=pytest.mark.slow),
    ],
)
def test_torchrun_prints_a_mistake_once(keys: tuple[str, ...], tmp_path: Path) -> None:
    """Every rank finds it before torch, or only rank 1, whose output goes to its log."""
    (tmp_path / "odd.py").write_text(ODD)
    end = run_command(
        *("-m", "ddp_runner", "model=toy", "allowed_targets=[odd]", *keys),
        folder=tmp_path,
        program=(*TORCHRUN, "--max-restarts=3"),
        environ={"PYTHONPATH": str(tmp_path)},
    )
    assert end.exit_code == 1
    lines = [line for line in end.stderr.splitlines() if line.startswith("error: ")]
    expected = "train.epochs (-3) must be greater than 0"
    if "odd" in keys[0]:
        expected = "the shard of rank 1 is empty; fill it"
        assert rank_log(end.run_dir, 1).count("resumed") == 0
    assert lines == [f"error: {expected}"]
