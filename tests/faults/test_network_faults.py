"""What listens where, and what is said of it."""

import ast
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from commands import background, last_step, run_command, session_pids, wait_for
from trainings import QUICK, free_port, only_sentence

import ddp_runner

PACKAGE = Path(ddp_runner.__file__).parent
STARTERS = {"Popen", "run", "call", "check_call", "check_output", "system", "popen", "execv"}


def listening(pid: int) -> dict[int, str]:
    """Return the addresses on which a command's processes listen, by their ports."""
    found = {}
    for one in session_pids(pid):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            for link in psutil.Process(one).net_connections("inet"):
                if link.status == psutil.CONN_LISTEN:
                    found[link.laddr.port] = link.laddr.ip
    return found


def test_ranks_of_another_launcher_on_one_machine_listen_on_loopback_only(tmp_path: Path) -> None:
    """Torchrun's variables, set by hand: neither the store of rank 0 nor gloo is open to others."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                background(
                    *(*QUICK, "train.epochs=100000"),
                    folder=tmp_path / rank,
                    environ={**where, "RANK": rank, "LOCAL_RANK": rank},
                )
            )
            for rank in ("0", "1")
        ]
        wait_for(lambda: last_step(tmp_path) >= 3)
        found = [listening(rank.pid) for rank in ranks]
    assert all(found)
    addresses = {address for one in found for address in one.values()}
    assert {one for one in addresses if not one.startswith("127.") and one != "::1"} == set()


def test_a_port_that_another_program_has_is_named(tmp_path: Path) -> None:
    """Rank 0 says which, and what to change."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        where = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        end = run_command(*QUICK, folder=tmp_path, environ=where)
    sentence = f"rank 0 cannot listen on port {port} (Address already in use)"
    assert only_sentence(end).startswith(sentence)
    assert end.run_dirs == []


def test_tensorboard_is_never_started_nor_opened_to_others() -> None:
    """Whatever is printed or started names a folder alone: its default is loopback."""
    told = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "--bind_all" not in node.value, path
                assert "--host" not in node.value, path
                told += ["tensorboard --logdir"] if "tensorboard --logdir" in node.value else []
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in STARTERS:
                assert "tensorboard" not in ast.unparse(node), path
    assert len(told) >= 3  # of a run, a sweep and a comparison
