"""Jobs of a real Slurm on two hosts: which rank is where, and which run a requeued job takes up."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slow_models
from clusters import needs
from commands import run_command, wait_for
from pages import blocks
from run_folders import last_step, metrics, rank_log, record, run_dirs
from slow_models import SlowModels
from slurm_cluster import PROGRAMS, Slurm, slurm
from trainings import assert_same_run

pytestmark = needs(*PROGRAMS)
RUNNER = "python -m ddp_runner"
# 300 steps: half a minute, or some seconds once the test lets it go.
TRAINING = (
    *slow_models.TOY,
    "dataset.num_samples=480",
    "batch.global_size=8",
    "train.epochs=5",
    "checkpoint.every_steps=20",
    "train.log_every_steps=1",
    "backend.timeout_s=120",
)
# What Slurm would send before a time limit, for a script with --signal=B:USR1@300.
TIME_IS_NEARLY_UP = ("scancel", "--batch", "--signal=USR1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Slurm on two hosts, for all tests here."""
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def slow(tmp_path: Path) -> SlowModels:
    """Return the module with the slow model."""
    return slow_models.slow_models(tmp_path / "models")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of TRAINING on one machine, which nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    models = slow_models.slow_models(folder / "models")
    models.release()
    command = (*TRAINING, "world_size=2", "train.num_threads=1")
    end = run_command(*command, folder=folder / "run", environ=models.environ)
    assert end.exit_code == 0, end.stderr
    return end.run_dir


