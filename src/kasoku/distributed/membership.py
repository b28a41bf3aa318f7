"""The ranks of a training that goes on when ranks are lost or join: who they are, and their new process group.

Note: no rank is needed. Every rank listens at an address that all know from the start, so the rank that hosts the
rendezvous may be the one that dies. After a verdict (distributed/liveness.py) each survivor asks the lowest rank that
is not lost, and the next one if that does not answer. The rank that is asked leads: it waits a few seconds for all
others, and answers with the list of those that came and with the store of their new process group. Ranks are numbered
anew, in the old order; newcomers, which found the addresses in the run folder and asked the first rank, come last.

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
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kasoku.core import Comm, InputError, Solo, say, summary
from kasoku.core.files import write_text
from kasoku.distributed.counting_comm import Activity, CountingComm
from kasoku.distributed.liveness import LostRankError, Watchdog, daemon, end_process
from kasoku.distributed.torch_comm import TorchComm, abort

TIMEOUT = timedelta(minutes=30)  # of a collective: longer than any evaluation or checkpoint
LAUNCHER = "KASOKU_LAUNCHER"  # the process id of the one that started the ranks of this host
_GRACE_S = 4.0  # ranks hear of a death within two heartbeats of each other
_CONNECT_S, _ANSWER_S, _STORE_S = 2.0, 12.0, 60.0
_JOIN_S = 600.0  # a newcomer waits as long for a boundary of steps: an evaluation may be under way
MEMBERS = "members.json"  # in the run folder: the addresses of the ranks that train there
_PROBES = 8  # addresses that a rank which starts tries, each up to _CONNECT_S
_REFUSED = {"reason": "the other ranks go on without it"}
Address = tuple[str, int]


def backend() -> str:
    """Of process groups: control messages do not wait for the GPU."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def lost_ranks(folder: Path) -> bool:
    """Whether ranks were lost in a training that has ended in this run folder; they may come back too late."""
    with suppress(OSError, ValueError):
        return "lost" in json.loads((folder / MEMBERS).read_text(encoding="utf-8"))
    return False


@dataclass(frozen=True)
class NewGroup:
    """The ranks that go on: this one's number, the addresses of all, and that of their store."""

    rank: int
    addresses: list[Address]
    store: Address


