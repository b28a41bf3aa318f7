"""How ranks take their batches: none steps together without the others' input, none that waits for input hangs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

from kasoku.core import Batch, InputError, Job
from kasoku.data import FilesLoader
from kasoku.distributed.consensus import raise_if, run_on_all_ranks
from kasoku.distributed.counting_comm import Pulse
from kasoku.distributed.rendezvous import Gate

_INPUT_S = 120.0  # that a rank may wait for a batch before it hangs: who reads it asks a source again for a minute


def batches(job: Job, pulse: Pulse, gate: Gate) -> Iterator[Batch]:
    """What is left of an epoch: each batch on all ranks, or on none of them, where all raise what one of them met."""
    plain = job.plain_loader
    left = iter(job.loader)
    if job.comm.size == 1 or not isinstance(plain, FilesLoader):  # what is in memory does not fail
        yield from left
        return
    while True:
        found: list[Batch] = []
        failure: InputError | None = None
        try:
            found.extend(_next(left, pulse))
        except InputError as error:
            failure = error
        if not found and not failure:
            return  # all ranks have as many
        with job.trace.span("wait", "the other ranks' input"):
            passes = gate.passes(failure, plain.sure)
        if not passes:
            run_on_all_ranks(job.comm, partial(raise_if, failure))
        yield found.pop()


def own_batches(loader: Iterable[Batch], pulse: Pulse) -> Iterator[Batch]:
    """This rank's batches, whether or not the others have one."""
    left = iter(loader)
    while found := _next(left, pulse):
        yield found.pop()


def _next(left: Iterator[Batch], pulse: Pulse) -> list[Batch]:
    with pulse.busy("input", _INPUT_S):
        return [*islice(left, 1)]
