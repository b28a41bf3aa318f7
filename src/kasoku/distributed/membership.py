"""The ranks of a training that goes on without ranks that are lost: who is left, and their new process group.

Note: no rank is needed. Every rank listens at an address that all know from the start, so the rank that hosts the
rendezvous may be the one that dies. After a verdict (distributed/liveness.py) each survivor asks the lowest rank that
is not lost, and the next one if that does not answer. The rank that is asked leads: it waits a few seconds for all
others, and answers with the list of those that came and with the store of their new process group. Ranks are numbered
anew, in the old order.

Note: what is guaranteed. At most one group goes on. The leader claims the group's number in the run folder, by a file
that only one process can create; a group whose leader cannot is ended. So two halves that do not reach each other are
no danger where they see the same folder, and where they do not, only the half that has the folder goes on. A group of
less than half of the ranks that may be alive gives up before that; a rank is dead for certain where its host refuses
the connection. A rank that was stopped or cut off cannot finish a collective any more, so it changes nothing in the run
folder but by a write that was under way; when it comes back it is not in the list, and ends with exit code 4.

Note: why not a library. torchft needs its lighthouse, a server in Rust, and trains on with a smaller batch. torch's own
shrink and split of groups are for NCCL: `ProcessGroupGloo.supports_shrinking` is False (2.13). torchrun's agent ends
all ranks of its host when one ends.
"""

import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kasoku.core import Comm, InputError, Solo, say, summary
from kasoku.distributed.counting_comm import CountingComm
from kasoku.distributed.liveness import LostRankError, Watchdog, daemon, end_process
from kasoku.distributed.torch_comm import TorchComm, abort

TIMEOUT = timedelta(minutes=30)  # of a collective: longer than any evaluation or checkpoint
LAUNCHER = "KASOKU_LAUNCHER"  # the process id of the one that started the ranks of this host
_GRACE_S = 4.0  # ranks hear of a death within two heartbeats of each other
_CONNECT_S, _ANSWER_S, _STORE_S = 2.0, 12.0, 60.0
Address = tuple[str, int]


