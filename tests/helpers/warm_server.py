"""The server of warm processes: it has imported everything, and forks a process for each request.

``warm`` starts it as a script, so a forked process is an ordinary main program: what it was asked
to run is the last thing that the script does, and the interpreter ends it as it ends any other.

The mother of a test session has imported everything, and forks a server for each of its workers.
"""

import atexit
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
from contextlib import suppress

REAP_MS = 100
HANDLERS = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}  # of a new one

exit_code = 0


def end() -> None:
    """End as the interpreter would, but do not free all that was imported: that takes a while."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code)


def serve_workers(listener: socket.socket) -> socket.socket:
    """Fork a server for each worker that asks; return, in a fork only, its link to the worker."""
    preload = sys.modules["ddp_runner.launch.preload"]
    while True:
        asked, _ = listener.accept()
        with asked:
            _, descriptors, _, _ = socket.recv_fds(asked, 1, 1)
            link = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                listener.close()
                # A fork inherits neither of these, nor its own number.
                preload.SERVER = os.getpid()
                preload.adopt_orphans()
                preload.die_with_parent(signal.SIGRTMIN)
                return link
            link.close()
            asked.send(b"%d" % pid)


def serve(control: socket.socket) -> socket.socket:
    """Fork on each request until the client ends; return, in a fork only, its link to the client.

    A request is a byte with two descriptors: the link, and a pipe that gets the process's number
    and its exit code.
    """
    running = dict[int, tuple[int, int]]()  # by pidfd: the process, and its pipe
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        ready = poll.poll(REAP_MS)
        _reap({pid for pid, _ in running.values()})
        for descriptor, _ in ready:
            if descriptor in running:
                pid, pipe = running.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                _tell(pipe, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(pipe)
                continue
            request, descriptors, _, _ = socket.recv_fds(control, 1, 2)
            if not request:
                raise SystemExit
            link, pipe = descriptors
            pid = os.fork()
            if pid == 0:
                control.close()
                for number, (_, other) in running.items():
                    os.close(number)
                    os.close(other)
                os.close(pipe)
                return socket.socket(fileno=link)
            os.close(link)
            _tell(pipe, pid)
            number = os.pidfd_open(pid)
            running[number] = pid, pipe
            poll.register(number, select.POLLIN)


def _reap(own: set[int]) -> None:
    """Take note of the end of orphans: preload lets this process adopt those of killed commands."""
    while ended := _ended_child():
        if ended in own:
            return  # its pidfd is ready, too
        os.waitpid(ended, 0)


def _ended_child() -> int | None:
    with suppress(ChildProcessError):  # there is no child
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended.si_pid if ended else None
    return None


def _tell(pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for this process any more
        os.write(pipe, b"%d\n" % number)


def run(link: socket.socket) -> None:
    """Run what the client asks for: a pickled function of its path that takes the link."""
    # Only now, since it imports multiprocessing, whose own end must come before ``end``.
    from warm import receive

    sys.modules.pop("ddp_runner.launch.preload", None)  # importing it has effects
    path = sys.path[:]
    sys.path[:], pickled = receive(link)
    if HANDLERS[signal.SIGINT] == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as ``__main__`` does for its imports
    work = pickle.loads(pickled)
    sys.path[:] = path
    for signum, handler in HANDLERS.items():
        if signal.getsignal(signum) != handler:
            signal.signal(signum, handler)
    work(link)


if __name__ == "__main__":
    atexit.register(end)  # the first to be registered is the last to run
    own_link = socket.socket(fileno=int(sys.argv[2]))
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else a collection in each forked process copies the pages of all modules
    if sys.argv[1] == "mother":
        own_link = serve_workers(own_link)
    try:
        run(serve(own_link))
    except SystemExit as stop:
        if isinstance(stop.code, int):
            exit_code = stop.code
        elif stop.code is not None:
            print(stop.code, file=sys.stderr)
            exit_code = 1
    except BaseException:
        exit_code = 1
        sys.excepthook(*sys.exc_info())
