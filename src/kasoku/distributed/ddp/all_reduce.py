"""Averages gradients after backward, without overlap: the baseline of `Overlap`."""

from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from kasoku.core import Comm, InputError, Job, Stage, Technique

TWO_AVERAGES = {"averages_gradients": "both average gradients over the ranks; leave one of them out"}


@dataclass(frozen=True)
class AllReduce(Technique, stage=Stage.COMM, refuses=TWO_AVERAGES, exchanges_gradients=True, averages_gradients=True):
    """Averages each gradient over all ranks at the step, one collective a parameter, in parameter order.

    At `apply` all ranks copy rank 0's parameters and buffers. Beside Asynchronous it averages within a node.

    Saves: nothing; it makes many ranks train one model.
    Costs: the whole communication, once backward is over.
    Maths: g = mean over ranks of g.
    """

    def apply(self, job: Job) -> None:
        """Starts all ranks equal and averages before each step."""
        comm = job.step_comm
        if comm.size == 1:
            return
        start_equal(job, comm)

        def average() -> None:
            grads = [p.grad for p in job.model.parameters() if p.grad is not None]
            works = [comm.all_reduce(g, op="mean") for g in grads]
            with job.trace.span("wait", "all gradients", bytes=sum(g.nbytes for g in grads)):
                for work in works:
                    work.wait()

        job.before_step(average)


def start_equal(job: Job, comm: Comm) -> None:
    """Copies rank 0's parameters and buffers to all ranks of comm. Raises InputError for a model that DDP wraps."""
    if isinstance(job.model, DistributedDataParallel):
        raise InputError("Overlap and AllReduce take the place of DistributedDataParallel: give Job the plain model")
    mine = [*job.model.parameters(), *job.model.buffers()]
    sent = [x.detach().to("cpu" if x.is_cuda else x.device, copy=True) for x in mine] if comm.rank == 0 else []
    first = comm.broadcast_object(sent)  # from a GPU they would arrive on rank 0's everywhere
    with torch.no_grad():
        for x, value in zip(mine, first, strict=bool(first)):
            x.copy_(value)