class Membership:
    """The ranks of this training, on one of them.

    Attributes:
        comm: of all ranks; `regroup` changes it in place.
        first: the number of ranks at the start.
        folder: the run folder, if a rank was started again while the others train there and has not joined them yet.
        steps_on: ranks step on without the dead, until they meet: a fault then only frees those that wait for it.
        lost: the ranks of this group that are dead.
    """

    def __init__(self) -> None:
        self.watchdog = Watchdog(on_fault=self.on_fault)
        self.folder: Path | None = None  # None: a fault ends the process
        self.number = 0  # of the group
        self.steps_on = self.newcomer = False
        self.lost: set[int] = set()
        self.most = 0  # ranks that the training has work for
        self._waiting: dict[int, socket.socket] = {}  # ranks that asked this one
        self._joining: list[tuple[socket.socket, Address]] = []  # newcomers that did
        self._decided, self._group = threading.Event(), NewGroup(0, [], ("", 0))
        self._store: Any = None

    def start(self, comm: Comm, store: Address) -> CountingComm:
        """Starts to watch over the ranks, as a Watchdog does; collective."""
        self.comm = self.watchdog.start(comm, store)
        self.comm.activity.membership = self
        self.token, self.first = self.comm.broadcast_object(uuid.uuid4().hex), comm.size
        self.addresses: list[Address] = self.comm.gather_objects(self._open(store))
        return self.comm

    def _open(self, reached: Address) -> Address:
        """Listens at the address by which this rank reaches that one; returns it."""
        with socket.create_connection(reached, _CONNECT_S) as connection:
            self.host = connection.getsockname()[0]
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, 0), family=family)
        daemon("kasoku membership", self._listen, listener)
        return self.host, listener.getsockname()[1]

    def find(self, folder: Path | None) -> CountingComm | None:
        """The comm of this process alone, if ranks train in the run folder, which it may join. Not collective."""
        with suppress(OSError, ValueError, KeyError):
            found = json.loads(((folder or Path()) / MEMBERS).read_text(encoding="utf-8"))
            self.token, self.first, self.addresses = found["token"], found["first"], [*map(tuple, found["addresses"])]
            if any(self._ask({"kind": "probe"}, address) for address in self.addresses[:_PROBES]):
                self.comm = CountingComm(Solo(), Activity(0.0))
                self.comm.activity.membership, self.newcomer = self, True
                return self.comm
        return None

    def arm(self, folder: Path | None, dead_s: float, most: int, *, steps_on: bool = False) -> None:
        """From now on ranks may be lost, and others join; None: a fault ends the process. Not collective.

        Args:
            folder: of the run, on a file system that all ranks share.
            dead_s: seconds without a heartbeat after which a rank is dead.
            most: ranks that the training has work for.
            steps_on: see the class.
        """
        if self.folder and not folder and self.comm.rank == 0:
            file = self.folder / MEMBERS
            write_text(file, json.dumps({"lost": True})) if self.number else file.unlink(missing_ok=True)
        self.folder, self.most, self.steps_on = folder, most, steps_on
        self.watchdog = replace(self.watchdog, dead_s=dead_s)
        if heartbeat := self.comm.activity.heartbeat:
            heartbeat.settings = self.watchdog
            heartbeat.detector.patience = round(dead_s / self.watchdog.beat_s)
        self._announce()

    def _announce(self) -> None:
        """Writes where newcomers find the ranks."""
        if self.folder and self.comm.rank == 0 and not self.newcomer:
            found = {"token": self.token, "first": self.first, "addresses": self.addresses}
            write_text(self.folder / MEMBERS, json.dumps(found))

    @property
    def asked(self) -> bool:
        """Whether newcomers wait for this rank."""
        return bool(self._joining)

    def close(self, failed: str) -> None:
        """Announces that this rank has ended, or that it `failed`, and destroys the process group. Not collective."""
        if self.comm.activity.heartbeat:
            self.comm.activity.heartbeat.close(failed)
        if dist.is_initialized():
            dist.destroy_process_group()

    def meet(self) -> None:
        """Finds the ranks that are left and those that join, without a fault. Collective among them."""
        if heartbeat := self.comm.activity.heartbeat:
            heartbeat.end("")
        if self.lost and not self.steps_on:
            return  # the watching thread does so
        try:
            self._group = self._join() if self.newcomer else self._elect({*self.lost})
        except (InputError, OSError, RuntimeError) as error:
            raise LostRankError(f"rank {self.comm.rank}: this rank cannot go on: {summary(error)}") from error
        self._decided.set()

    def regroup(self) -> None:
        """Replaces the process group by that of the ranks that were found. Collective among them.

        Raises LostRankError if they do not meet.
        """
        if not self._decided.wait(_ANSWER_S + 2 * _GRACE_S):
            raise LostRankError(f"rank {self.comm.rank}: the other ranks do not answer")
        self._decided.clear()
        self._tell_launcher()
        group, activity = self._group, self.comm.activity
        self.addresses, self.newcomer, self.lost = group.addresses, False, set()
        if dist.is_initialized():
            dist.destroy_process_group()
        inner: Comm = Solo(self.comm.clock)
        try:
            if (size := len(group.addresses)) > 1:
                store = self._store if group.rank == 0 else _store(group.store)
                store = dist.PrefixStore(f"group {self.number}", store)  # type: ignore[attr-defined]
                dist.init_process_group(backend(), store=store, rank=group.rank, world_size=size, timeout=TIMEOUT)
                inner = TorchComm(clock=self.comm.clock)
            self.comm.replace(inner)
            self.watchdog.watch(activity, inner, group.store)
        except (RuntimeError, InputError) as error:
            line = f"rank {group.rank}: the ranks that are left do not meet ({summary(error)})"
            raise LostRankError(line) from error
        self._announce()

    def _tell_launcher(self) -> None:
        """Keeps the process that started this one from ending all ranks; it starts the dead again."""
        if os.environ.get(LAUNCHER) == str(os.getppid()):
            os.kill(os.getppid(), signal.SIGUSR1)

    # ---- on the watching thread

    def on_fault(self, line: str) -> None:
        """After a verdict: finds the ranks that are left, or ends the process."""
        fault, lost = self.comm.activity.heartbeat.fault
        if self.folder is None or not lost:
            end_process(line)
        self.lost.update(lost)
        abort()
        if self.steps_on:
            self._tell_launcher()
            return
        try:
            self._group = self._elect({*lost})
        except (InputError, OSError, RuntimeError) as error:
            end_process(f"{fault}; this rank cannot go on: {summary(error)}; {line.rpartition('; ')[2]}")
        if self._group.rank == 0:
            say(f"{fault}; going on with {len(self._group.addresses)} of {self.comm.size} ranks")
        self._decided.set()

    def _elect(self, lost: set[int]) -> NewGroup:
        """Asks the ranks that may be alive in turn, and leads if it comes to this one."""
        if self.comm.rank in lost:
            raise InputError("the other ranks have given it up")
        for rank in range(self.comm.rank):
            request = {"kind": "meet", "number": self.number + 1, "rank": self.comm.rank}
            answer = None if rank in lost else self._ask(request, self.addresses[rank])
            if answer is not None:
                return self._taken(answer)
            lost.add(rank)
        return self._lead(lost)

    def _taken(self, answer: dict[str, Any]) -> NewGroup:
        if answer["reason"]:
            raise InputError(answer["reason"])
        self.number = answer["number"]
        return NewGroup(answer["rank"], [(host, port) for host, port in answer["addresses"]], tuple(answer["store"]))

    def _join(self) -> NewGroup:
        """Asks the first rank that answers to be taken in, and waits until all ranks are at a boundary of steps."""
        for address in self.addresses:
            with suppress(OSError, ValueError):
                request = {"kind": "join", "address": self._open(address)}
                if answer := self._ask(request, address, _JOIN_S):
                    return self._taken(answer)
        raise InputError("no rank answers any more: start it again")

    def _lead(self, lost: set[int]) -> NewGroup:
        own, everyone = self.comm.rank, {*range(self.comm.size)}
        until = time.monotonic() + _GRACE_S
        while everyone - lost - {own, *self._waiting} and time.monotonic() < until:
            time.sleep(0.02)
        ranks = sorted({own, *self._waiting} - lost)
        answer: dict[str, Any] = {"reason": "", "number": self.number + 1}
        joining, self._joining = self._joining, []
        taken: list[tuple[socket.socket, Address]] = []
        try:
            alive = len(ranks) + sum(not _refuses(self.addresses[rank]) for rank in everyone.difference(ranks))
            if 2 * len(ranks) < alive:
                raise InputError(f"{len(ranks)} of {alive} ranks that may be alive reach each other, less than half")
            self.claim(self.number + 1)
            taken = [each for each in joining if _is_there(each[0])][: max(0, self.most - len(ranks))]
            answer["addresses"] = [*(self.addresses[rank] for rank in ranks), *(address for _, address in taken)]
            self._store = _store((self.host, 0), is_master=True)
            answer["store"] = (self.host, self._store.port)
        except (InputError, OSError, RuntimeError) as error:
            answer["reason"] = summary(error)
            raise
        finally:
            self.number += 1  # later requests are answered at once
            waiting, self._waiting = self._waiting, {}
            for rank, connection in waiting.items():
                place = {"rank": ranks.index(rank)} if rank in ranks else _REFUSED
                _send(connection, answer | place)
            for connection, address in joining:
                number = answer.get("addresses", []).index(address) if (connection, address) in taken else 0
                full = {"reason": f"the batch has no part for more than {self.most} ranks"}
                _send(connection, answer | ({"rank": number} if number else full))
        return NewGroup(ranks.index(own), answer["addresses"], answer["store"])

    def claim(self, number: int) -> None:
        """Claims the number of a group for this process. Raises InputError if another group has it."""
        folder = self.folder or Path()
        if not (folder / "recipe.toml").exists():
            raise InputError(f"the run folder {folder} is not on this host")
        try:
            (folder / f"group-{self.token[:8]}-{number}").touch(exist_ok=False)
        except FileExistsError as error:
            raise InputError("another group of ranks goes on") from error

    def _ask(self, request: dict[str, Any], address: Address, limit_s: float = _ANSWER_S) -> dict[str, Any] | None:
        """The answer of a rank; None if it is gone."""
        with suppress(OSError, ValueError), socket.create_connection(address, _CONNECT_S) as connection:
            connection.settimeout(limit_s)
            connection.sendall(json.dumps({**request, "token": self.token}).encode() + b"\n")
            lines = connection.makefile()
            while not (answer := json.loads(lines.readline())):  # it asks whether this rank is still there
                connection.sendall(b"{}\n")
            found: dict[str, Any] = answer
            return found
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
                elif request["kind"] == "probe":
                    _send(connection, {"reason": ""})
                elif request["kind"] == "join":
                    self._joining.append((connection, tuple(request["address"])))
                elif request["number"] <= self.number:
                    _send(connection, _REFUSED)
                else:
                    self._waiting[int(request["rank"])] = connection


def _store(address: Address, *, is_master: bool = False) -> Any:
    client: Any = dist.TCPStore  # type: ignore[attr-defined]
    more = {"is_master": is_master, "wait_for_workers": False, "timeout": timedelta(seconds=_STORE_S)}
    return client(*address, **more)


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    with suppress(OSError), connection:  # that rank died meanwhile
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _is_there(connection: socket.socket) -> bool:
    """Whether a newcomer still waits for the answer."""
    with suppress(OSError):
        connection.sendall(b"{}\n")
        return bool(connection.recv(16))
    return False


def _refuses(address: Address) -> bool:
    """Whether nobody listens there on a host that answers, so that the process is dead for certain."""
    try:
        socket.create_connection(address, _CONNECT_S / 2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
