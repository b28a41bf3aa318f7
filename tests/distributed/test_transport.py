"""Ranks that cannot answer the others' requests."""

import errno
from collections.abc import Sequence

import pytest
import torch

from helpers.ranks import on_processes
from kasoku.core import Comm, Job
from kasoku.distributed import Asynchronous
from kasoku.distributed.async_sgd import parameter_server as shards
from kasoku.distributed.liveness import is_lost_rank

SIZE = 3
process = pytest.mark.process


def _steps(job: Job, number: int) -> None:
    """So many, of a gradient of ones for each of 1,000 weights."""
    for _ in range(number):
        job.model(torch.ones(1000)).sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()


class _Broken(shards.ParameterServer):
    """A handler that cannot take what another rank sends."""

    mine = 0

    def answer(self, rank, head, body):  # type: ignore[no-untyped-def]
        if rank != self.mine and head[0] == shards.UPDATE:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().answer(rank, head, body)


def _fails(comm: Comm, technique: Asynchronous, which: Sequence[int]) -> str:
    """What each rank ends with where these cannot answer the others."""
    if comm.rank in which:
        _Broken.mine = comm.rank
        shards.ParameterServer = _Broken  # type: ignore[misc]
    model = torch.nn.Linear(1000, 1, bias=False)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm).apply(technique)
    try:
        _steps(job, 40)
        job.drain()
    except OSError as error:
        return error.strerror or ""
    except RuntimeError as error:
        return "lost a rank" if is_lost_rank(error) else str(error)
    return "went on"


@process
@pytest.mark.parametrize(
    ("technique", "which"),
    [
        pytest.param(Asynchronous(every=1), [0], marks=pytest.mark.smoke),
        (Asynchronous(every=1), [0, 1, 2]),
        (Asynchronous(hidden=False, max_staleness=1), [1]),
        (Asynchronous(hidden=False, max_staleness=1), [0, 2]),
    ],
)
def test_ranks_that_cannot_answer_end_and_none_hangs(technique: Asynchronous, which: Sequence[int]):
    found = on_processes(SIZE, _fails, technique, which)
    failed = [rank for rank in range(SIZE) if found[rank] == "Too many open files"]
    assert failed
    assert {*failed} <= {*which}
    assert all(found[rank] == "lost a rank" for rank in range(SIZE) if rank not in failed)