def variables(slow: SlowModels) -> dict[str, str]:
    """Return what a job needs: its `python` is this one."""
    return {**slow.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def srun(cluster: Slurm, folder: Path, *words: str) -> tuple[int, str, str]:
    """Run a step on the cluster to its end."""
    program = (*cluster.login.program, "srun")
    end = run_command(*words, folder=folder, program=program, environ=cluster.environ)
    return end.exit_code, end.stdout, end.stderr


def is_training(folder: Path, *, runs: int = 1, step: int = 3) -> bool:
    """Return whether so many runs below a folder have reached a step."""
    found = run_dirs(folder)
    return len(found) == runs and all(last_step(run) >= step for run in found)


def test_srun_alone_starts_a_rank_per_task(cluster: Slurm, tmp_path: Path) -> None:
    """Four ranks on two machines, of which the first keeps the only run folder."""
    exit_code, stdout, stderr = srun(
        cluster,
        tmp_path,
        *("--nodes=2", "--ntasks-per-node=2", sys.executable, "-m", "ddp_runner"),
        *("model=toy", "train.max_steps=1"),
    )
    assert exit_code == 0, stderr
    (run_dir,) = run_dirs(tmp_path)
    facts = record(run_dir)
    assert facts["status"] == "completed"
    assert (facts["host"], facts["num_nodes"], facts["world_size"]) == ("n1", 2, 4)
    assert facts["num_threads"] == 1  # each is bound to one core
    assert re.findall(r"\d+ ranks on \d+ nodes \([^)]*\)", stdout) == [
        "4 ranks on 2 nodes (1 CPU thread each)"
    ]
    assert len(re.findall("^run ", stdout, re.MULTILINE)) == 1
    assert all("rank" in rank_log(run_dir, rank) for rank in range(4))


def test_machines_with_different_numbers_of_tasks_are_rejected_in_one_line(
    cluster: Slurm, tmp_path: Path
) -> None:
    """One rank prints it, before torch is imported."""
    exit_code, stdout, stderr = srun(
        cluster, tmp_path, "-N2", "-n3", sys.executable, "-m", "ddp_runner", "model=toy"
    )
    own = [line for line in stderr.splitlines() if not line.startswith("srun: ")]
    assert (exit_code, stdout) == (2, "")
    assert own == [
        "error: srun started 2, 1 tasks on its 2 machines and each must run the same number; "
        "give srun --ntasks-per-node=N"
    ]
    assert not run_dirs(tmp_path)


@pytest.mark.slow
def test_preempted_jobs_of_an_array_go_on_with_their_own_runs_bit_for_bit(
    cluster: Slurm, tmp_path: Path, slow: SlowModels, undisturbed: Path
) -> None:
    """Two equal jobs on the same two machines; one gives way to an urgent job in mid-training."""
    # The tasks may use both cores, but each was given one.
    command = f"srun --cpus-per-task=1 taskset --cpu-list 0,1 {RUNNER} {' '.join(TRAINING)}"
    array = cluster.submit(
        *("--array=0-1", "--nodes=2", "--ntasks=2", "--open-mode=append", "--output=%a.out"),
        *("--wrap", f"echo start $SLURM_RESTART_COUNT; {command}"),
        folder=tmp_path,
        environ=variables(slow),
    )
    jobs = [f"{array}_{task}" for task in range(2)]
    wait_for(lambda: is_training(tmp_path, runs=2))
    urgent = cluster.submit(
        *("--partition=urgent", "--nodes=2", "--ntasks=2", "--wrap", "true"), folder=tmp_path
    )
    cluster.wait(urgent)
    (preempted,) = [job for job in jobs if cluster.fact(job, "Restarts") == "1"]
    cluster.wait(preempted, "PENDING")
    (saved,) = [run for run in run_dirs(tmp_path) if record(run)["status"] == "preempted"]
    cluster.start_again(preempted)
    slow.release()
    assert [cluster.wait(job) for job in jobs] == ["COMPLETED", "COMPLETED"]

    assert len(run_dirs(tmp_path)) == 2
    for run_dir in run_dirs(tmp_path):
        assert_same_run(run_dir, undisturbed, same_steps=False)
        facts, was_preempted = record(run_dir), run_dir == saved
        assert (facts["num_nodes"], facts["num_threads"]) == (2, 1)
        assert len(facts["sessions"]) == 1 + was_preempted
        assert ("resumed from" in rank_log(run_dir)) == was_preempted
    output = (tmp_path / f"{preempted.rpartition('_')[2]}.out").read_text()
    assert "start 1" in output


@pytest.mark.slow
def test_the_script_of_the_documentation_goes_on_after_its_time_limit(
    cluster: Slurm, tmp_path: Path, slow: SlowModels, undisturbed: Path
) -> None:
    """With srun and with our own launcher: two equal runs at once, each in its own folder."""
    (script,) = [block.text for block in blocks("docs/clusters.md") if "\ntrap" in block.text]
    lines = [line for line in script.splitlines() if "#SBATCH --nodes" not in line]
    arguments = " ".join([*TRAINING, "world_size=2", "train.num_threads=1"])
    text = re.sub(rf"{RUNNER} .*?&", f"{RUNNER} {arguments} &", "\n".join(lines))
    text = text.replace("--time=24:00:00", "--time=60").replace("task=8", "task=1")
    (tmp_path / "srun.sh").write_text(text)
    (tmp_path / "own.sh").write_text(text.replace("srun --cpus-per-task=1 ", ""))
    scripts = [("--nodes=2", "--ntasks=2", "srun.sh"), ("--ntasks=1", "own.sh")]
    jobs = [cluster.submit(*words, folder=tmp_path, environ=variables(slow)) for words in scripts]
    wait_for(lambda: is_training(tmp_path, runs=2))
    for job in jobs:
        cluster.run(*TIME_IS_NEARLY_UP, str(job))
    for job in jobs:
        cluster.wait(job, "PENDING")
    runs = {record(run)["num_nodes"]: run for run in run_dirs(tmp_path)}
    saved = {num: metrics(run)[-1]["step"] for num, run in runs.items()}
    assert [record(run)["status"] for run in runs.values()] == ["preempted", "preempted"]
    slow.release()
    for job in jobs:
        cluster.start_again(job)
    assert [cluster.wait(job) for job in jobs] == ["COMPLETED", "COMPLETED"]
    assert set(run_dirs(tmp_path)) == set(runs.values())
    for num_nodes, run_dir in runs.items():
        assert_same_run(run_dir, undisturbed, same_steps=False)
        assert (record(run_dir)["num_nodes"], len(record(run_dir)["sessions"])) == (num_nodes, 2)
        assert f", step {saved[num_nodes]}" in rank_log(run_dir)
    assert sorted(runs) == [1, 2]


@pytest.mark.slow
def test_scancel_saves_and_leaves_no_process(
    cluster: Slurm, tmp_path: Path, slow: SlowModels
) -> None:
    """Two tasks on one machine, which meet on loopback only."""
    job = cluster.submit(
        *("--nodes=1", "--ntasks=2", "--wrap", f"srun {RUNNER} {' '.join(TRAINING)}"),
        folder=tmp_path,
        environ=variables(slow),
    )
    wait_for(lambda: is_training(tmp_path))
    (host,) = [host for host in cluster.network.hosts if host.name == cluster.fact(job, "NodeList")]
    listening = host.run("ss", "-Hltnp")
    assert re.findall(r"(\S+):\d+ .*python", listening)
    assert set(re.findall(r"(\S+):\d+ +\S+ .*python", listening)) == {"127.0.0.1"}
    cluster.run("scancel", str(job))
    assert cluster.wait(job) == "CANCELLED"
    (run_dir,) = run_dirs(tmp_path)
    assert (record(run_dir)["status"], record(run_dir)["num_nodes"]) == ("preempted", 1)
    wait_for(lambda: all(len(host.pids()) == 1 for host in cluster.network.hosts))  # slurmd


@pytest.mark.slow
def test_srun_can_start_our_launcher_on_each_machine(
    cluster: Slurm, tmp_path: Path, slow: SlowModels, undisturbed: Path
) -> None:
    """A killed rank of the second machine is restarted, and the run goes on in its folder."""
    (block,) = [one.text for one in blocks("docs/clusters.md") if "launch.nnodes" in one.text]
    text = block.replace("\\\n", "").replace("--cpus-per-task=64", "--cpus-per-task=1")
    text = text.replace("launch.nproc_per_node=8", "launch.nproc_per_node=1")
    text = text.replace("model=resnet18 batch.global_size=1024", " ".join(TRAINING))
    (tmp_path / "job.sh").write_text(text.replace("--gpus-per-node=8", ""))
    job = cluster.submit("job.sh", folder=tmp_path, environ=variables(slow))
    wait_for(lambda: is_training(tmp_path, step=21))
    (run_dir,) = run_dirs(tmp_path)
    second = cluster.network.hosts[1]
    os.kill(second.process_with(run_dir / "logs" / "rank-1.log"), signal.SIGKILL)
    slow.release()
    assert cluster.wait(job) == "COMPLETED", (tmp_path / f"slurm-{job}.out").read_text()
    facts = record(run_dir)
    assert (facts["num_nodes"], facts["restarts"]) == (2, 1)
    assert_same_run(run_dir, undisturbed, same_steps=False)
    assert run_dirs(tmp_path) == [run_dir]
