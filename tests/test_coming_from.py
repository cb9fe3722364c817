"""The page for people who come from elsewhere: its programs run, and are equal where it says so."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import run_command
from pages import ROOT, blocks, commands
from real_data import write_tiny_mnist
from run_folders import metrics, record
from safetensors.torch import load_file

import ddp_runner
from ddp_runner.config.fields import walk
from ddp_runner.config.schema import CONFIG_DIR, Config

pytestmark = pytest.mark.full

PAGE = "docs/coming_from.md"
EXAMPLES = ROOT / "examples" / "coming_from"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
LEAST_ACCURACY = 0.8
# Two ranks on the CPU, whatever the machine; and threads split sums in other ways, so one each.
ENVIRON = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_the_page_shows_or_links_every_file() -> None:
    """Word for word, below a line with its path; the programs of other libraries by a link."""
    shown = {one.path: one.text for one in blocks(PAGE) if one.path is not None}
    files = [path for path in EXAMPLES.rglob("*.*") if path.suffix in (".py", ".yaml")]
    expected = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in files
        if path.name != "__init__.py"
    }
    assert shown.keys() <= expected.keys()
    for name, text in shown.items():
        assert text == f"# {name}\n{expected[name]}"
    hidden = expected.keys() - shown.keys()
    assert len(hidden) == 4
    assert all(f"](../{name})" in TEXT for name in hidden)


def test_the_keys_of_the_tables_exist() -> None:
    """Each word like train.epochs or resume=RUN names a key, an option, or a name of ours."""
    rows = re.findall(r"^\|[^|]*(\|.*)\|$", TEXT, flags=re.MULTILINE)  # without the first column
    words = re.findall(r"`([^`]+)`", "".join(rows))
    known = {key.name for key in walk(Config())}
    groups = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}
    sections = {"backend", "batch", "checkpoint", "early_stop", "ema", "launch", "params", "train"}
    found = list[str]()
    for word in words:
        for part in shlex.split(word) if "=" in word and "(" not in word else [word]:
            key, sign, option = part.partition("=")
            section, _, name = key.partition(".")
            if re.fullmatch(r"[a-z_]+\.[a-z_]+", key) and section in sections:
                assert key in known, word
            elif sign and key in groups:
                assert (CONFIG_DIR / key / f"{option.strip('[]')}.yaml").is_file(), word
            elif sign and section == key and re.fullmatch(r"[a-z_]+", key) and word[0] != "-":
                assert key in known, word
            elif section == "ddp_runner":
                assert hasattr(ddp_runner, name.partition("(")[0]), word
            else:
                continue
            found.append(part)
    assert len(found) > 30
    assert {"train.epochs", "parallelism=ddp", "ddp_runner.load(RUN)"} <= set(found)


def command_of(program: str) -> list[str]:
    """Return the page's command that starts a program of another library."""
    (line,) = re.findall(rf"^[a-z]\S* .*-m examples\.coming_from\.{program}$", TEXT, re.MULTILINE)
    start, *words = shlex.split(line)
    if start == "python":
        return [sys.executable, *words]
    return [str(Path(sys.executable).with_name(start)), *words]


def run_program(program: str, folder: Path, *options: str) -> str:
    """Run a program of another library by the page's command; return what it prints.

    The `options` go before the module.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    words = command_of(program)
    words[-2:-2] = options
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.findall(r"accuracy ([\d.]+)", done.stdout)[-1]) > LEAST_ACCURACY
    return done.stdout


@pytest.fixture(scope="module")
def own_loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of the page's own loop."""
    (command,) = [one for one in commands(PAGE) if "experiment=own_loop" in one]
    folder = tmp_path_factory.mktemp("own_loop")
    (folder / "examples").symlink_to(ROOT / "examples")
    done = run_command(
        *command, "world_size=2", "train.num_threads=1", folder=folder, environ=ENVIRON
    )
    assert done.exit_code == 0, done.stderr
    return done.run_dir


