"""Shared memory between ranks of one host. Requests carry addresses instead of bytes.

Note: near ranks. Two processes are near if they run on one Linux system, see each other's /proc and the same network,
and have mapped each other's memory in a trial. Ranks in network namespaces or containers of their own are not near, so
a test or a simulated cluster measures a network. Where the system cannot share memory, no rank is near: bytes are sent.

Note: ownership. From request to reply, only the callee may write to the buffers of the request and of the reply. At all
other times, only the rank that allocated them may. The memory is freed when the last process unmaps it, so buffers of a
dead rank stay valid until the survivors' next sync point.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from kasoku.core import Comm

PLACE = 4  # numbers of an address: process, descriptor, inode, bytes from the start
_ALIGNED = 64  # bytes: a line of the cache
_Allocated = dict[int, tuple[int, int]]  # descriptor and inode, by address
_NONE = torch.zeros(0, dtype=torch.uint8)


class Segments:
    """A rank's shared memory for the updates it sends and the weights it receives; ranks of one process need none.

    Collective, as ranks try to map each other's memory. `near`: the other ranks that take an address instead of bytes.
    """

    def __init__(self, comm: Comm) -> None:
        self.near: frozenset[int] = frozenset()
        self._allocated: _Allocated = {}
        self._mapped: dict[tuple[int, ...], Tensor] = {}
        self._device = 0  # of the file system that has such memory
        self._free = _NONE
        if not comm.thread_safe:
            return
        probe = self._new(8).fill_(comm.rank % 251)
        probes = comm.gather_objects((_system(), self.place(probe)))
        mine, read = probes[comm.rank][0], set()
        for rank, (system, place) in enumerate(probes):
            if rank != comm.rank and mine and system == mine and place:
                with suppress(OSError, ValueError):
                    if self.at(place, 8, torch.uint8).eq(rank % 251).all():
                        read.add(rank)
        self.forget()
        read_by = comm.gather_objects(read)
        self.near = frozenset(rank for rank in read if comm.rank in read_by[rank])

    def open(self, pieces: int, size: int) -> None:
        """Reserves memory for `pieces` calls of `zeros` of `size` bytes in all; unused pages take no memory."""
        self._free = self._new(size + pieces * _ALIGNED) if self.near and size else _NONE

    def zeros(self, n: int, dtype: torch.dtype) -> Tensor:
        """N zeros, in shared memory if there is any left and a rank is near."""
        size = n * dtype.itemsize
        if not 0 < size <= len(self._free):
            return torch.zeros(n, dtype=dtype)
        block, self._free = self._free[:size], self._free[-(-size // _ALIGNED) * _ALIGNED :]
        return block.view(dtype)

    def _new(self, size: int) -> Tensor:
        """Newly allocated shared memory, empty if the system has none."""
        try:
            descriptor = os.memfd_create("kasoku")
        except (AttributeError, OSError):  # not on Linux, or Python was built on an older libc
            return _NONE
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
        except (OSError, ValueError, OverflowError):
            os.close(descriptor)
            return _NONE
        x, status = torch.frombuffer(memory, dtype=torch.uint8), os.fstat(descriptor)
        self._device = status.st_dev
        self._allocated[x.data_ptr()] = file = (descriptor, status.st_ino)
        weakref.finalize(memory, _close, self._allocated, x.data_ptr(), file).atexit = False
        return x

    def place(self, x: Tensor) -> Sequence[int]:
        """The address of x for near ranks; empty if x is not in shared memory of this rank."""
        start = x.untyped_storage().data_ptr()
        file = self._allocated.get(start)
        return (os.getpid(), *file, x.data_ptr() - start) if file else ()

    def at(self, place: Sequence[int], n: int, dtype: torch.dtype) -> Tensor:
        """N elements at another rank's address.

        Raises OSError if that rank has ended or has freed the memory, or if this process can open or map no more files.
        """
        *file, start = place
        whole = self._mapped.get(tuple(file))
        if whole is None:
            process, descriptor, inode = file
            opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                status = os.fstat(opened)
                if (status.st_dev, status.st_ino) != (self._device, inode):
                    raise ProcessLookupError(f"process {process} has another file by now")
                whole = torch.frombuffer(mmap.mmap(opened, status.st_size), dtype=torch.uint8)
            finally:
                os.close(opened)
            self._mapped[tuple(file)] = whole
        return whole[start : start + n * dtype.itemsize].view(dtype)

    def forget(self) -> None:
        """Unmaps other ranks' memory."""
        self._mapped.clear()


def _system() -> tuple[object, ...]:
    """Equal for two processes that may be near; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()
        return (boot, os.getuid(), *(os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")))
    except OSError:
        return ()


def _close(allocated: _Allocated, start: int, file: tuple[int, int]) -> None:
    """Closes the descriptor of unmapped memory, whose address may be in use again."""
    if allocated.get(start) == file:
        allocated.pop(start, None)
    os.close(file[0])
