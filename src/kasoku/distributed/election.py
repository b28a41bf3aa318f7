"""Who the ranks of a training are, and how they agree on it when some are lost or new.

Note: any rank may die, also the one that hosts the rendezvous. Every rank listens at an address that all know. After a
verdict (distributed/liveness.py) each survivor asks the lowest rank that is not lost, and the next one if that does not
answer. The rank that is asked leads: it waits for all others, and answers with the list of those that came and with the
store of their new process group. Ranks are numbered anew, in the old order; newcomers, which found the addresses in the
run folder and asked the first rank, come last.

Note: at most one group goes on (docs/faults.md). The leader claims the group's number in the run folder, by a file that
only one process can create; a group whose leader cannot is ended. A rank that was stopped or cut off cannot finish a
collective any more, so it changes nothing in the run folder but by a write that was under way.

Note: requests go over sockets, a line of JSON each way, so a rank needs no process group for them.
"""

import json
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from kasoku.core import Comm, InputError, say, summary
from kasoku.core.files import is_locked, read_json, write_text
from kasoku.distributed.liveness import daemon, open_store

MEMBERS = "members.json"  # in the run folder: the addresses of the ranks that train there
ANSWER_S, GRACE_S = 12.0, 4.0  # after a verdict; ranks hear of a death within two heartbeats of each other
PATIENT_S = 600.0  # ranks that meet without a fault wait for each other: an evaluation may be under way
_FOUND_S = 15.0  # how long a rank that starts waits for a new rank 0 to take over the run folder
_TRIES = 20  # of a newcomer, a second apart
_REFUSED = {"reason": "the other ranks go on without it"}
_CONNECT_S, _REACH_S = 2.0, 30.0
Address = tuple[str, int]


def listen(reached: Address, handle: Callable[[socket.socket, dict[str, Any]], object]) -> Address:
    """Listens at the address by which this host reaches another one, and returns it.

    `handle` takes the connection of each request, which it answers by `send` now or later, and the request. Raises
    InputError if the other address does not answer.
    """
    try:
        with socket.create_connection(reached, _REACH_S) as connection:
            host = connection.getsockname()[0]
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        advice = "check that all hosts reach each other"
        raise InputError(f"{reached[0]}:{reached[1]} does not answer ({summary(error)}): {advice}") from error

    def take_in() -> None:
        while True:
            connection, _ = listener.accept()
            with suppress(OSError, ValueError, KeyError, TypeError):  # of a stranger
                connection.settimeout(_CONNECT_S)
                handle(connection, json.loads(connection.makefile().readline(1000)))

    daemon("kasoku requests", take_in)
    return host, listener.getsockname()[1]


