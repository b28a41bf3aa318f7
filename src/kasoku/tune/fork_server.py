"""A fork server: trials start as copies of a process that has imported torch and read the data.

Note: parents. The server forks a middle process, which forks the trial and ends, so that the trial becomes a child of
the search, a subreaper meanwhile (prctl(2)). So trials outlive a server that is killed, the search has their exit
codes, and later trials start as new processes. The search also becomes the parent of processes that its trials leave
behind; those that have ended stay in the process table until it ends.
"""

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from kasoku.core.torch_internals import cuda_is_lost_to_forks
from kasoku.distributed.local_launch import end_with_parent

_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # of prctl(2)


class ForkedProcess:
    """A forked child of this process, with the methods of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            except ChildProcessError:  # waited for elsewhere: as in Popen, its code is lost
                self.returncode = 0
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


Process = subprocess.Popen[bytes] | ForkedProcess
Start = Callable[[Sequence[str], Mapping[str, str], Path], Process]


def new_process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Starts a command in its own process group, so that a terminal's Ctrl-C does not reach it; output goes to log."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, process_group=0
        )


@contextmanager
def fork_server(prepare: Callable[[], object]) -> Iterator[Start]:
    """Starts commands `python -m MODULE ...` or `python FILE ...`, as `new_process` does, in forks of one process.

    Functions of `atexit` do not run in the forks. Where forks are impossible (outside Linux, in a process with several
    threads, once CUDA is in use), commands start as new processes.

    `prepare`: imports and reads what the commands need, in the server; its errors are ignored, as the commands will
    have them too. The first command waits for it, and so do signals. This process must not have computed on several
    threads: torch would wait for them in the forks.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        yield new_process
        return
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    if prctl(_GET_SUBREAPER, ctypes.byref(before)) or prctl(_SET_SUBREAPER, 1):
        yield new_process
        return
    client, server_end = socket.socketpair()
    for stream in filter(None, (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        stream.flush()
    search = os.getpid()
    server = os.fork()
    if not server:
        with suppress(BaseException):
            client.close()
            _serve(server_end, prepare, search)
        os._exit(1)
    server_end.close()
    replies = client.makefile()

    def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        try:
            log.open("ab").close()
            client.sendall(json.dumps([[*command], {**environment}, str(log)]).encode() + b"\n")
            return ForkedProcess(int(replies.readline()))
        except (OSError, ValueError):  # the server was killed, or cannot fork
            return new_process(command, environment, log)

    try:
        yield start
    finally:
        replies.close()
        client.close()
        with suppress(OSError):
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
        prctl(_SET_SUBREAPER, before.value)


def _serve(server_end: socket.socket, prepare: Callable[[], object], search: int) -> None:
    """Forks a trial for each line of the socket, and answers with its process number; ends with the search."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C does not reach it
    end_with_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(devnull, stream)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    with suppress(Exception):
        prepare()
    if threading.active_count() > 1:
        return
    requests = server_end.makefile()
    for request in requests:
        command, environment, log = json.loads(request)
        middle = os.fork()
        if not middle:
            if cuda_is_lost_to_forks():
                os._exit(0)
            middle = os.getpid()
            if trial := os.fork():
                server_end.sendall(f"{trial}".encode())
                os._exit(0)
            requests.close()
            server_end.close()
            while os.getppid() == middle:  # it asks to be ended with its parent, which is the search then
                time.sleep(0.001)
            end_with_parent(signal.SIGTERM)
            if os.getppid() != search:
                os._exit(1)
            torch.set_num_threads(threads)
            _run(command[1:], environment, log)
        os.waitpid(middle, 0)
        server_end.sendall(b"\n")  # now the trial is the search's child


def _run(words: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    """Runs a Python program in this process, and ends it."""
    code = 1
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # whatever the search's caller made of them
        os.environ.clear()
        os.environ.update(environment)
        if words[0] == "-m":
            sys.argv = [*words[1:]]
            sys.path.insert(0, os.getcwd())
            sys.modules.pop(f"{words[1]}.__main__", None)  # the search itself may have been started by it
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*words]
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
