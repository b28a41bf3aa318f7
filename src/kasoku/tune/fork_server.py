"""A fork server: trials start as copies of a process that has imported torch and read the data.

Note: who is whose child. The server forks a child that forks the trial and ends, so that the trial becomes a child of
the search, which is a subreaper meanwhile (prctl(2)). So trials outlive a server that is killed, the search has their
exit codes, and later trials start as new processes.
"""

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from kasoku.distributed.local_launch import end_with_parent

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


class ForkedProcess:
    """A forked child of this process, with the methods of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
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

    `prepare`: imports and reads what the commands need, in that process; its errors are ignored, as the commands will
    have them too. Neither it nor this process may have asked for a GPU, even whether there is one: CUDA cannot be used
    in a fork then. Linux only; new processes elsewhere.
    """
    if sys.platform != "linux":
        yield new_process
        return
    ours, theirs = socket.socketpair()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    server = os.fork()
    if not server:
        with suppress(BaseException):
            ours.close()
            _serve(theirs, prepare)
        os._exit(0)
    theirs.close()
    replies = ours.makefile()

    def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        try:
            ours.sendall(json.dumps([[*command], {**environment}, str(log)]).encode() + b"\n")
            return ForkedProcess(int(replies.readline()))
        except (OSError, ValueError):  # the server was killed
            return new_process(command, environment, log)

    try:
        yield start
    finally:
        replies.close()
        ours.close()
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        ctypes.CDLL(None).prctl(_SUBREAPER, 0)


def _serve(theirs: socket.socket, prepare: Callable[[], object]) -> None:
    """Forks a trial for each line of the socket, and answers with its process number; ends with the search."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C does not reach it
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    with suppress(Exception):
        prepare()
    requests = theirs.makefile()
    for request in requests:
        command, environment, log = json.loads(request)
        between = os.fork()
        if not between:
            between = os.getpid()
            if trial := os.fork():
                theirs.sendall(f"{trial}".encode())
                os._exit(0)
            requests.close()
            theirs.close()
            while os.getppid() == between:  # before the trial asks to be ended with its parent
                time.sleep(0.001)
            torch.set_num_threads(threads)
            _run(command[1:], environment, log)
        os.waitpid(between, 0)
        theirs.sendall(b"\n")  # now the trial is the search's child


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
            sys.modules.pop(f"{words[1]}.__main__", None)  # the search itself may have been started by it
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*words]
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
