"""The commands of the pages about launching are ones that the runner accepts.

tests/cluster/ runs the batch script, the mpirun commands and those for several machines as they
stand, with smaller trainings.
"""

import re
from collections.abc import Iterator

from configs import resolved
from pages import blocks

from ddp_runner.config.schema import Config
from ddp_runner.dist_env import DistEnv
from ddp_runner.host.hardware import Hardware

BIG = Hardware(num_gpus=8, num_cores=64)
RANKS = {  # by what starts them
    "srun": DistEnv(0, 0, 16, 8, launcher="srun"),
    "mpirun": DistEnv(0, 0, 2, 1, launcher="mpirun"),
    "torchrun --standalone": DistEnv(0, 0, 4, 4, launcher="torchrun"),
    "torchrun --nnodes": DistEnv(0, 0, 16, 8, launcher="torchrun"),
}
COUNTS = {"docs/clusters.md": 7, "docs/launching.md": 11}


def commands() -> Iterator[tuple[str, str, str]]:
    """Yield each command with its page: what starts it, and its arguments."""
    for page in COUNTS:
        text = "".join(block.text for block in blocks(page) if block.language == "bash")
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("torchx"):
                continue
            if found := re.search(r"^(.*)-m ddp_runner(?![.])([^&'\"#]*)", line):
                yield page, found[1], found[2]


def test_the_pages_show_enough_commands() -> None:
    """A command that is no longer found would make the test below pass for nothing."""
    pages = [page for page, _, _ in commands()]
    assert {page: pages.count(page) for page in COUNTS} == COUNTS


def test_each_command_composes() -> None:
    """Under the ranks that the command starts, or as our own launcher's."""
    rejected = []
    for page, before, arguments in commands():
        try:
            assert isinstance(_composed(before, arguments), Config)
        except Exception as error:
            rejected.append(f"{page}: {before}-m ddp_runner{arguments}: {error!r}")
    assert not rejected


def _composed(before: str, arguments: str) -> Config:
    values = {"$SLURM_ARRAY_TASK_ID": "3", "$first:$port": "n1:29400"}
    words = re.sub(r"[$][\w$:]+", lambda found: values[found[0]], arguments).split()
    # The last job of a sweep.
    words = [re.sub("=.*,", "=", word) for word in words if word != "-m"]
    assert all("=" in word for word in words)
    words = [word for word in words if not word.startswith("resume=outputs/")]  # there is no run
    launched = [env for start, env in RANKS.items() if start in before]
    env = launched[0] if launched and "launch.nnodes" not in arguments else None
    return resolved(*words, hardware=BIG, env=env)[0]
