"""Averages gradients after backward, without overlap: the baseline of `Overlap`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from kasoku.core import Comm, InputError, Job, Stage, Technique

_ONE, _LIMIT, _MOST_PARTS = 2.0**46, 2.0**55, 256  # in exact sums, of 64 bits
TWO_AVERAGES = {"averages_gradients": "both average gradients over the ranks; leave one of them out"}


@dataclass(frozen=True)
class AllReduce(Technique, stage=Stage.COMM, refuses=TWO_AVERAGES, exchanges_gradients=True, averages_gradients=True):
    """Averages each gradient over all ranks at the step, one collective a parameter, in parameter order.

    At `apply` all ranks copy rank 0's parameters and buffers. Beside Asynchronous it averages within a node.

    Args:
        exact: add the gradients of all parts of the batch as integers, so that neither their order nor their spread
            over ranks changes a bit. With `norm_batch`, any number of ranks trains to the same bits.

    Saves: nothing; it makes many ranks train one model.
    Costs: the whole communication, once backward is over. Exact: 8 bytes an element are kept, and sent instead of 4;
        gradients below 2^-47 are lost, one above 2^9 makes all of them NaN, and a batch has at most 256 parts.
    Maths: g = mean over ranks of g; exact: sum over parts of round(2^46 g) / (2^46 parts).
    """

    exact: bool = False

    @property
    def sums_exactly(self) -> bool:  # type: ignore[override]
        return self.exact

    def apply(self, job: Job) -> None:
        """Starts all ranks equal and averages before each step."""
        comm = job.step_comm
        if comm.size > 1:
            start_equal(job, comm)
        if self.exact:
            sums = ExactSums(job, comm)
            job.patch(job, "backward", sums.backward)
            job.before_step(sums.average)
            return
        if comm.size == 1:
            return

        def average() -> None:
            grads = [p.grad for p in job.model.parameters() if p.grad is not None]
            works = [comm.all_reduce(g, op="mean") for g in grads]
            with job.trace.span("wait", "all gradients", bytes=sum(g.nbytes for g in grads)):
                for work in works:
                    work.wait()

        job.before_step(average)


class ExactSums:
    """The gradients of this step, added up as integers."""

    def __init__(self, job: Job, comm: Comm) -> None:
        self.job, self.comm = job, comm
        self.params = [p for p in job.model.parameters() if p.requires_grad]
        sizes = [*(p.numel() for p in self.params), 2]
        self.flat = torch.zeros(sum(sizes), dtype=torch.int64, device=self.params[0].device)
        *self.sums, self.counts = torch.split(self.flat, sizes)  # counts: parts, and elements that are too large
        self.used: set[Tensor] = set()

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one part, in place of Job.backward."""
        loss.backward()  # type: ignore[no-untyped-call]
        self.add(1)

    def add(self, parts: int) -> None:
        """Adds the gradients, the mean of so many parts, and clears them."""
        self.counts[0] += parts
        for p, total in zip(self.params, self.sums, strict=True):
            if p.grad is not None:
                x = p.grad.reshape(-1).double() * (parts * _ONE)
                self.counts[1] += (~(x.abs() < _LIMIT)).sum()  # also NaN
                total += x.round().long()
                p.grad = None
                self.used.add(p)

    def average(self) -> None:
        """Sets the gradients to their means over all parts of all ranks. Collective."""
        if any(p.grad is not None for p in self.params):  # of a loop that does not call job.backward
            self.add(self.job.accumulate)
        with self.job.trace.span("wait", "all gradients", bytes=self.flat.nbytes):
            self.comm.all_reduce(self.flat).wait()
        parts, spoilt = self.counts.tolist()
        if parts > _MOST_PARTS:
            got = f"{parts} parts of a batch, at most {_MOST_PARTS}"
            raise InputError(f"AllReduce(exact=true): {got}: lower accumulate")
        for p, total in zip(self.params, self.sums, strict=True):
            if p in self.used:
                mean = total.double() / (torch.nan if spoilt else _ONE * parts)
                p.grad = torch.empty_like(p).copy_(mean.view(p.shape))
        self.flat.zero_()
        self.used.clear()


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
