"""Two hosts on this machine whose link takes its time: what every frame says arrives `delay_s` later, each way.

Each host is a network namespace with a TAP device, ve0; this process stands between the two and hands on each frame
when its time has come, as a long cable does (the kernel's own netem is not on every machine). Frames are handed on
as the kernel cuts them, up to 64 KiB of TCP at a time, so that it costs little. As root, on Linux.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator

ADDRESS = "10.98.0.{}"  # of host 1, 2
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP_NO_PI_VNET = 0x0002 | 0x1000 | 0x4000  # IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
_CSUM_TSO = 0x01 | 0x02 | 0x04  # TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6
_QUEUE = 4096  # frames under way in one direction; more are dropped, as a real link would
_LARGEST = 1 << 17


@contextlib.contextmanager
def linked(delay_s: float) -> Iterator[list[str]]:
    """The names of two namespaces with a link of so many seconds each way between them; removed at the end."""
    names = [f"kl{os.getpid()}-{i}" for i in range(2)]
    taps: list[int] = []
    stop = threading.Event()
    try:
        for i, name in enumerate(names):
            _ip("netns", "add", name)
            taps.append(_tap(device := f"kl{os.getpid()}{'ab'[i]}"))
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "link", "set", device, "name", "ve0")
            _ip("-n", name, "addr", "add", f"{ADDRESS.format(i + 1)}/24", "dev", "ve0")
            for up in ("lo", "ve0"):
                _ip("-n", name, "link", "set", up, "up")
        cable = threading.Thread(target=_carry, args=(taps, delay_s, stop), daemon=True)
        cable.start()
        yield names
        stop.set()
        cable.join()
    finally:
        stop.set()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        for fd in taps:
            os.close(fd)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _tap(name: str) -> int:
    """A new TAP device, whose frames come with the kernel's offload header."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_NO_PI_VNET))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _CSUM_TSO)
    return fd


def _carry(taps: list[int], delay_s: float, stop: threading.Event) -> None:
    """Reads what comes, and hands it on `delay_s` later, until `stop`."""
    under_way: deque[tuple[float, int, bytes]] = deque()  # one delay for all: what came first goes first
    with selectors.DefaultSelector() as selector:
        for fd, other in (taps, taps[::-1]):
            selector.register(fd, selectors.EVENT_READ, other)
        while not stop.is_set():
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.2
            for key, _ in selector.select(wait_s):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        frame = os.read(key.fd, _LARGEST)
                        if len(under_way) < _QUEUE:
                            under_way.append((time.monotonic() + delay_s, key.data, frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, to, frame = under_way.popleft()
                with contextlib.suppress(OSError):  # the other end is not up, or full: lost
                    os.write(to, frame)