@pytest.mark.slow
def test_the_own_loop_equals_the_script(own_loop: Path, tmp_path: Path) -> None:
    """The same weights, bit for bit, and the same losses and accuracies on the way."""
    printed = run_program("torchrun_script", tmp_path)
    script = torch.load(tmp_path / "net.pt", weights_only=True)
    assert_same(load_file(own_loop / "model.safetensors"), script)
    lines = [
        f"epoch {line['step']}  loss {line['train/loss']:.4f}  accuracy {line['eval/accuracy']:.4f}"
        for line in metrics(own_loop)
        if "eval/accuracy" in line
    ]
    assert lines == printed.splitlines()
    assert len(lines) == 5


@pytest.mark.slow
def test_lightning_equals_the_own_loop(own_loop: Path, tmp_path: Path) -> None:
    """Where it is installed: uv sync --group benchmarks."""
    require("lightning")
    run_program("with_lightning", tmp_path)
    saved = torch.load(tmp_path / "net.ckpt", weights_only=False)["state_dict"]
    weights = {key.removeprefix("net."): value for key, value in saved.items()}
    assert_same(load_file(own_loop / "model.safetensors"), weights)


NET = """
from torch import nn

class SimpleDenseNet(nn.Module):
    def __init__(self, input_size, lin1_size, lin2_size, lin3_size, output_size):
        super().__init__()
        sizes = [input_size, lin1_size, lin2_size, lin3_size, output_size]
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x).relu()
        return x
"""


def test_a_hydra_project_trains(tmp_path: Path) -> None:
    """By the page's YAML, in a folder that has a config.yaml of its own, and keys below user."""
    model, data, split = (
        next(one.text for one in blocks(PAGE) if f"# in {name}" in one.text)
        for name in ("configs/model/", "configs/dataset/", "src/data/")
    )
    for name, text in {
        "configs/model/mnist.yaml": model,
        "configs/dataset/mnist.yaml": data,
        "src/data/split.py": split.replace("55 / 70, 5 / 70, 10 / 70", "0.4, 0.4, 0.2"),
        "configs/config.yaml": "defaults: [trainer: nowhere]",
        "src/models/components/simple_dense_net.py": NET,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write_tiny_mnist(tmp_path / "data")
    words = ("--config-dir", "configs", "model=mnist", "train.epochs=2", "batch.global_size=4")
    path = {**ENVIRON, "PYTHONPATH": str(tmp_path)}
    done = run_command(*words, folder=tmp_path, environ=path)
    assert (done.exit_code, record(done.run_dir)["status"]) == (0, "completed"), done.stderr


@pytest.mark.slow
def test_the_accelerate_program_learns(tmp_path: Path) -> None:
    """Where it is installed: uv sync --group benchmarks."""
    require("accelerate")
    run_program("with_accelerate", tmp_path, "--main_process_port", "0")  # 0: a free one


def test_the_config_learns(tmp_path: Path) -> None:
    """The page's first command, as it stands but for the number of ranks."""
    (command,) = [one for one in commands(PAGE) if "model=net" in one]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = run_command(*command, "world_size=2", folder=tmp_path, environ=ENVIRON)
    assert done.exit_code == 0, done.stderr
    last = [line for line in metrics(done.run_dir) if "eval/accuracy" in line][-1]
    assert last["eval/accuracy"] > LEAST_ACCURACY


def require(library: str) -> None:
    """Skip a test without a library that only benchmarks need."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: uv sync --all-extras --group benchmarks")


def assert_same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """Compare bit for bit."""
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name].cpu()) for name in weights)


def test_what_its_programs_leave_is_no_part_of_the_repository() -> None:
    """They are started in the clone, and write where they are started."""
    programs = "".join(path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py"))
    left = set(re.findall(r'"(net\.\w+)"', programs))
    assert left == {"net.pt", "net.ckpt"}
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {f"/{name}" for name in left} | {"/lightning_logs/"} <= set(ignored)
