"""A real Slurm on the hosts of ``clusters``: a controller, and two nodes n1 and n2.

Every daemon is a child of the test's process with its files in one folder, so several of them run
side by side, also beside a Slurm of the machine.
"""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from clusters import Host, Network, network
from commands import wait_for

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "setpriv")  # for clusters.needs
IDLE = ("sinfo", "-h", "-t", "idle", "-p", "normal", "-o", "%D")  # prints their number
CPUS = 2  # of each node, whatever this machine has
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
# A job of `urgent` preempts those of `normal`, which are queued again. Slurm kills what is left of
# a job KillWait seconds after its SIGTERM: here far more than a checkpoint takes.
CONFIG = """
ClusterName=test
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
ReturnToService=2
SlurmdTimeout=60
KillWait=60
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
NodeName={nodes} CPUs={cpus} RealMemory=8000 State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 OverSubscribe=NO
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=2 OverSubscribe=NO
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster that takes jobs."""

    folder: Path  # of its configuration and its logs
    network: Network

    @property
    def login(self) -> Host:
        """The host to submit jobs from."""
        return self.network.login

    @property
    def environ(self) -> dict[str, str]:
        """The variables that srun, sbatch and the like need; see ``Host.program``."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self, *command: str, folder: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> str:
        """Run a short command on the login host, and return its stdout."""
        variables = {**os.environ, **self.environ, **(environ or {})}
        return self.login.run(*command, cwd=folder, env=variables).strip()

    def submit(self, *words: str, folder: Path, environ: Mapping[str, str] | None = None) -> int:
        """Submit a job with sbatch, whose stdout and stderr go to `folder`/slurm-JOB.out."""
        folder.mkdir(parents=True, exist_ok=True)
        return int(self.run("sbatch", "--parsable", *words, folder=folder, environ=environ))

    def fact(self, job: int | str, name: str) -> str:
        """Return a fact of a job, for example JobState, as `scontrol show job` names it."""
        shown = self.run("scontrol", "show", "--oneliner", "job", str(job))
        found = re.search(rf"(?:^|\s){name}=(\S*)", shown)
        assert found is not None, shown
        return found[1]

    def wait(self, job: int | str, *states: str) -> str:
        """Wait until a job has one of the states, or any in which it has ended; return it."""

        def reached() -> str:
            state = self.fact(job, "JobState")
            return state if state in (states or ENDED) else ""

        state: str = wait_for(reached, every_s=0.1)
        return state

    def start_again(self, job: int | str) -> None:
        """Start a job that is queued again; Slurm itself would wait for two minutes.

        A job that starts in the second of its end takes the credentials that this end has revoked.
        """
        self.wait(job, "PENDING")
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now+2")


@contextmanager
def slurm(folder: Path, *, private: Path | None = None) -> Iterator[Slurm]:
    """Start Slurm on two new hosts; at the end kill its jobs and its daemons.

    Args:
        folder: for its files; created if it does not exist.
        private: see ``clusters.network``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with network(private=private) as net, ExitStack() as stack:
        cluster = Slurm(folder, net)
        nodes = ",".join(host.name for host in net.hosts)
        config = CONFIG.format(folder=folder, nodes=nodes, cpus=CPUS)
        (folder / "slurm.conf").write_text(config)
        for host in net.hosts:
            stack.callback(host.kill)
        stack.enter_context(_daemon(cluster, net.login, "munged", *_munge_options(folder)))
        wait_for((folder / "munge.socket").exists)
        stack.enter_context(_daemon(cluster, net.login, "slurmctld", "-D"))
        for host in net.hosts:
            stack.enter_context(_daemon(cluster, host, "slurmd", "-D"))
        wait_for(lambda: cluster.run(*IDLE) == str(len(net.hosts)), every_s=0.1)
        yield cluster


def _munge_options(folder: Path) -> list[str]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = {"socket": "munge.socket", "key-file": key.name, "pid-file": "munged.pid"}
    files |= {"seed-file": "munge.seed", "log-file": "munged.log"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    return ["--foreground", "--force", *options]  # else it insists on being another user


@contextmanager
def _daemon(cluster: Slurm, host: Host, *command: str) -> Iterator[None]:
    """Keep a daemon running on a host; its output is in a file with both names."""
    log = cluster.folder / f"{command[0]}-{host.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*host.program, "setpriv", "--pdeathsig=KILL", *command],  # end with the tests
            env={**os.environ, **cluster.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
        finally:
            process.kill()
            process.wait()
