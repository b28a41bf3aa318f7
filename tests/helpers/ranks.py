"""Real processes for tests: f(comm, *args) on each rank of a gloo group on loopback."""

import multiprocessing
import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kasoku.core import Comm, Threads
from kasoku.distributed import TorchComm

LIMIT_S = 60  # of a collective

# Note: clean processes. The process of pytest holds threads (of tests before, of stores), and a lock that one of them
# holds at a fork is never let go in the child. So ranks are forked from a server that has imported what they need and
# has started no thread.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch._dynamo", "kasoku.commands.train", "kasoku.distributed", "pytest", "hypothesis"])


def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank_main(rank: int, size: int, port: int, f: Callable[..., Any], args: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
    try:
        comm: Comm = TorchComm()
        results.put((rank, pickle.dumps(f(comm, *args)), None))  # by value: the process ends before it is read
    except BaseException as error:
        results.put((rank, b"", repr(error)))
    finally:
        dist.destroy_process_group()


def on_ranks(where: str, size: int, f: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of f(comm, *args) in rank order, on "threads" of this process or on "processes"."""
    if where == "threads":
        return Threads(size).run(lambda comm: f(comm, *args))
    return on_processes(size, f, *args)


def on_processes(size: int, f: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of f(comm, *args) in rank order; f is a top-level function."""
    where = port()
    results = context.Queue()
    workers = [context.Process(target=_rank_main, args=(r, size, where, f, args, results)) for r in range(size)]
    for worker in workers:
        worker.start()
    try:
        found = dict(
            sorted((rank, (value, error)) for rank, value, error in (results.get(timeout=3 * LIMIT_S) for _ in workers))
        )
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    errors = {rank: error for rank, (_, error) in found.items() if error}
    assert not errors, errors
    return [pickle.loads(value) for value, _ in found.values()]
