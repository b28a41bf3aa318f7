"""Memory that ranks of one host both have before them: what one asks another of it goes by address, not by a network.

Note: who is near. Two processes of one Linux system that see each other's /proc and the same network, and that can map
each other's memory, which is tried. Ranks that a test or a cluster gives hosts of their own, by network namespaces or
containers, are not near, nor is anyone where the system has no such memory to give: then bytes are sent.

Note: who may write. As with what is sent: between question and answer whoever is asked has the memory, what it was sent
as well, otherwise the rank that made it. It goes with the last process that has it mapped; what a rank leaves that dies
the others have until they meet.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kasoku.core import Comm

PLACE = 4  # numbers that say where something lies: process, descriptor, inode, bytes from the start
_ALIGNED = 64  # bytes: a line of the cache
_Made = dict[int, tuple[int, int]]  # descriptor and inode, by address


class Segments:
    """A rank's memory for what it sends and receives.

    Args:
        comm: all ranks make theirs together; ranks that take turns in one process have none.

    Attributes: `near`: the other ranks that can be told a place in place of bytes.
    """

    def __init__(self, comm: Comm) -> None:
        self.near: frozenset[int] = frozenset()
        self._made: _Made = {}
        self._mapped: dict[tuple[int, ...], Tensor] = {}
        self._device = 0  # where such memory is, as the system counts
        self._left = torch.zeros(0, dtype=torch.uint8)
        if comm.own_threads:
            self.near = self._neighbours(comm)

    def _neighbours(self, comm: Comm) -> frozenset[int]:
        """The ranks that read here what we read there."""
        probe = self._new(8)
        if probe is not None:
            probe.fill_(comm.rank % 251)
        told = comm.gather_objects((_system(), () if probe is None else self.place(probe)))
        mine, read = told[comm.rank][0], set()
        for rank, (system, place) in enumerate(told):
            if rank != comm.rank and mine and system == mine and place:
                with suppress(OSError, ValueError):
                    if self.at(place, 8, torch.uint8).eq(rank % 251).all():
                        read.add(rank)
        self.forget()
        theirs = comm.gather_objects(read)
        return frozenset(rank for rank in read if comm.rank in theirs[rank])

    def open(self, pieces: int, size: int) -> None:
        """Makes room for so many calls of `zeros` of so many bytes in all, of which what is not used costs nothing."""
        found = self._new(size + pieces * _ALIGNED) if self.near and size else None
        self._left = torch.zeros(0, dtype=torch.uint8) if found is None else found

    def zeros(self, n: int, dtype: torch.dtype) -> Tensor:
        """So many zeros, where ranks that are near can have them, if there are such."""
        size = n * dtype.itemsize
        if not 0 < size <= len(self._left):
            return torch.zeros(n, dtype=dtype)
        found, self._left = self._left[:size], self._left[-(-size // _ALIGNED) * _ALIGNED :]
        return found.view(dtype)

    def _new(self, size: int) -> Tensor | None:
        """So many bytes of memory of its own, or None where the system has no such."""
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):  # absent where Python was built on an older libc
            return None
        try:
            descriptor = os.memfd_create("kasoku")
        except OSError:
            return None
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
        except (OSError, ValueError, OverflowError):
            os.close(descriptor)
            return None
        found, told = torch.frombuffer(memory, dtype=torch.uint8), os.fstat(descriptor)
        self._device = told.st_dev
        self._made[found.data_ptr()] = made = (descriptor, told.st_ino)
        weakref.finalize(memory, _let_go, self._made, found.data_ptr(), made).atexit = False
        return found

    def place(self, x: Tensor) -> Sequence[int]:
        """Where x lies, for a rank that is near; empty for memory that was not made here."""
        start = x.untyped_storage().data_ptr()
        made = self._made.get(start)
        return (os.getpid(), *made, x.data_ptr() - start) if made else ()

    def at(self, place: Sequence[int], n: int, dtype: torch.dtype) -> Tensor:
        """So many elements at another rank's place.

        Raises OSError where that rank is gone or has let go of it, or where this process may open or map no more.
        """
        *whose, start = place
        whole = self._mapped.get(tuple(whose))
        if whole is None:
            process, descriptor, inode = whose
            opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(opened)
                if (found.st_dev, found.st_ino) != (self._device, inode):
                    raise ProcessLookupError(f"process {process} has another file by now")
                whole = torch.frombuffer(mmap.mmap(opened, found.st_size), dtype=torch.uint8)
            finally:
                os.close(opened)
            self._mapped[tuple(whose)] = whole
        return whole[start : start + n * dtype.itemsize].view(dtype)

    def forget(self) -> None:
        """Lets go of other ranks' memory."""
        self._mapped.clear()


def _system() -> tuple[object, ...]:
    """What two processes have alike that may be near; empty where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()
        return (boot, os.getuid(), *(os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")))
    except OSError:
        return ()


def _let_go(made: _Made, start: int, mine: tuple[int, int]) -> None:
    """The memory is unmapped, and its address may be another's by now."""
    if made.get(start) == mine:
        made.pop(start, None)
    os.close(mine[0])
