"""Several ranks on this machine, one process each: they share signals, and one exit code is returned.

Note: the exit code. Ranks that end regularly end alike, so the first exit code stands for all. If one crashes, the
rest end because they lost it, or would wait for it for ever: after a grace period they get a SIGTERM, then a SIGKILL.
The code is that of the rank that crashed. Ranks that can go on without it (Membership) say so by a SIGUSR1. The code is
then theirs, and a rank that a signal ended is started again, to join them in their run folder.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kasoku.core import Comm, say
from kasoku.distributed.consensus import ReportedElsewhereError
from kasoku.distributed.environment import Place, place
from kasoku.distributed.liveness import LOST_RANK_EXIT_CODE, LostRankError
from kasoku.distributed.membership import LAUNCHER, process_group
from kasoku.distributed.startup import Start

STARTED = "KASOKU_STARTED"  # when the command was started, on time.perf_counter, which processes share
_GRACE_S = {75: 60.0}  # by exit code, else 20 s: the other ranks name the dead one in 12 s, and end
_POLL_S = 0.02
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_RESTARTS = 20  # of a rank
Process = subprocess.Popen[bytes]


def on_ranks(
    run: Callable[[Comm, Start], int],
    words: Sequence[str],
    *,
    started: float,
    count: Callable[[], int],
    packages: Callable[[], object] = lambda: None,
    folder: Path | None = None,
) -> int:
    """Runs a command on the ranks that a launcher started, or else on new processes; returns the exit code.

    `run`: the part of the command that each rank executes; returns its exit code. `words`: of the command line, for new
    processes. `started`: when the command was started (time.perf_counter). `count`: the number of ranks, if no launcher
    sets it. `packages`: imports that are done during the rendezvous. `folder`: a run folder; if ranks train there
    already, this one may join them.
    """
    here = place()
    processes = 1 if here.launched else count()
    if processes > 1:
        places = [Place(i, processes, i, processes) for i in range(processes)]
        return spawn(words, places, address="127.0.0.1", port=0, started=started)
    try:
        start = Start(began=started)
        with process_group(here, start, packages, folder) as comm:
            return run(comm, start)
    except ReportedElsewhereError as error:
        if "--traceback" in words:
            traceback.print_exception(error)
        return 2
    except LostRankError as error:
        say(str(error))
        return LOST_RANK_EXIT_CODE


def spawn(arguments: Sequence[str], places: Sequence[Place], *, address: str, port: int, started: float) -> int:
    """Runs `kasoku ARGUMENTS` once for each place on this machine; returns the exit code of the first to fail, or 0.

    `address`, `port`: of rank 0; port 0: any free one, if all ranks are on this machine. `started`: when the command
    was started (time.perf_counter).
    """
    if not port:
        with socket.create_server(("", 0)) as s:
            port = s.getsockname()[1]
    common = {"MASTER_ADDR": address, "MASTER_PORT": str(port), STARTED: repr(started), LAUNCHER: str(os.getpid())}
    command = [sys.executable, "-m", "kasoku", *arguments]
    return run_processes(command, [common | here.environment for here in places])


def run_processes(command: Sequence[str], variables: Sequence[Mapping[str, str]]) -> int:
    """Runs a command once with each of these sets of variables, and forwards signals; the exit code as of `spawn`."""
    processes: list[Process] = []
    arrived: list[int] = []
    armed: list[int] = []

    def start(i: int, *more: str) -> Process:
        # in a group of its own, so that a terminal's Ctrl-C arrives once, through us
        return subprocess.Popen([*command, *more], env={**os.environ, **variables[i]}, process_group=0)

    def start_again(i: int) -> Process | None:
        """With the options by which it finds the others; None if the command has no run folder."""
        given = {word.partition("=")[0] for word in command}
        more = ["--continue"] if "--out" in given else [] if "--resume" in given else None
        return None if arrived or more is None else start(i, *more)

    def forward(number: int, frame: object) -> None:
        arrived.append(number)
        for process in processes:
            process.send_signal(number)

    old = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    old[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda number, _: armed.append(number))
    try:
        for i in range(len(variables)):
            if not arrived:
                processes.append(start(i))
        return _wait(processes, armed, start_again)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for number, handler in old.items():
            signal.signal(number, handler)


def train_arguments(
    recipe: Path, settings: Sequence[str], out: Path | None, *, go_on: bool, extra: Sequence[str] = ()
) -> list[str]:
    """The arguments of each rank's command; `extra` options come last."""
    changes = [part for setting in settings for part in ("--set", setting)]
    folder = ["--out", str(out)] if out else []
    return ["train", str(recipe), *changes, *folder, *(["--continue"] if go_on else []), *extra]


def attach_to_launcher() -> float | None:
    """When the command that spawned this rank was started; None without one, or in a second call.

    If that process is killed, this one gets a SIGTERM from now on (on Linux).
    """
    started = os.environ.pop(STARTED, None)
    if started is None:
        return None
    end_with_parent(signal.SIGTERM)
    return float(started)


def end_with_parent(number: int) -> None:
    """From now on this process gets the signal when its parent is killed (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, number)


def _wait(processes: list[Process], armed: Sequence[int], start_again: Callable[[int], Process | None]) -> int:
    """Waits for all; the exit code of the first that failed by itself, or 128 + n if signal n ended it.

    `armed`: gets an element whenever a rank that trains says that ranks may be lost. Those that a signal ended are then
    started again. They count from the next element on, when they have joined the others.
    """
    failed: dict[int, int] = {}  # by process, in the order they failed
    starts, heard, joined = [0] * len(processes), 0, {*range(len(processes))}
    since, signals = time.monotonic(), 0
    while True:
        codes = [process.poll() for process in processes]
        if heard < len(armed):
            heard, joined = len(armed), joined | {i for i, code in enumerate(codes) if code is None}
        if not signals:
            failed |= {i: code for i, code in enumerate(codes) if code and i not in failed}
        running = any(codes[i] is None for i in joined)
        lost = {i for i, code in failed.items() if i not in joined or code < 0 or code == LOST_RANK_EXIT_CODE}
        for i in lost if armed and running else ():
            if failed[i] < 0 and starts[i] < _RESTARTS and (process := start_again(i)):
                processes[i], codes[i] = process, None
                starts[i] += 1
                joined.discard(i)
                del failed[i]
        counted = {i: code for i, code in failed.items() if not armed or i not in lost}
        if not running and 0 not in codes:
            counted = counted or failed
        others = (code for code in counted.values() if code != LOST_RANK_EXIT_CODE)
        first = next(others, LOST_RANK_EXIT_CODE if counted else 0)
        if None not in codes:
            return first if first >= 0 else 128 - first
        now, ends = time.monotonic(), bool(counted) or not running
        since = since if ends else now
        if ends and signals < 2 and now - since > _GRACE_S.get(first, 20.0) * (1 + signals):
            for process in processes:
                process.send_signal((signal.SIGTERM, signal.SIGKILL)[signals])
            signals += 1
        time.sleep(_POLL_S)
