"""Open ports, taken ports, and TensorBoard's address."""

import ast
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from commands import background, error_line, free_port, run_command, session_pids, wait_for
from run_folders import last_step

import ddp_runner

PACKAGE = Path(ddp_runner.__file__).parent
QUICK = ("model=toy", "train.num_threads=1", "train.log_every_steps=1")
STARTERS = {"Popen", "run", "call", "check_call", "check_output", "system", "popen", "execv"}


def listening(pid: int) -> dict[int, str]:
    """Return the addresses on which a command's processes listen, by port."""
    addresses = {}
    for process_id in session_pids(pid):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            for link in psutil.Process(process_id).net_connections("inet"):
                if link.status == psutil.CONN_LISTEN:
                    addresses[link.laddr.port] = link.laddr.ip
    return addresses


def test_ranks_of_another_launcher_on_one_machine_listen_on_loopback_only(tmp_path: Path) -> None:
    """With torchrun's variables set by hand: rank 0's store and gloo."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                background(
                    *QUICK,
                    "train.epochs=100000",
                    folder=tmp_path / rank,
                    environ={**where, "RANK": rank, "LOCAL_RANK": rank},
                )
            )
            for rank in ("0", "1")
        ]
        wait_for(lambda: last_step(tmp_path) >= 3)
        ports = [listening(rank.pid) for rank in ranks]
    assert all(ports)
    addresses = {address for of_rank in ports for address in of_rank.values()}
    assert [ip for ip in addresses if not ip.startswith("127.") and ip != "::1"] == []


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    """The error line has the rank, the port and the reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        where = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        end = run_command(*QUICK, folder=tmp_path, environ=where)
    sentence = f"rank 0 cannot listen on port {port}, where the ranks meet (Address already in use)"
    assert error_line(end).startswith(sentence)
    assert end.run_dirs == []


def test_tensorboard_is_never_started_nor_opened_to_others() -> None:
    """Printed commands name only a folder, because TensorBoard's default address is loopback."""
    num_commands = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "--bind_all" not in node.value, path
                assert "--host" not in node.value, path
                num_commands += "tensorboard --logdir" in node.value
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in STARTERS:
                assert "tensorboard" not in ast.unparse(node), path
    assert num_commands >= 2  # of a run and of a sweep
