"""Requests between ranks over sockets, a line of JSON each way; a rank needs no process group for them."""

import ipaddress
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kasoku.core import InputError, summary
from kasoku.distributed.liveness import daemon

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


def is_loopback(address: Address) -> bool:
    """Whether only processes of the same host reach it."""
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
