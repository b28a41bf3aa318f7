"""The ranks of one training: how they meet, and what they agree on.

Note: a group of two engines. Tensors on a CPU travel by gloo, tensors on a GPU by NCCL. So what ranks agree on (a
signal, an error, a file's name) goes past the GPU, and nobody waits for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from kasoku.core import Comm, InputError, Solo
from kasoku.distributed import TorchComm
from kasoku.distributed.consensus import SHARED_ERRORS
from kasoku.distributed.environment import Place
from kasoku.distributed.liveness import LostRankError, Watchdog
from kasoku.distributed.startup import Start

TIMEOUT = timedelta(minutes=30)  # that a rank waits for the others: longer than any evaluation or checkpoint
_SCHEME = "kasoku"  # of the address at which ranks meet
_was_rank: list[object] = []


@contextmanager
def joined(here: Place, start: Start) -> Iterator[Comm]:
    """The collectives of the ranks this process is one of; the process group is destroyed at the end.

    Args:
        here: which of the ranks it is.
        start: takes the meeting of the ranks as a task; while they do, the trainer is imported.

    Raises:
        InputError: where the launcher did not say where rank 0 is, or the ranks do not find each other.
        LostRankError: where another rank ended in the midst of what they do together.
    """
    trainer = partial(import_module, "kasoku.training.trainer")
    if here.size == 1:
        start.do("packages", trainer)
        yield Solo()
        return
    where = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
    if None in where:
        raise InputError(
            f"{here.size} ranks without MASTER_ADDR and MASTER_PORT: set them to rank 0's host and a free port there, "
            "or start with kasoku launch, which does"
        )
    _was_rank.append(here)
    cuda = torch.cuda.is_available()
    if cuda:  # before NCCL is there, which takes the device that is set
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
        # NCCL would end this process before the Watchdog says which rank was lost (torch's own default is 3: tear down)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    start.add("rendezvous", lambda: _meet(here, "cpu:gloo,cuda:nccl" if cuda else "gloo", where))
    start.do("packages", trainer)
    start.import_compiler()  # not before: what meets would wait for it (see _meet)
    _ = start["rendezvous"]
    comm = Watchdog().start(TorchComm(), (str(where[0]), int(str(where[1]))))
    try:
        yield comm
        comm.activity.close()
    except SHARED_ERRORS:
        comm.activity.close()
        raise
    except BaseException as error:
        if isinstance(error, RuntimeError) and "gloo" in str(error):
            comm.activity.wait_for_verdict()  # usually another rank is the cause
        comm.activity.close(failed=" ".join(str(error).split())[:200] or type(error).__name__)
        if is_lost_rank(error):
            line = " ".join(str(error).split())[:120]
            raise LostRankError(f"rank {here.rank}: lost another rank ({line}); resume from a checkpoint") from error
        raise
    finally:
        dist.destroy_process_group()


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed, as when another rank is gone."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


def _meet(here: Place, backend: str, where: Sequence[str | None]) -> None:
    """Meets the other ranks.

    Torch first looks whether the compiler is imported, and waits where that is under way; then it looks for the others.
    So it is called at once and finds them itself, in a way of ours.
    """
    with suppress(RuntimeError):  # registered before
        register_rendezvous_handler(_SCHEME, _attempt)  # type: ignore[no-untyped-call]
    try:
        url = f"{_SCHEME}://"
        dist.init_process_group(backend, url, timeout=TIMEOUT, rank=here.rank, world_size=here.size)
    except (RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        raise InputError(
            f"rank {here.rank} of {here.size} does not find the others at {':'.join(map(str, where))} ({line}): check "
            "MASTER_ADDR and MASTER_PORT, and that all ranks were started"
        ) from error


def _attempt(url: str, **more: Any) -> Iterator[tuple[Store, int, int]]:
    """The store of this attempt: torchrun may keep one for all of them."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for store, rank, size in rendezvous(url.replace(_SCHEME, "env", 1), **more):
        yield PrefixStore(f"attempt {attempt}", store), rank, size


def leave(code: int) -> int:
    """Ends a process that was one of several ranks with this exit code; returns it in any other.

    At once, without Python's own end: threads of gloo may still be giving up tensors, for which they ask Python, and
    being refused at its end abort the process (torch 2.13).
    """
    if _was_rank:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code