def backend() -> str:
    """Of process groups: control messages do not wait for the GPU."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


@dataclass(frozen=True)
class NewGroup:
    """The ranks that go on, by their old numbers, and the address of their store."""

    ranks: tuple[int, ...]
    store: Address


class Membership:
    """The ranks of this training, on one of them.

    Attributes:
        comm: of all ranks; `regroup` changes it in place.
        claim: called by the rank that leads, with the number of the new group; raises InputError if that is taken. None
            while the training cannot go on with other ranks: then a fault ends the process.
    """

    def __init__(self) -> None:
        self.watchdog = Watchdog(on_fault=self.on_fault)
        self.claim: Callable[[int], object] | None = None
        self.number = 0  # of the group
        self._waiting: dict[int, socket.socket] = {}  # ranks that asked this one
        self._decided, self._group = threading.Event(), NewGroup((), ("", 0))
        self._store: Any = None

    def start(self, comm: Comm, store: Address) -> CountingComm:
        """Starts to watch over the ranks, as a Watchdog does; collective."""
        self.comm = self.watchdog.start(comm, store)
        self.comm.activity.membership = self
        with socket.create_connection(store) as connection:
            self.host = connection.getsockname()[0]  # by which this rank reaches the others
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, 0), family=family)
        self.token = self.comm.broadcast_object(uuid.uuid4().hex)
        self.addresses: list[Address] = self.comm.gather_objects((self.host, listener.getsockname()[1]))
        daemon("kasoku membership", self._listen, listener)
        return self.comm

    def arm(self, claim: Callable[[int], object] | None, dead_s: float) -> None:
        """Sets `claim`, and the seconds without a heartbeat after which a rank is dead. Not collective."""
        self.claim, self.watchdog = claim, replace(self.watchdog, dead_s=dead_s)
        if heartbeat := self.comm.activity.heartbeat:
            heartbeat.settings = self.watchdog
            heartbeat.detector.patience = round(dead_s / self.watchdog.beat_s)

    def close(self, failed: str) -> None:
        """Announces that this rank has ended, or that it `failed`, and destroys the process group. Not collective."""
        if self.comm.activity.heartbeat:
            self.comm.activity.heartbeat.close(failed)
        if dist.is_initialized():
            dist.destroy_process_group()

    def disarm(self) -> None:
        """From now on a fault ends the process. Not collective."""
        self.claim = None

    def regroup(self) -> None:
        """Replaces the process group by that of the ranks that are left. Collective among them.

        Raises LostRankError if they do not meet.
        """
        if not self._decided.wait(_ANSWER_S + 2 * _GRACE_S):
            raise LostRankError(f"rank {self.comm.rank}: the other ranks do not answer")
        self._decided.clear()
        if os.environ.get(LAUNCHER) == str(os.getppid()):  # it would end all ranks
            os.kill(os.getppid(), signal.SIGUSR1)
        group, activity = self._group, self.comm.activity
        rank = group.ranks.index(self.comm.rank)
        self.addresses = [self.addresses[r] for r in group.ranks]
        dist.destroy_process_group()
        inner: Comm = Solo(self.comm.clock)
        try:
            if len(group.ranks) > 1:
                store = self._store if rank == 0 else _store(group.store)
                store = dist.PrefixStore(f"group {self.number}", store)  # type: ignore[attr-defined]
                dist.init_process_group(backend(), store=store, rank=rank, world_size=len(group.ranks), timeout=TIMEOUT)
                inner = TorchComm(clock=self.comm.clock)
            self.comm.replace(inner)
            self.watchdog.watch(activity, inner, group.store)
        except (RuntimeError, InputError) as error:
            raise LostRankError(f"rank {rank}: the ranks that are left do not meet ({summary(error)})") from error

    # ---- on the watching thread

    def on_fault(self, line: str) -> None:
        """After a verdict: finds the ranks that are left, or ends the process."""
        fault, lost = self.comm.activity.heartbeat.fault
        if self.claim is None or not lost:
            end_process(line)
        abort()
        try:
            self._group = self._elect({*lost})
        except (InputError, OSError, RuntimeError) as error:
            end_process(f"{fault}; this rank cannot go on: {summary(error)}; {line.rpartition('; ')[2]}")
        if self._group.ranks[0] == self.comm.rank:
            say(f"{fault}; going on with {len(self._group.ranks)} of {self.comm.size} ranks")
        self._decided.set()

    def _elect(self, lost: set[int]) -> NewGroup:
        """Asks the ranks that may be alive in turn, and leads if it comes to this one."""
        if self.comm.rank in lost:
            raise InputError("the other ranks have given it up")
        for rank in range(self.comm.rank):
            answer = None if rank in lost else self._ask(rank)
            if answer is None:
                lost.add(rank)
            elif answer["reason"]:
                raise InputError(answer["reason"])
            else:
                self.number += 1
                return NewGroup(tuple(answer["ranks"]), (answer["store"][0], answer["store"][1]))
        return self._lead(lost)

    def _lead(self, lost: set[int]) -> NewGroup:
        own, everyone = self.comm.rank, {*range(self.comm.size)}
        until = time.monotonic() + _GRACE_S
        while everyone - lost - {own, *self._waiting} and time.monotonic() < until:
            time.sleep(0.02)
        ranks = sorted({own, *self._waiting} - lost)
        answer: dict[str, Any] = {"reason": "", "ranks": ranks}
        try:
            alive = len(ranks) + sum(not _refuses(self.addresses[rank]) for rank in everyone.difference(ranks))
            if 2 * len(ranks) < alive:
                raise InputError(f"{len(ranks)} of {alive} ranks that may be alive reach each other, less than half")
            if self.claim is not None:
                self.claim(self.number + 1)
            self._store = _store((self.host, 0), is_master=True)
            answer["store"] = (self.host, self._store.port)
        except (InputError, OSError, RuntimeError) as error:
            answer["reason"] = summary(error)
            raise
        finally:
            self.number += 1  # later requests are answered at once
            waiting, self._waiting = self._waiting, {}
            for rank, connection in waiting.items():
                _send(connection, answer if rank in ranks else {"reason": "the other ranks go on without it"})
        return NewGroup(tuple(ranks), answer["store"])

    def _ask(self, rank: int) -> dict[str, Any] | None:
        """The answer of a rank that may lead; None if it is gone."""
        request = {"token": self.token, "number": self.number + 1, "rank": self.comm.rank}
        with suppress(OSError, ValueError), socket.create_connection(self.addresses[rank], _CONNECT_S) as connection:
            connection.settimeout(_ANSWER_S)
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile().readline())
            return answer
        return None

    def _listen(self, listener: socket.socket) -> None:
        """Takes in the requests of other ranks."""
        while True:
            connection, _ = listener.accept()
            with suppress(OSError, ValueError, KeyError, TypeError):
                connection.settimeout(_CONNECT_S)
                request = json.loads(connection.makefile().readline(1000))
                if request["token"] != self.token:
                    connection.close()
                elif request["number"] <= self.number:
                    _send(connection, {"reason": "the other ranks went on without it"})
                else:
                    self._waiting[int(request["rank"])] = connection


def _store(address: Address, *, is_master: bool = False) -> Any:
    client: Any = dist.TCPStore  # type: ignore[attr-defined]
    more = {"is_master": is_master, "wait_for_workers": False, "timeout": timedelta(seconds=_STORE_S)}
    return client(*address, **more)


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    with suppress(OSError), connection:  # that rank died meanwhile
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _refuses(address: Address) -> bool:
    """Whether nobody listens there on a host that answers, so that the process is dead for certain."""
    try:
        socket.create_connection(address, _CONNECT_S / 2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
