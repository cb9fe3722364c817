"""The entry: ``python -m ddp_runner``, alone or in each worker of torchrun, srun or mpirun.

Composes the config with Hydra and validates it, without importing torch; then hands it to
``launch``, which starts workers, or, where this process is a worker already, to ``worker``.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from ddp_runner.cli.hydra_errors import user_error
from ddp_runner.cli.known_keys import in_one_piece, validate_options
from ddp_runner.cli.preflight import validate_files
from ddp_runner.cli.resolvers import CONFIG_DIR, Folders, forbid_chdir, register, written
from ddp_runner.cli.resume import resumed_command, with_resumed
from ddp_runner.config.load import chosen_keys, to_config
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import work_hash
from ddp_runner.config.secrets import find_secrets
from ddp_runner.dist_env import dist_env, validate_rendezvous
from ddp_runner.errors import UserError
from ddp_runner.host.hardware import Hardware, detect
from ddp_runner.host.signals import answered
from ddp_runner.host.streams import keep_streams
from ddp_runner.job import EXIT_COMPLETED, EXIT_USER_ERROR, Job
from ddp_runner.launch.execute import execute, print_error, print_failure
from ddp_runner.launch.fork_server import start_fork_server
from ddp_runner.launch.launcher import launch
from ddp_runner.sweep.ledger import LEDGER
from ddp_runner.sweep.multirun import Multirun
from ddp_runner.tracking.claims import AUTO
from ddp_runner.tracking.launch_marks import is_same_work
from ddp_runner.tracking.run_dir import discard_unused, ensure_writable, locked, resume_argument
from ddp_runner.tracking.run_record import RUN_RECORD, git_revision, versions


def main() -> None:
    """Run the command line; exit with one of the codes that the README lists."""
    started_at = time.time()
    lost: list[str] = []
    keep_streams(lost.append)
    for signum in answered():
        signal.signal(signum, _leave)  # before any worker: there is nothing to save
    wants_traceback = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises; what the user reads is written here
    try:
        sys.exit(Command(started_at, lost).run())
    except Exception as error:
        if "COMP_LINE" in os.environ:  # the shell completes a line
            sys.exit(EXIT_USER_ERROR)  # a message would land inside the line that is being typed
        explained = user_error(error)
        if explained is None or wants_traceback:
            raise
        print_error(str(explained))
        sys.exit(EXIT_USER_ERROR)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


def _validate_one_folder(run_dir: Path, resume: str | None) -> None:
    if resume not in (None, AUTO) and Path(resume).resolve() != run_dir.resolve():
        raise UserError(
            f"hydra.run.dir ({run_dir}) and resume ({resume}) name two folders; leave "
            "hydra.run.dir out: a run goes on in its own"
        )


class Command:
    """One command line: a run, a sweep of runs, or one rank's part of a run."""

    def __init__(self, started_at: float, lost: Sequence[str]) -> None:
        self._started_at, self._lost = started_at, lost  # what is wrong with stdout and stderr
        self._env = dist_env()
        self._exit_code = EXIT_COMPLETED
        self._refused: UserError | None = None
        self._multirun = Multirun(self._plan)
        self._folders = Folders()
        self._implied: list[str] = []

    def run(self) -> int:
        """Let Hydra compose and call back; return the exit code."""
        arguments = ["verbose=true" if one == "-v" else one for one in sys.argv[1:]]
        validate_options(arguments)
        arguments, self._implied = resumed_command(in_one_piece(arguments), conf=CONFIG_DIR)
        self._folders = register(self._env, implied=self._implied)

        def run_job(raw: DictConfig) -> None:
            self._run_job(raw)

        vars(run_job)["run_batch"] = self._run_batch  # for our Hydra launcher
        entry = hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")
        given, sys.argv[1:] = sys.argv[1:], arguments
        try:
            with self._multirun:
                entry(run_job)()
            if self._refused is not None:
                raise self._refused
        finally:
            sys.argv[1:] = given
            for path in filter(None, (self._folders.run, self._folders.sweep)):
                if not any(path.rglob(RUN_RECORD)) and not (path / LEDGER).exists():
                    # Refused, or only shown (--cfg), before anything ran in it.
                    shutil.rmtree(path, ignore_errors=True)
                    with suppress(OSError):
                        path.parent.rmdir()
        self._multirun.report()
        return max(self._exit_code, self._multirun.exit_code)

    def _run_job(self, raw: DictConfig) -> None:
        """Run the one composed config of a command that is no sweep."""
        node = HydraConfig.get()
        run_dir = None if self._folders.is_left_to_ranks else Path(node.runtime.output_dir)
        try:
            forbid_chdir(node)
            job = self._plan(raw, run_dir, node, detect())
            if self._env is not None or raw.launch.nnodes > 1:
                self._run_elsewhere(job)
                return
            assert run_dir is not None
            _validate_one_folder(run_dir, job.config.resume)
            ensure_writable(run_dir)
            with locked(run_dir):
                self._exit_code = execute(self._gone_on_with(job, raw, node)).exit_code
        except UserError as error:
            self._refused = error  # raised here, Hydra would print a line of its own
            if run_dir is not None:
                discard_unused(run_dir)  # Hydra may have made it just now

    def _run_elsewhere(self, job: Job) -> None:
        """Run a job whose folder rank 0 claims, since this process may not be on its machine."""
        if self._env is None:
            self._exit_code = print_failure(launch(job)).exit_code
            return
        from ddp_runner.worker import run_under_launcher

        validate_rendezvous(
            self._env,
            init_method=job.config.launch.init_method,
            backend=job.config.backend.name,
        )
        run_under_launcher(job, self._env)

    def _gone_on_with(self, job: Job, raw: DictConfig, node: HydraConf) -> Job:
        """Return the job as it goes on with the run that its folder holds, if it holds one.

        Raises:
            UserError: the folder holds a run that this command does not go on with.
        """
        run_dir = job.run_dir
        assert run_dir is not None
        if job.config.resume == AUTO and is_same_work(run_dir, work=work_hash(job.config)):
            with open_dict(raw):
                raw.resume = str(run_dir)
            return self._plan(raw, run_dir, node, detect())
        if job.config.resume in (None, AUTO) and (run_dir / RUN_RECORD).exists():
            raise UserError(
                f"{run_dir} already holds a run; give another folder, or {resume_argument(run_dir)}"
            )
        return job

    def _run_batch(
        self, composed: Sequence[DictConfig], *, searches: bool
    ) -> list[float | str | None]:
        """Run a batch of jobs of a command that is a sweep."""
        if self._env is not None:
            raise UserError("-m starts its own workers; run a sweep without torchrun or srun")
        return self._multirun.run_batch(composed, searches=searches)

    def _plan(
        self, raw: DictConfig, run_dir: Path | None, node: HydraConf, hardware: Hardware
    ) -> Job:
        """Resolve a composed config; `node` is what Hydra says of it."""
        overrides = tuple(written(node.overrides.task, self._implied))
        raw = with_resumed(raw, overrides, is_launched=self._env is not None)
        secrets = find_secrets(raw)
        with secrets.hidden_in_errors():
            config, warnings = resolve(
                to_config(raw), hardware=hardware, chosen=chosen_keys(overrides), env=self._env
            )
            validate_files(config, env=self._env)
        if self._env is None and config.sweep.parallel_jobs == 1:
            start_fork_server()  # as early as can be: it imports torch while we go on
        return Job(
            config=config,
            started_at=self._started_at,
            code=self._code,
            run_dir=run_dir,
            overrides=overrides,
            secrets=secrets,
            choices={
                str(group): str(option)
                for group, option in node.runtime.choices.items()
                if option is not None and "/" not in str(group)
            },
            warnings=(*self._lost, *map(secrets.hide, warnings)),
        )

    @cached_property
    def _code(self) -> dict[str, Any]:
        return {"git_revision": git_revision(), "versions": versions()}
