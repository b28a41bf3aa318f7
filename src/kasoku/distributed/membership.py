"""The ranks of a training that goes on when ranks are lost or join: who they are, and their new process group.

Note: any rank may die, also the one that hosts the rendezvous. Every rank listens at an address that all know. After a
verdict (distributed/liveness.py) each survivor asks the lowest rank that is not lost, and the next one if that does not
answer. The rank that is asked leads: it waits a few seconds for all others, and answers with the list of those that
came and with the store of their new process group. Ranks are numbered anew, in the old order; newcomers, which found
the addresses in the run folder and asked the first rank, come last.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kasoku.core import Comm, InputError, Solo, say, summary
from kasoku.core.files import is_locked, write_text
from kasoku.distributed.counting_comm import Activity, CountingComm
from kasoku.distributed.liveness import LostRankError, Watchdog, end_process
from kasoku.distributed.requests import Address, answers, ask, is_loopback, is_there, listen, send
from kasoku.distributed.torch_comm import TorchComm, abort, destroy

TIMEOUT = timedelta(minutes=30)  # of a collective: longer than any evaluation or checkpoint
LAUNCHER = "KASOKU_LAUNCHER"  # the process id of the one that started the ranks of this host
MEMBERS = "members.json"  # in the run folder: the addresses of the ranks that train there
_GRACE_S = 4.0  # ranks hear of a death within two heartbeats of each other
_ANSWER_S = 12.0
_PATIENT_S = 600.0  # ranks that meet without a fault wait for each other: an evaluation may be under way
_THERE = timedelta(seconds=30)  # how far apart ranks that were found may come to the new group
_FOUND_S = 15.0  # how long a rank that starts waits for a new rank 0 to take over the run folder
_TRIES = 20  # of a newcomer, a second apart
_REFUSED = {"reason": "the other ranks go on without it"}


class MissingRankError(RuntimeError):
    """A rank that was found did not come to the new group."""


def backend() -> str:
    """Of process groups: control messages do not wait for the GPU."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def lost_ranks(folder: Path) -> bool:
    """Whether a training in this run folder has ended without a rank that it lost, which may come back now."""
    return "lost" in _read(folder)


@dataclass(frozen=True)
class NewGroup:
    """The ranks that go on: this one's number, the addresses of all, that of their store, and the group's number."""

    rank: int
    addresses: list[Address]
    store: Address
    number: int


