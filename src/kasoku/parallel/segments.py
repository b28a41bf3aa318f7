"""Memory that ranks of one host both have before them: what one asks another of it goes by address, not by a network.

Note: who is near. Two processes of one Linux system that see each other's /proc and the same network, and that can map
each other's memory, which is tried. Ranks that a test or a cluster gives hosts of their own, by network namespaces or
containers, are not near.

Note: who may write. As with what is sent: between question and answer whoever is asked has the memory, otherwise the
rank that made it. It goes with the last process that has it mapped, so nothing is left behind by a rank that dies.
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
        if comm.own_threads:
            self.near = self._neighbours(comm)

    def _neighbours(self, comm: Comm) -> frozenset[int]:
        """The ranks that read here what we read there."""
        probe = self._new(1, torch.int64)
        if probe is not None:
            probe.fill_(comm.rank)
        told = comm.gather_objects((_system(), self.place(probe) if probe is not None else None))
        mine, read = told[comm.rank][0], set()
        for rank, (system, place) in enumerate(told):
            if rank != comm.rank and mine and system == mine and place:
                with suppress(OSError, ValueError):
                    if self.at(place, 1, torch.int64).item() == rank:
                        read.add(rank)
        self.forget()
        theirs = comm.gather_objects(read)
        return frozenset(rank for rank in read if comm.rank in theirs[rank])

    def zeros(self, n: int, dtype: torch.dtype) -> Tensor:
        """So many zeros, where ranks that are near can have them, if there are such."""
        found = self._new(n, dtype) if self.near and n else None
        return torch.zeros(n, dtype=dtype) if found is None else found

    def _new(self, n: int, dtype: torch.dtype) -> Tensor | None:
        """Memory of its own, or None where the system has no such."""
        if sys.platform != "linux":
            return None
        try:
            descriptor = os.memfd_create("kasoku")
        except OSError:
            return None
        size = n * dtype.itemsize
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        found = torch.frombuffer(memory, dtype=dtype)
        self._made[found.data_ptr()] = (descriptor, os.fstat(descriptor).st_ino)
        weakref.finalize(memory, _let_go, self._made, found.data_ptr())
        return found

    def place(self, x: Tensor) -> Sequence[int]:
        """Where x lies, for a rank that is near; empty for memory that was not made here."""
        start = x.untyped_storage().data_ptr()
        made = self._made.get(start)
        return (os.getpid(), *made, x.data_ptr() - start) if made else ()

    def at(self, place: Sequence[int], n: int, dtype: torch.dtype) -> Tensor:
        """So many elements at another rank's place. Raises OSError where that rank is gone."""
        *whose, start = place
        whole = self._mapped.get(tuple(whose))
        if whole is None:
            process, descriptor, inode = whose
            opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(opened)
                if found.st_ino != inode:
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


def _let_go(made: _Made, start: int) -> None:
    os.close(made.pop(start)[0])