def ask(address: Address, request: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
    """The answer to a request; None if there is none, or none in time."""
    with suppress(OSError, ValueError), socket.create_connection(address, _CONNECT_S) as connection:
        connection.settimeout(limit_s)
        connection.sendall(json.dumps(request).encode() + b"\n")
        lines = connection.makefile()
        while not (answer := json.loads(lines.readline())):  # `is_there` asks
            connection.sendall(b"{}\n")
        found: dict[str, Any] = answer
        return found
    return None


def send(connection: socket.socket, answer: dict[str, Any]) -> None:
    """Answers a request; does nothing if the other rank has died."""
    with suppress(OSError), connection:
        connection.sendall(json.dumps(answer).encode() + b"\n")


def is_there(connection: socket.socket) -> bool:
    """Whether the other rank still waits for the answer."""
    with suppress(OSError):
        connection.sendall(b"{}\n")
        return bool(connection.recv(16))
    return False


def answers(address: Address) -> bool | None:
    """Whether a process listens there; None if its host does not answer. False: the process is dead for certain."""
    try:
        socket.create_connection(address, _CONNECT_S / 2).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


@dataclass(frozen=True)
class NewGroup:
    """The ranks that go on: this one's number, the addresses of all, that of their store, and the group's number."""

    rank: int
    addresses: list[Address]
    store: Address
    number: int


class Election:
    """The ranks of a training as one of them sees them, and the choice of those that go on."""

    def __init__(self) -> None:
        self.rank = self.number = 0  # this rank's in the group, and the group's
        self.first = 0  # how many ranks the training started with
        self.addresses: list[Address] = []  # of all ranks
        self.lost: set[int] = set()  # the ranks of this group that are dead
        self.token = ""
        self.folder: Path | None = None  # of the run; None while ranks may not be lost
        self.store: Any = None  # of the new group, on the rank that led
        self._facts, self._most = "", 0
        self._own: Address | None = None
        self._waiting: dict[int, socket.socket] = {}  # ranks that asked this one
        self.joining: list[tuple[socket.socket, Address]] = []  # newcomers that wait for this rank

    def start(self, comm: Comm, store: Address) -> None:
        """Listens, and tells all other ranks where; collective."""
        self.token, self.first, self.rank = comm.broadcast_object(uuid.uuid4().hex), comm.size, comm.rank
        own = listen(store, self._answer)
        self.addresses = comm.gather_objects(own)
        outer = [(host, port) for host, port in self.addresses if not ip_address(host.partition("%")[0]).is_loopback]
        if 0 < len(outer) < comm.size:  # on its own host the name of rank 0's may be a loopback address
            self.addresses = comm.gather_objects(own if own in outer else listen(outer[0], self._answer))

    def find(self, folder: Path | None) -> bool:
        """Whether ranks train in the run folder. Not collective.

        Only where the folder is locked: a stranger's folder could name any address.
        """
        until = time.monotonic() + _FOUND_S
        while folder and self._find_addresses(folder):
            if is_locked(folder):
                return True
            if time.monotonic() > until or not any(answers(address) is True for address in self.addresses):
                return False
            time.sleep(0.2)
        return False

    def _find_addresses(self, folder: Path) -> bool:
        found = _read(folder)
        with suppress(KeyError, TypeError, ValueError):
            self.addresses = [(host, port) for host, port in found["addresses"]]
            self.token, self.first = found["token"], found["first"]
            return True
        return False

    def open(self, folder: Path, facts: str, most: int) -> None:
        """Lets ranks join: at most `most`, with the same `facts`. Not collective."""
        self.folder, self._facts, self._most = folder, facts, most

    def announce(self) -> None:
        """Tells newcomers where the ranks are, by a file of rank 0."""
        if self.folder and self.rank == 0:
            found = {"token": self.token, "first": self.first, "addresses": self.addresses}
            try:
                write_text(self.folder / MEMBERS, json.dumps(found))
            except (OSError, InputError) as error:
                say(f"nobody can join: {summary(error)}")

    def over(self) -> None:
        """The training ends: nobody joins, and a rank that was lost may come back too late."""
        folder, self.folder = self.folder, None
        own = [[*address] for address in self.addresses]
        if folder is None or self.rank or _read(folder).get("addresses") != own:
            return
        with suppress(OSError, InputError):  # a full disk
            file = folder / MEMBERS
            write_text(file, json.dumps({"lost": True})) if self.number else file.unlink()

    def take_place(self, group: NewGroup) -> None:
        """Goes over to a new group."""
        self.rank, self.addresses, self.number, self.lost = group.rank, group.addresses, group.number, set()
        if group.rank:  # newcomers ask the first rank
            for connection, _ in self.joining:
                connection.close()
            self.joining.clear()

    def elect(self, lost: set[int], limit_s: float) -> NewGroup:
        """Asks the ranks that may be alive in turn, and leads if it comes to this one. Collective among the living.

        Raises InputError if this rank cannot go on.
        """
        if self.rank in lost:
            raise InputError("the other ranks have given it up")
        for rank in range(self.rank):
            request = {"kind": "meet", "token": self.token, "number": self.number + 1, "rank": self.rank}
            answer = None if rank in lost else ask(self.addresses[rank], request, limit_s)
            if answer is not None:
                return _taken(answer)
            lost.add(rank)
        return self._lead(lost, limit_s)

    def join(self) -> NewGroup:
        """Asks the first rank to be taken in, and waits until all ranks are at a boundary of steps.

        Raises InputError if they refuse this one, if none answers, or if the training has ended.
        """
        reason = "no rank answers any more: start it again"
        for _ in range(_TRIES):
            for address in self.addresses if self.folder and self._find_addresses(self.folder) else ():
                with suppress(InputError):
                    self._own = self._own or listen(address, self._answer)
                request = {"kind": "join", "token": self.token, "address": self._own, "facts": self._facts}
                answer = ask(address, request, PATIENT_S) if self._own else None
                if answer and not answer.get("again"):
                    return _taken(answer)
                reason = answer["reason"] if answer else reason
            if self.folder and lost_ranks(self.folder):
                raise InputError("the training has ended meanwhile: start it again")
            time.sleep(1)
        raise InputError(reason)

    def _wait_for_others(self, lost: set[int], limit_s: float) -> None:
        """Waits for all ranks that may be alive to ask this one: with patience as long as they answer."""
        began_s = time.monotonic()
        while missing := {*range(len(self.addresses))} - lost - {self.rank, *self._waiting}:
            if (waited_s := time.monotonic() - began_s) > limit_s:
                return
            lost.update(rank for rank in missing if is_gone(self.addresses[rank], waited_s))
            time.sleep(0.02 if waited_s < GRACE_S else 0.5)

    def _lead(self, lost: set[int], limit_s: float) -> NewGroup:
        """Answers all ranks that come, and newcomers."""
        own, size = self.rank, len(self.addresses)
        self._wait_for_others(lost, limit_s if limit_s == PATIENT_S else GRACE_S)
        answer: dict[str, Any] = {"reason": "", "number": self.number + 1}
        waiting, self._waiting, joining, self.joining = self._waiting, {}, self.joining, []
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
            self.store = open_store((host, 0), is_master=True)
            answer["store"] = (host, self.store.port)
        except (InputError, OSError, RuntimeError) as error:
            answer["reason"] = summary(error)
            raise
        finally:
            self.number += 1  # later requests are answered at once
            late, self._waiting = self._waiting, {}
            for connection in late.values():
                send(connection, _REFUSED)
            for rank, connection in waiting.items():
                send(connection, answer | {"rank": ranks.index(rank)} if rank in ranks else _REFUSED)
            for place, (connection, _) in enumerate(taken, len(ranks)):
                send(connection, answer | {"rank": place})
            for connection, _ in joining:
                connection.close()
        return NewGroup(ranks.index(own), answer["addresses"], answer["store"], answer["number"])

    def claim(self, number: int) -> None:
        """Claims the number of a group for this process. Raises InputError if another group has it."""
        folder = self.folder or Path()
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
        full = len(self.addresses) + len(self.joining) >= self._most and not self.lost
        if request["facts"] != self._facts:
            line = "the ranks train another recipe, or with another version of kasoku or torch: join with theirs"
            send(connection, {"reason": line})
        elif full:  # unless one of them has just died
            send(connection, {"reason": f"the batch has no part for more than {self._most} ranks", "again": True})
        else:
            self.joining.append((connection, tuple(request["address"])))


def lost_ranks(folder: Path) -> bool:
    """Whether a training in this run folder has ended without a rank that it lost, which may come back now."""
    return "lost" in _read(folder)


def _read(folder: Path) -> dict[str, Any]:
    """What the run folder says of its ranks; empty where it says nothing."""
    with suppress(InputError):
        return read_json(folder / MEMBERS)
    return {}


def _taken(answer: dict[str, Any]) -> NewGroup:
    """The group of an answer. Raises InputError if this rank is not in it."""
    if answer["reason"]:
        raise InputError(answer["reason"])
    addresses = [(host, port) for host, port in answer["addresses"]]
    return NewGroup(answer["rank"], addresses, (answer["store"][0], answer["store"][1]), answer["number"])


def is_gone(address: Address, waited_s: float) -> bool:
    """Whether a rank that others have waited for so long is dead, or its host does not answer. False before GRACE_S."""
    there = answers(address) if waited_s > GRACE_S else True
    return there is False or (there is None and waited_s > ANSWER_S)
