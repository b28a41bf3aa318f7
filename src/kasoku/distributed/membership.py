"""The process group of a training: how the ranks find each other, go on when some are lost or join, and end.

election.py says who is in the group.

Note: why not a library. torchft needs its lighthouse, a server in Rust, and trains on with a smaller batch. torch's own
shrink and split of groups are for NCCL: `ProcessGroupGloo.supports_shrinking` is False (2.13). torchrun's agent ends
all ranks of its host when one ends.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from kasoku.core import Comm, InputError, Solo, say, summary
from kasoku.distributed.consensus import SHARED_ERRORS, ReportedElsewhereError
from kasoku.distributed.counting_comm import Activity, CountingComm
from kasoku.distributed.election import ANSWER_S, GRACE_S, PATIENT_S, Address, Election, NewGroup, is_gone
from kasoku.distributed.environment import Place
from kasoku.distributed.liveness import LostRankError, Watchdog, end_process, is_lost_rank, open_store
from kasoku.distributed.startup import Start
from kasoku.distributed.torch_comm import TorchComm, abort, destroy

TIMEOUT = timedelta(minutes=30)  # of a collective: longer than any evaluation or checkpoint
LAUNCHER = "KASOKU_LAUNCHER"  # the process id of the one that started the ranks of this host
_SCHEME = "kasoku"  # of the rendezvous URL
_was_rank: list[object] = []


class MissingRankError(RuntimeError):
    """A rank that was found did not come to the new group."""


def backend() -> str:
    """Of process groups: control messages do not wait for the GPU."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


class Membership:
    """The ranks of this training, on one of them. `comm`: of all ranks; `regroup` changes it in place."""

    def __init__(self) -> None:
        self.watchdog, self.election = Watchdog(on_fault=self.on_fault), Election()
        self.newcomer = self._planned = False  # newcomer: started while the others train, and has not joined them yet
        self._decided, self._deciding = threading.Event(), threading.Lock()
        self._group = NewGroup(0, [], ("", 0), 0)

    def start(self, comm: Comm, store: Address) -> CountingComm:
        """Starts to watch over the ranks, as a Watchdog does; collective.

        Raises LostRankError if a collective fails since a rank is gone, and InputError as the Watchdog and Election.
        """
        try:
            self.comm = self.watchdog.start(comm, store)
            self.comm.activity.membership = self
            self.election.start(self.comm, store)
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            line = f"rank {comm.rank} lost another one at the start ({summary(error)}): start all ranks again"
            raise LostRankError(line) from error
        return self.comm

    def find(self, folder: Path | None) -> CountingComm | None:
        """The comm of this process alone, if ranks train in the run folder, which it may join. Not collective."""
        if not self.election.find(folder):
            return None
        self.comm, self.newcomer = CountingComm(Solo(), Activity(0.0)), True
        self.comm.activity.membership = self
        return self.comm

    def arm(self, folder: Path, facts: str, *, dead_s: float, most: int) -> None:
        """From now on ranks may be lost, and others join. Not collective.

        `folder`: of the run, on a file system that all ranks share. `facts`: what newcomers must have in common with
        the ranks. `dead_s`: seconds without a heartbeat after which a rank is dead. `most`: ranks with work.
        """
        self.election.open(folder, facts, most)
        self.watchdog = replace(self.watchdog, dead_s=dead_s)
        if heartbeat := self.comm.activity.heartbeat:
            heartbeat.settings = self.watchdog
            heartbeat.detector.patience = round(dead_s / self.watchdog.beat_s)
        if not self.newcomer:
            self._announce()

    def disarm(self) -> None:
        """From now on a fault ends the process, and nobody joins. Not collective."""
        if not self.newcomer:
            self.election.over()

    def _announce(self) -> None:
        """Tells the launcher that ranks may be lost, and newcomers where the ranks are."""
        if os.environ.get(LAUNCHER) == str(os.getppid()):
            os.kill(os.getppid(), signal.SIGUSR1)
        self.election.announce()

    def close(self, failed: str) -> None:
        """Announces that this rank has ended, or that it `failed`, and destroys the process groups. Not collective."""
        if self.comm.activity.heartbeat:
            self.comm.activity.heartbeat.close(failed)
        destroy()

    def meet(self) -> None:
        """Finds the ranks that are left and those that join, where no verdict has done so. Collective among them.

        Raises LostRankError if the others go on without this rank, or do not answer.
        """
        with self._deciding:
            self._planned = not self.election.lost
        if not self._planned:
            return  # the watching thread finds them
        if heartbeat := self.comm.activity.heartbeat:
            heartbeat.end("")
        try:
            ranks = self.election
            self._group = ranks.join() if self.newcomer else ranks.elect({*ranks.lost}, PATIENT_S)
        except (InputError, OSError, RuntimeError) as error:
            raise LostRankError(f"rank {self.election.rank} cannot go on: {summary(error)}") from error
        self._decided.set()

    def regroup(self) -> None:
        """Replaces the process group by that of the ranks that were found. Collective among them.

        Raises MissingRankError if one of them does not come, LostRankError if none were found.
        """
        if not self._decided.wait(ANSWER_S + 2 * GRACE_S):
            raise LostRankError(f"rank {self.election.rank}: the other ranks do not answer")
        group, activity = self._group, self.comm.activity
        with self._deciding:
            self._decided.clear()
            self.election.take_place(group)
            self.newcomer = self._planned = False
        destroy()
        inner: Comm = Solo(self.comm.clock)
        try:
            if (size := len(group.addresses)) > 1:
                store = self.election.store if group.rank == 0 else open_store(group.store)
                store = PrefixStore(f"group {group.number}", store)
                _wait_for_all(store, group)
                dist.init_process_group(backend(), store=store, rank=group.rank, world_size=size, timeout=TIMEOUT)
                inner = TorchComm(clock=self.comm.clock)
            self.watchdog.watch(activity, inner, group.store)
        except (InputError, RuntimeError) as error:
            raise MissingRankError(f"rank {group.rank}: a rank is missing ({summary(error)})") from error
        self.comm.replace(inner)  # with the new heartbeat
        self._announce()

    # ---- on the watching thread: gloo may never let go a main thread that was stopped in a collective

    def on_fault(self, line: str) -> None:
        """After a verdict: finds the ranks that are left, or ends the process."""
        fault, lost = self.comm.activity.heartbeat.fault if self.comm.activity.heartbeat else ("", [])
        with self._deciding:
            if self._planned or not fault:  # the ranks meet, or have met
                return
            if self.election.folder is None or not lost:
                end_process(line)
            self.election.lost.update(lost)
        abort()
        try:
            self._group = self.election.elect({*lost}, ANSWER_S)
        except (InputError, OSError, RuntimeError) as error:
            end_process(f"{fault}; this rank cannot go on: {summary(error)}; {line.rpartition('; ')[2]}")
        if self._group.rank == 0:
            say(f"{fault}; going on with {len(self._group.addresses)} of {len(self.election.addresses)} ranks")
        self._decided.set()


