"""The kinds of accelerators that ranks compute on, by torch's names. Torch-free, until it is asked.

NVIDIA's are counted by their driver, in ``hardware``. Any other kind is known to torch alone, which
takes seconds to import: a child of the fork server answers, which imports torch for the ranks.
"""

from functools import cache
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkServerProcess

from ddp_runner.host.processes import import_errors, start_fork_server

CUDA = "cuda"  # NVIDIA's, and AMD's by ROCm
# The backend of each kind, as of torch.distributed.get_default_backend_for_device. MPS has none.
BACKENDS = {CUDA: "nccl", "xpu": "xccl", "mps": "gloo"}
FOR_CPU = ("gloo", "mpi")  # backends that move CPU tensors
Accelerators = tuple[str, int, str]  # torch's device type, how many, and their backend


@cache
def known_to_torch(*, is_rank: bool) -> Accelerators | str:
    """Return the accelerators that torch sees, or why it cannot say.

    This process stays without torch, unless it `is_rank` and will compute on them.
    """
    if is_rank:
        return _ask()
    pipe, theirs = Pipe()
    with pipe, theirs:
        try:
            start_fork_server()
            process = ForkServerProcess(target=_answer, args=(theirs,))
            process.start()
            theirs.close()
            answer: Accelerators | str = pipe.recv()
            process.join()
        except (EOFError, OSError):
            return "the process that asks torch for accelerators has ended; see the lines above"
    return answer


def _answer(pipe: Connection) -> None:
    pipe.send(_ask())


def _ask() -> Accelerators | str:
    if import_errors:
        return f"torch cannot say which GPUs it sees ({import_errors[0]}); repair its install"
    try:
        import torch
        import torch.distributed as dist

        if (found := torch.accelerator.current_accelerator(check_available=True)) is None:
            return CUDA, 0, BACKENDS[CUDA]
        known = dist.Backend.default_device_backend_map | BACKENDS
        return found.type, torch.accelerator.device_count(), known.get(found.type, FOR_CPU[0])
    except Exception as error:  # whatever a broken driver makes torch raise
        return f"torch cannot say which GPUs it sees ({error!r:.200}); repair its install"