class Membership:
    """The ranks of this training, on one of them.

    Attributes:
        comm: of all ranks; `regroup` changes it in place.
        first: the number of ranks at the start.
        newcomer: this rank was started while the others train, and has not joined them yet.
        lost: the ranks of this group that are dead.
        steps_on: ranks step on without the dead until they meet, so that a fault begins no election.
    """

    def __init__(self) -> None:
        self.watchdog = Watchdog(on_fault=self.on_fault)
        self.steps_on = self.newcomer = self._planned = False
        self.lost: set[int] = set()
        self.rank = self.first = self.number = self._most = 0
        self.addresses: list[Address] = []
        self.token = self._facts = ""
        self._folder: Path | None = None  # None: a fault ends the process
        self._own: Address | None = None
        self._waiting: dict[int, socket.socket] = {}  # ranks that asked this one
        self._joining: list[tuple[socket.socket, Address]] = []  # newcomers that did
        self._decided, self._deciding = threading.Event(), threading.Lock()
        self._group, self._store = NewGroup(0, [], ("", 0), 0), None  # type: NewGroup, Any

    def start(self, comm: Comm, store: Address) -> CountingComm:
        """Starts to watch over the ranks, as a Watchdog does; collective."""
        self.comm = self.watchdog.start(comm, store)
        self.comm.activity.membership = self
        self.token, self.first, self.rank = self.comm.broadcast_object(uuid.uuid4().hex), comm.size, comm.rank
        own = listen(store, self._answer)
        self.addresses = self.comm.gather_objects(own)
        outer = [address for address in self.addresses if not is_loopback(address)]
        if 0 < len(outer) < comm.size:  # on its own host the name of rank 0's may be a loopback address
            self.addresses = self.comm.gather_objects(listen(outer[0], self._answer) if is_loopback(own) else own)
        return self.comm

    def find(self, folder: Path | None) -> CountingComm | None:
        """The comm of this process alone, if ranks train in the run folder, which it may join. Not collective.

        Only where the folder is locked: a stranger's folder could name any address.
        """
        until = time.monotonic() + _FOUND_S
        while folder and self._find_addresses(folder):
            if is_locked(folder):
                self.comm, self.newcomer = CountingComm(Solo(), Activity(0.0)), True
                self.comm.activity.membership = self
                return self.comm
            if time.monotonic() > until or not any(answers(address) is True for address in self.addresses):
                return None
            time.sleep(0.2)
        return None

    def _find_addresses(self, folder: Path) -> bool:
        found = _read(folder)
        with suppress(KeyError, TypeError, ValueError):
            self.addresses = [(host, port) for host, port in found["addresses"]]
            self.token, self.first = found["token"], found["first"]
            return True
        return False

    def arm(self, folder: Path, facts: str, *, dead_s: float, most: int, steps_on: bool = False) -> None:
        """From now on ranks may be lost, and others join. Not collective.

        Args:
            folder: of the run, on a file system that all ranks share.
            facts: what newcomers must have in common with the ranks.
            dead_s: seconds without a heartbeat after which a rank is dead.
            most: ranks that the training has work for.
            steps_on: see the class.
        """
        self._folder, self._facts, self._most, self.steps_on = folder, facts, most, steps_on
        self.watchdog = replace(self.watchdog, dead_s=dead_s)
        if heartbeat := self.comm.activity.heartbeat:
            heartbeat.settings = self.watchdog
            heartbeat.detector.patience = round(dead_s / self.watchdog.beat_s)
        if not self.newcomer:
            self._announce()

    def disarm(self) -> None:
        """From now on a fault ends the process, and nobody joins. Not collective."""
        folder, self._folder = self._folder, None
        own = [[*address] for address in self.addresses]
        if folder is None or self.newcomer or self.rank or _read(folder).get("addresses") != own:
            return
        with suppress(OSError, InputError):  # a full disk
            file = folder / MEMBERS
            write_text(file, json.dumps({"lost": True})) if self.number else file.unlink()

    def _announce(self) -> None:
        """Tells the launcher that ranks may be lost, and newcomers where the ranks are."""
        if os.environ.get(LAUNCHER) == str(os.getppid()):
            os.kill(os.getppid(), signal.SIGUSR1)
        if self._folder and self.rank == 0:
            found = {"token": self.token, "first": self.first, "addresses": self.addresses}
            try:
                write_text(self._folder / MEMBERS, json.dumps(found))
            except (OSError, InputError) as error:
                say(f"nobody can join: {summary(error)}")

    @property
    def asked(self) -> bool:
        """Whether newcomers wait for this rank."""
        return bool(self._joining)

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
            self._planned = self.steps_on or not self.lost
        if not self._planned:
            return  # the watching thread finds them
        if heartbeat := self.comm.activity.heartbeat:
            heartbeat.end("")
        try:
            self._group = self._join() if self.newcomer else self._elect({*self.lost}, _PATIENT_S)
        except (InputError, OSError, RuntimeError) as error:
            raise LostRankError(f"rank {self.rank} cannot go on: {summary(error)}") from error
        self._decided.set()

    def regroup(self) -> None:
        """Replaces the process group by that of the ranks that were found. Collective among them.

        Raises MissingRankError if one of them does not come, LostRankError if none were found.
        """
        if not self._decided.wait(_ANSWER_S + 2 * _GRACE_S):
            raise LostRankError(f"rank {self.rank}: the other ranks do not answer")
        group, activity = self._group, self.comm.activity
        with self._deciding:
            self._decided.clear()
            self.rank, self.addresses, self.number = group.rank, group.addresses, group.number
            self.lost, self.newcomer, self._planned = set(), False, False
        if group.rank:  # newcomers ask the first rank
            for connection, _ in self._joining:
                connection.close()
            self._joining.clear()
        destroy()
        inner: Comm = Solo(self.comm.clock)
        if (size := len(group.addresses)) > 1:
            try:
                store = self._store if group.rank == 0 else _store(group.store)
                store = dist.PrefixStore(f"group {group.number}", store)  # type: ignore[attr-defined]
                store.set(f"rank {group.rank}", "")
                store.wait([f"rank {rank}" for rank in range(size)], _THERE)
            except RuntimeError as error:
                raise MissingRankError(f"rank {group.rank}: a rank is missing ({summary(error)})") from error
            dist.init_process_group(backend(), store=store, rank=group.rank, world_size=size, timeout=TIMEOUT)
            inner = TorchComm(clock=self.comm.clock)
        self.comm.replace(inner)
        self.watchdog.watch(activity, inner, group.store)
        self._announce()

    # ---- on the watching thread

    def on_fault(self, line: str) -> None:
        """After a verdict: finds the ranks that are left, or ends the process."""
        fault, lost = self.comm.activity.heartbeat.fault if self.comm.activity.heartbeat else ("", [])
        with self._deciding:
            if self._planned or not fault:  # the ranks meet, or have met
                return
            if self._folder is None or not lost:
                end_process(line)
            self.lost.update(lost)
        abort()
        if self.steps_on:
            return
        try:
            self._group = self._elect({*lost}, _ANSWER_S)
        except (InputError, OSError, RuntimeError) as error:
            end_process(f"{fault}; this rank cannot go on: {summary(error)}; {line.rpartition('; ')[2]}")
        if self._group.rank == 0:
            say(f"{fault}; going on with {len(self._group.addresses)} of {len(self.addresses)} ranks")
        self._decided.set()

    def _elect(self, lost: set[int], limit_s: float) -> NewGroup:
        """Asks the ranks that may be alive in turn, and leads if it comes to this one."""
        if self.rank in lost:
            raise InputError("the other ranks have given it up")
        for rank in range(self.rank):
            request = {"kind": "meet", "token": self.token, "number": self.number + 1, "rank": self.rank}
            answer = None if rank in lost else ask(self.addresses[rank], request, limit_s)
            if answer is not None:
                return _taken(answer)
            lost.add(rank)
        return self._lead(lost, limit_s)

    def _join(self) -> NewGroup:
        """Asks the first rank to be taken in, and waits until all ranks are at a boundary of steps."""
        reason = "no rank answers any more: start it again"
        for _ in range(_TRIES):
            for address in self.addresses if self._folder and self._find_addresses(self._folder) else ():
                with suppress(InputError):
                    self._own = self._own or listen(address, self._answer)
                request = {"kind": "join", "token": self.token, "address": self._own, "facts": self._facts}
                answer = ask(address, request, _PATIENT_S) if self._own else None
                if answer and not answer.get("again"):
                    return _taken(answer)
                reason = answer["reason"] if answer else reason
            time.sleep(1)
        raise InputError(reason)

    def _wait_for_others(self, lost: set[int], limit_s: float) -> None:
        """Waits for all ranks that may be alive to ask this one: with patience as long as they answer."""
        began_s = time.monotonic()
        while missing := {*range(len(self.addresses))} - lost - {self.rank, *self._waiting}:
            if (waited_s := time.monotonic() - began_s) > limit_s:
                return
            for rank in missing if waited_s > _GRACE_S else ():
                there = answers(self.addresses[rank])
                if there is False or (there is None and waited_s > _ANSWER_S):
                    lost.add(rank)
            time.sleep(0.02 if waited_s < _GRACE_S else 0.5)

    def _lead(self, lost: set[int], limit_s: float) -> NewGroup:
        """Answers all ranks that come, and newcomers."""
        own, size = self.rank, len(self.addresses)
        self._wait_for_others(lost, limit_s if limit_s == _PATIENT_S else _GRACE_S)
        answer: dict[str, Any] = {"reason": "", "number": self.number + 1}
        waiting, self._waiting, joining, self._joining = self._waiting, {}, self._joining, []
        connections = [*waiting.values(), *(connection for connection, _ in joining)]
        with ThreadPoolExecutor(max(1, len(connections))) as pool:
            there = {c for c, alive in zip(connections, pool.map(is_there, connections), strict=True) if alive}
        ranks = sorted({own, *(rank for rank, connection in waiting.items() if connection in there)} - lost)
        taken = [each for each in joining if each[0] in there][: max(0, self._most - len(ranks))]
        try:
            if 2 * len(ranks) < size:
                others = [self.addresses[rank] for rank in {*range(size)}.difference(ranks)]
                with ThreadPoolExecutor(len(others)) as pool:
                    alive = size - [*pool.map(answers, others)].count(False)
                if 2 * len(ranks) < alive:
                    line = f"{len(ranks)} of {alive} ranks that may be alive reach each other, less than half"
                    raise InputError(line)
            self.claim(self.number + 1)
            answer["addresses"] = [*(self.addresses[rank] for rank in ranks), *(address for _, address in taken)]
            host = self.addresses[own][0]
            self._store = _store((host, 0), is_master=True)
            answer["store"] = (host, self._store.port)
        except (InputError, OSError, RuntimeError) as error:
            answer["reason"] = summary(error)
            raise
        finally:
            self.number += 1  # later requests are answered at once
            for rank, connection in waiting.items():
                send(connection, answer | {"rank": ranks.index(rank)} if rank in ranks else _REFUSED)
            for place, (connection, _) in enumerate(taken, len(ranks)):
                send(connection, answer | {"rank": place})
            for connection, _ in joining:
                connection.close()
        return NewGroup(ranks.index(own), answer["addresses"], answer["store"], answer["number"])

    def claim(self, number: int) -> None:
        """Claims the number of a group for this process. Raises InputError if another group has it."""
        folder = self._folder or Path()
        if not (folder / "recipe.toml").exists():
            raise InputError(f"the run folder {folder} is not on this host")
        try:
            (folder / f"group-{self.token[:8]}-{number}").touch(exist_ok=False)
        except FileExistsError as error:
            raise InputError("another group of ranks goes on") from error

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        """Takes in the request of another rank."""
        if request["token"] != self.token:
            connection.close()
        elif request["kind"] == "join":
            self._let_join(connection, request)
        elif request["number"] <= self.number:
            send(connection, _REFUSED)
        else:
            self._waiting[int(request["rank"])] = connection

    def _let_join(self, connection: socket.socket, request: dict[str, Any]) -> None:
        full = len(self.addresses) + len(self._joining) >= self._most and not self.lost
        if request["facts"] != self._facts:
            line = "the ranks train another recipe, or with another version of kasoku or torch: join with theirs"
            send(connection, {"reason": line})
        elif full:  # unless one of them has just died
            send(connection, {"reason": f"the batch has no part for more than {self._most} ranks", "again": True})
        else:
            self._joining.append((connection, tuple(request["address"])))


def _read(folder: Path) -> dict[str, Any]:
    """What the run folder says of its ranks; empty where it says nothing."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / MEMBERS).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _taken(answer: dict[str, Any]) -> NewGroup:
    """The group of an answer. Raises InputError if this rank is not in it."""
    if answer["reason"]:
        raise InputError(answer["reason"])
    addresses = [(host, port) for host, port in answer["addresses"]]
    return NewGroup(answer["rank"], addresses, (answer["store"][0], answer["store"][1]), answer["number"])


def _store(address: Address, *, is_master: bool = False) -> Any:
    client: Any = dist.TCPStore  # type: ignore[attr-defined]
    return client(*address, is_master=is_master, wait_for_workers=False, timeout=_THERE)
