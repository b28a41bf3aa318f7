"""Several ranks on this machine: a process each; signals go to all of them, and one exit code comes back.

Note: what an exit code means here. The ranks end alike, having agreed before; so the first one to fail says it for all.
Where one dies without agreeing (a crash), the others lose it (1) or wait for it in vain: they get a while, then a
SIGTERM, then a SIGKILL; the code is that of the one that died.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kasoku.core import Comm
from kasoku.distributed.consensus import ReportedElsewhereError
from kasoku.distributed.environment import Place, place
from kasoku.distributed.liveness import LOST_RANK_EXIT_CODE, LostRankError
from kasoku.distributed.rendezvous import joined
from kasoku.distributed.startup import Start

STARTED = "KASOKU_STARTED"  # when the command was typed, on the clock of time.perf_counter, which processes share
_GRACE_S = {75: 60.0}  # by exit code: how long the others may take to end by themselves; they name who died in 12 s
_POLL_S = 0.02
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def on_ranks(
    run: Callable[[Comm, Start], int], words: Sequence[str], *, started: float, count: Callable[[], int]
) -> int:
    """Runs a command on the ranks that a launcher started; without one, on `count()` processes of this machine.

    Args:
        run: the part of the command that each rank executes; returns its exit code.
        words: of the command line, for the processes that this one starts.
        started: when the command was typed.
        count: the number of processes where no launcher has started them.
    """
    here = place()
    processes = 1 if here.launched else count()
    if processes > 1:
        places = [Place(i, processes, i, processes) for i in range(processes)]
        return spawn(words, places, address="127.0.0.1", port=0, started=started)
    try:
        start = Start(began=started)
        with joined(here, start) as comm:
            return run(comm, start)
    except ReportedElsewhereError:
        return 2
    except LostRankError as error:
        print(f"kasoku: {error}", file=sys.stderr)
        return LOST_RANK_EXIT_CODE


def spawn(arguments: Sequence[str], places: Sequence[Place], *, address: str, port: int, started: float) -> int:
    """Runs `kasoku ARGUMENTS` once for each place; returns the exit code of the first to fail, or 0.

    Args:
        arguments: of the command.
        places: of the ranks that this machine runs.
        address: of rank 0's host.
        port: free there; 0: any, where all ranks are on this machine.
        started: when the command was typed.
    """
    where = {"MASTER_ADDR": address, "MASTER_PORT": str(port or free_port()), STARTED: repr(started)}
    command = [sys.executable, "-m", "kasoku", *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    with _passing_on(processes) as early:
        for here in places:
            if not early:  # its own group: a terminal's Ctrl-C comes once, through us
                environment = {**os.environ, **where, **here.environment}
                processes.append(subprocess.Popen(command, env=environment, process_group=0))
        return _waited(processes)


def train_arguments(recipe: Path, settings: Sequence[str], out: Path | None, *, go_on: bool) -> list[str]:
    """The arguments of each rank's command."""
    given = [part for setting in settings for part in ("--set", setting)]
    folder = ["--out", str(out)] if out else []
    return ["train", str(recipe), *given, *folder, *(["--continue"] if go_on else [])]


def typed_at() -> float | None:
    """When the command was typed that started this rank by `spawn`; None where nothing did. Asked for once.

    Also ties this process to that one: where it is killed, this one gets a SIGTERM (on Linux).
    """
    started = os.environ.pop(STARTED, None)
    if started is None:
        return None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    return float(started)


def free_port() -> int:
    """A port that is free on this machine now."""
    with socket.socket() as s:
        s.bind(("", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def _passing_on(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Passes SIGINT and SIGTERM on to the processes; gives the numbers that came."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        came.append(number)
        for process in processes:
            process.send_signal(number)

    old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for number, handler in old.items():
            signal.signal(number, handler)


def _waited(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all; the exit code of the first to fail by itself, 128 + n where signal n ended it."""
    failed: dict[int, int] = {}  # by process, in the order they failed
    since, told = 0.0, 0
    while any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)
        since = since if failed else time.monotonic()
        if not told:
            _note(processes, failed)
        if failed and told < 2 and time.monotonic() - since > _GRACE_S.get(_code(failed), 20.0) * (1 + told):
            for process in processes:
                process.send_signal((signal.SIGTERM, signal.SIGKILL)[told])
            told += 1
    if not told:
        _note(processes, failed)
    code = _code(failed)
    return code if code >= 0 else 128 - code


def _note(processes: Sequence[subprocess.Popen[bytes]], failed: dict[int, int]) -> None:
    for i, process in enumerate(processes):
        if code := process.poll():
            failed.setdefault(i, code)


def _code(failed: dict[int, int]) -> int:
    """The first that is more than the loss of another rank."""
    return next((code for code in failed.values() if code != LOST_RANK_EXIT_CODE), LOST_RANK_EXIT_CODE if failed else 0)
