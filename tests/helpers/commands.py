"""Real commands in real processes, and what they leave; helpers of the tests, not a test."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from warm import MODULES, WarmCommand

from ddp_runner.cli.compose import register, validate_files
from ddp_runner.cli.hydra_errors import user_error
from ddp_runner.cli.resume import with_resumed
from ddp_runner.config.load import chosen_keys, to_config
from ddp_runner.config.resolve import resolve
from ddp_runner.config.schema import CONFIG_DIR, Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.host.hardware import Hardware

TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2")

TIME_LIMIT_S = 600.0  # far above the usual: a busy machine is no failure
LAPTOP = Hardware(num_gpus=0, num_cores=4)
RUNNER = (sys.executable, "-m", "ddp_runner")
Started = subprocess.Popen[str] | WarmCommand


@dataclass(frozen=True)
class Ended:
    """How a command ended; its runs are those under the folder that it was started in."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def run_dirs(self) -> list[Path]:
        """Every run folder, by name."""
        return run_dirs(self.folder)

    @property
    def run_dir(self) -> Path:
        """The one run folder."""
        (only,) = self.run_dirs
        return only


def run_command(
    *args: str,
    folder: Path,
    program: Sequence[str] = RUNNER,
    environ: Mapping[str, str | None] | None = None,
    **how: Any,
) -> Ended:
    """Run a command in `folder` to its end; see ``background``."""
    with background(*args, folder=folder, program=program, environ=environ, **how) as process:
        return ended(process, folder)


@contextmanager
def background(
    *args: str,
    folder: Path,
    program: Sequence[str] = RUNNER,
    environ: Mapping[str, str | None] | None = None,
    fresh: bool = False,
    twins: int = 1,
    prepare: Callable[[], None] | None = None,
) -> Iterator[Started]:
    """Start a command in a session of its own; at the end of the block nothing of it is left.

    Args:
        args: the command line.
        folder: where it is started; made if need be.
        program: what the command line is given to. Our own are forked from a server that has
            imported everything; see ``warm``.
        environ: variables to add; None removes one.
        fresh: whether it starts in a new interpreter all the same.
        twins: how many interpreters it starts in turn: a sweep with slots has two for each.
        prepare: changes a warm command's process before its first line; see ``warm``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    changed = {**os.environ, **(environ or {})}
    variables = {key: value for key, value in changed.items() if value is not None}
    is_ours = tuple(program[:2]) == RUNNER[:2] and len(program) == 3 and program[2] in MODULES
    process: Started
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        if is_ours and not fresh:
            process = WarmCommand(
                program[2],
                args,
                folder=folder,
                environ=variables,
                twins=twins,
                prepare=prepare,
            )
        else:
            assert prepare is None, "a new interpreter cannot be prepared"
            process = subprocess.Popen(
                [*program, *args],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
    try:
        yield process
    finally:
        for pid in session_pids(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def ended(process: Started, folder: Path) -> Ended:
    """Wait for a command's end; after the time limit, fail with what it has said."""
    try:
        process.wait(TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end in time:\n{(folder / 'stdout').read_text()}") from None
    stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return Ended(process.returncode, stdout, stderr, folder)


def session_pids(launcher_pid: int) -> list[int]:
    """Return the living processes of a command, also those that outlived their parents."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = os.getsid(process.pid) == launcher_pid
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue  # it ended while we looked
    return found


def command_line(process: psutil.Process) -> str:
    """Return a process's command line; none of one that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def fork_server(launcher_pid: int) -> psutil.Process:
    """Return the process that a launcher's workers are forked from."""
    children = psutil.Process(launcher_pid).children()
    (server,) = [one for one in children if "multiprocessing.forkserver" in command_line(one)]
    return server


def gang(launcher_pid: int) -> dict[int, psutil.Process]:
    """Return the workers of a launcher by rank: each holds its own log file open."""
    found = {}
    for worker in fork_server(launcher_pid).children():
        for file in worker.open_files():
            name = Path(file.path).name
            if name.startswith("rank-"):
                found[int(name.removeprefix("rank-").removesuffix(".log"))] = worker
    return found


def wait_for(
    condition: Callable[[], Any], *, timeout_s: float = TIME_LIMIT_S, every_s: float = 0.02
) -> Any:
    """Return the first true value of a condition, asked again and again."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            what = inspect.getsource(condition).strip()
            raise AssertionError(f"not true within {timeout_s} s: {what}")
        time.sleep(every_s)
    return value


def run_dirs(folder: Path) -> list[Path]:
    """Return every run folder under a folder, by name."""
    # Not rglob, which fails over a folder that goes meanwhile, as a checkpoint's first one does.
    return sorted(Path(name) for name, _, files in os.walk(folder) if "run.json" in files)


def record(run_dir: Path) -> dict[str, Any]:
    """Return a run's run.json."""
    fields: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    return fields


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics.jsonl; none while there is no file."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what depends on the clock."""
    return [
        {key: value for key, value in line.items() if key != "time_s" and "perf/" not in key}
        for line in metrics(run_dir)
    ]


def last_step(folder: Path) -> int:
    """Return the last step that the newest run under a folder has logged; 0 before it does."""
    return max((line["step"] for run in run_dirs(folder) for line in metrics(run)), default=0)


def steps(run_dir: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in folders)


def assert_same_state(one: Path, other: Path) -> None:
    """Compare the last checkpoints of two runs, bit for bit."""
    import torch

    newest = f"checkpoints/step-{steps(other)[-1]:08d}/state.pt"
    states = [torch.load(run / newest, weights_only=True) for run in (one, other)]
    assert states[0]["position"] == states[1]["position"]
    for part in ("model", "optimizer"):
        tensors = [dict(tensors_in(state[part])) for state in states]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])


