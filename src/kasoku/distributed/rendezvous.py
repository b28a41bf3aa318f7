"""The process group of a training: how the ranks find each other, and how they end.

Note: two backends. Tensors on a CPU travel by gloo, tensors on a GPU by NCCL. So control messages (a signal, an error,
a file's name) do not wait for the GPU.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from kasoku.core import Comm, InputError, Solo, summary
from kasoku.distributed import TorchComm
from kasoku.distributed.consensus import SHARED_ERRORS, ReportedElsewhereError
from kasoku.distributed.environment import Place
from kasoku.distributed.liveness import LostRankError, is_lost_rank
from kasoku.distributed.membership import TIMEOUT, Membership, backend
from kasoku.distributed.startup import Start

_SCHEME = "kasoku"  # of the rendezvous URL
_was_rank: list[object] = []


@contextmanager
def process_group(
    here: Place, start: Start, packages: Callable[[], object], folder: Path | None = None
) -> Iterator[Comm]:
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
    cuda = torch.cuda.is_available()
    if cuda:  # NCCL takes the current device
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
        # otherwise (torch's default is 3) NCCL ends this process before the Watchdog names the lost rank
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    members = Membership()
    comm = members.find(folder)
    start.add("rendezvous", lambda: None if comm else _connect(here, backend(), address))
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


def _connect(here: Place, backend: str, address: Sequence[str | None]) -> None:
    """Initializes the process group.

    torch first checks whether the compiler is imported, which waits for an import under way, and then looks for the
    other ranks. So this is called before that import starts.
    """
    with suppress(RuntimeError):  # already registered
        register_rendezvous_handler(_SCHEME, _attempt)  # type: ignore[no-untyped-call]
    try:
        url = f"{_SCHEME}://"
        dist.init_process_group(backend, url, timeout=TIMEOUT, rank=here.rank, world_size=here.size)
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