def _wait_for_all(store: Any, group: NewGroup) -> None:
    """Waits until all ranks of the group have come: one that is in a long step comes after it. Collective.

    Raises MissingRankError if one of them has died meanwhile.
    """
    own = f"rank {group.rank}"
    store.set(own, "")
    began_s = time.monotonic()
    for rank, address in enumerate(group.addresses):
        while not store.check([f"rank {rank}"]):
            waited_s = time.monotonic() - began_s
            time.sleep(0.02 if waited_s < GRACE_S else 0.5)
            if waited_s > PATIENT_S or is_gone(address, waited_s):
                store.delete_key(own)
                raise MissingRankError(f"rank {group.rank}: rank {rank} is missing")


@contextmanager
def process_group(here: Place, start: Start, packages: Callable[[], object], folder: Path | None) -> Iterator[Comm]:
    """The comm of all ranks, watched over by a Watchdog; collective. The process group is destroyed at the end.

    A training that can go on without ranks that are lost changes the comm in place (Membership).

    `start` takes the rendezvous as a task; `packages`: imports that are done meanwhile. `folder`: of a run; if ranks
    train there already, the comm is that of this rank alone, until it joins them.

    Raises:
        InputError: if the launcher did not set rank 0's address, or the ranks do not find each other.
        LostRankError: if a collective failed because another rank is gone.
    """
    if here.size == 1:
        start.do("packages", packages)
        yield Solo()
        return
    address = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
    if None in address:
        advice = "set them to rank 0's host and a free port there, or start with kasoku launch, which does"
        raise InputError(f"{here.size} ranks without MASTER_ADDR and MASTER_PORT: {advice}")
    _was_rank.append(here)
    if torch.cuda.is_available():  # NCCL takes the current device
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
        # otherwise (torch's default is 3) NCCL ends this process before the Watchdog names the lost rank
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    members = Membership()
    comm = members.find(folder)
    start.add("rendezvous", lambda: None if comm else _connect(here, address))
    start.do("packages", packages)
    start.import_compiler()  # not earlier: the rendezvous would wait for it (see _connect)
    _ = start["rendezvous"]
    comm = comm or members.start(TorchComm(), (str(address[0]), int(str(address[1]))))
    failed = ""
    try:
        yield comm
    except SHARED_ERRORS:
        raise
    except BaseException as error:
        failed, lost = summary(error), is_lost_rank(error)
        if isinstance(error, LostRankError):  # of this rank alone; the others may go on
            failed = ""
        if lost:
            comm.activity.wait_for_verdict()  # usually another rank is the cause
        if isinstance(error, InputError) and comm.size > 1 and not comm.activity.heartbeat.reports(failed):
            raise ReportedElsewhereError(failed) from error
        if lost:
            raise LostRankError(f"rank {here.rank}: lost another rank ({failed}); resume from a checkpoint") from error
        raise
    finally:
        members.close(failed)


def _connect(here: Place, address: Sequence[str | None]) -> None:
    """Initializes the process group.

    torch first checks whether the compiler is imported, which waits for an import under way, and then looks for the
    other ranks. So this is called before that import starts.
    """
    with suppress(RuntimeError):  # already registered
        register_rendezvous_handler(_SCHEME, _attempt)  # type: ignore[no-untyped-call]
    try:
        dist.init_process_group(backend(), f"{_SCHEME}://", timeout=TIMEOUT, rank=here.rank, world_size=here.size)
    except (RuntimeError, ValueError) as error:
        line = f"rank {here.rank} of {here.size} does not find the other ranks at {':'.join(map(str, address))}"
        advice = "check MASTER_ADDR and MASTER_PORT, and that all ranks were started"
        raise InputError(f"{line} ({summary(error)}): {advice}") from error


def _attempt(url: str, **more: Any) -> Iterator[tuple[Store, int, int]]:
    """A store for this attempt alone: torchrun may keep one for all of them."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for store, rank, size in rendezvous(url.replace(_SCHEME, "env", 1), **more):
        yield PrefixStore(f"attempt {attempt}", store), rank, size


def leave(code: int) -> int:
    """Ends a process that was one of several ranks; returns the exit code in any other.

    It skips Python's own shutdown: gloo's threads may still release tensors, for which they need the interpreter, and
    abort the process if it is shutting down (torch 2.13).
    """
    if _was_rank:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code