def tensors_in(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the tensors of a nested mapping by their dotted key."""
    if hasattr(tree, "untyped_storage"):
        return [(prefix, tree)]
    items = tree.items() if isinstance(tree, dict) else ()
    return [found for key, value in items for found in tensors_in(value, f"{prefix}.{key}")]


def compose_raw(*overrides: str, folders: Sequence[Path] = ()) -> Any:
    """Return what Hydra composes of a command line, with `folders` as its --config-dir."""
    search = (
        [f"hydra.searchpath=[{','.join(path.as_uri() for path in folders)}]"] if folders else []
    )
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("config", [*overrides, *search])


def resolved(
    *overrides: str,
    hardware: Hardware = LAPTOP,
    env: DistEnv | None = None,
    folders: Sequence[Path] = (),
) -> tuple[Config, list[str]]:
    """Return what a command line resolves to, and its warnings, in this process."""
    register()
    raw = compose_raw(*overrides, folders=folders)
    return resolve(
        to_config(with_resumed(raw, overrides)),
        hardware=hardware,
        chosen=chosen_keys(overrides),
        env=env,
    )


def refusal(*overrides: str, hardware: Hardware = LAPTOP, env: DistEnv | None = None) -> str:
    """Return the one line with which a command line is refused, in this process."""
    try:
        config, _ = resolved(*overrides, hardware=hardware, env=env)
        validate_files(config, env=env)
    except Exception as error:
        explained = user_error(error)
        if explained is None:
            raise
        assert "\n" not in str(explained)
        return str(explained)
    raise AssertionError(f"{overrides} was not refused")


def write_experiment(folder: Path, name: str, *overrides: str) -> None:
    """Write conf/experiment/NAME.yaml of a config folder: a row of a sweep over experiments."""
    groups = [one for one in overrides if (CONFIG_DIR / one.partition("=")[0]).is_dir()]
    defaults = [{f"override /{one.partition('=')[0]}": one.partition("=")[2]} for one in groups]
    keys = OmegaConf.from_dotlist([one for one in overrides if one not in groups])
    text = OmegaConf.to_yaml(OmegaConf.merge({"defaults": defaults}, keys))
    path = folder / "experiment" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{text}")
