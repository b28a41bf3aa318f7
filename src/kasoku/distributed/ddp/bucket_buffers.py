"""The flat buffers of a bucket plan, and which parameter has its gradient in which of them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from kasoku.core import Comm, InputError, Trace, Work
from kasoku.core.errors import first_of
from kasoku.core.hardware import is_dense
from kasoku.core.torch_internals import version
from kasoku.distributed.ddp.cost_model import BucketPlan, Chunk
from kasoku.distributed.ddp.layer_index import LayerIndex

_ALIGN = 32  # elements: fused optimizers round whole vectors and the rest of a tensor differently


class Bucket:
    """A flat buffer of gradients in `ranks` equal parts (above 1, of whole vectors), and its collectives."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], ranks: int) -> None:
        for name, p in named:
            if not is_dense(p):
                strides = f"strides {p.stride()} for shape {tuple(p.shape)}"
                raise InputError(f"Overlap: {name} has {strides}: dense ones only")
        align = _ALIGN if ranks > 1 else 1
        self.lengths = [-(-p.numel() // align) * align for _, p in named]
        self.lengths[-1] += -sum(self.lengths) % (ranks * align)
        self.size = sum(self.lengths)
        self.flat = named[0][1].detach().new_empty(0)  # without elements while the buffer is freed
        self.views: dict[Tensor, Tensor] = {p: self.flat for _, p in named}  # in its parameter's own shape and strides
        # of its gradients, when they were copied there; None: one was used since, or a layer holds its factors
        self.versions: dict[Tensor, int | None] = {}
        self.unsent = self.size  # elements of this step, where buckets are freed
        self.works: list[Work] = []
        self.pending = False  # its update comes after the step
        self.idle: frozenset[Tensor] = frozenset()  # without a gradient on any rank

    @property
    def nbytes(self) -> int:
        """Of the buffer when it is allocated."""
        return self.size * self.flat.element_size()

    def allocate(self) -> None:
        """Allocates the buffer."""
        self.flat = self.flat.new_empty(self.size)
        parts = torch.split(self.flat, self.lengths)
        self.views = {p: x.as_strided(p.shape, p.stride()).data for p, x in zip(self.views, parts, strict=True)}

    def free(self) -> None:
        """Frees the buffer; its gradients were used, or do not come."""
        self.flat = self.flat.new_empty(0)
        self.views = dict.fromkeys(self.views, self.flat)
        self.versions = dict.fromkeys(self.views)

    @property
    def whole(self) -> bool:
        """Whether it has all its gradients; a parameter that was frozen since gets none."""
        few = len(self.views) - len(self.versions) <= len(self.idle)  # else there is nothing to look for
        return few and all(p in self.versions for p in self.views if p.requires_grad)

    def wait(self) -> None:
        """Returns when the buffer holds the mean."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def attach(self) -> None:
        """Gives its parameters their gradients."""
        for p, view in self.views.items():
            p.grad = None if p in self.idle else view

    def detach(self) -> None:
        """Takes the gradients away from its parameters, so that `optimizer.step()` skips these."""
        for p in self.views:
            p.grad = None


class BucketLayout:
    """The buckets of a plan, in its numbering.

    `allocated`: their buffers are there all the time; `notes_ranges`: of the gradients of each chunk, for `overflow`.
    `order`: the chunks of the plan; rounded to as many equal parts as ranks share its updates, if several do.
    """

    def __init__(self, plan: BucketPlan, layers: LayerIndex, *, allocated: bool, notes_ranges: bool) -> None:
        self.plan, self.notes_ranges, ranks = plan, notes_ranges, plan.ranks
        self.ranges: list[tuple[Tensor, Tensor]] = []
        self.names = {p: name for name, p in layers.named}
        self.buckets = [Bucket([layers.named[i] for i in bucket], ranks) for bucket in plan.buckets]
        rounded = [self._rounded(chunk, ranks * _ALIGN if ranks > 1 else 1) for chunk in plan.order]
        self.order = [chunk for chunk in rounded if ranks == 1 or chunk.start < chunk.stop]
        for bucket in self.buckets if allocated else ():
            bucket.allocate()
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        last = {chunk.bucket: i for i, chunk in enumerate(self.order)}  # of each bucket, when its last chunk is sent
        self.by_arrival = [self.buckets[b] for b in sorted(last, key=lambda b: last[b])]
        self.needed: list[list[Bucket]] = [[] for _ in layers.modules]  # those of a layer's parameters, by arrival
        for bucket in self.by_arrival:
            for layer in {layer for p in bucket.views for layer in layers.users[p]}:
                self.needed[layer].append(bucket)
        self.by_need = [*dict.fromkeys(bucket for layer in layers.order for bucket in self.needed[layer])]

    def _rounded(self, chunk: Chunk, quantum: int) -> Chunk:
        """The chunk with borders at multiples of the quantum, at the same share of its bucket."""
        bucket = self.buckets[chunk.bucket]
        parts, elements = bucket.size // quantum, max(1, sum(p.numel() for p in bucket.views))
        return Chunk(chunk.bucket, *(-(-at * parts // elements) * quantum for at in (chunk.start, chunk.stop)))

    def copy_in(self, p: Tensor, scale: float) -> None:
        """Copies the gradient of a parameter into its bucket, times `scale`."""
        bucket = self.bucket_of[p]
        view = bucket.views[p]
        if p.grad is None or p.grad.layout != torch.strided:
            raise InputError(f"Overlap: {self.names[p]} has a sparse gradient: dense ones only")
        if scale != 1:
            torch.mul(p.grad.detach(), scale, out=view)
        elif p.grad is not view:
            view.copy_(p.grad.detach())
        p.grad = view
        bucket.versions[p] = version(view)

    def send(self, chunk: Chunk, prefix: str, reduce: Callable[[str, Tensor], Work], trace: Trace) -> None:
        """Starts to average one chunk; the reducer keeps its state by the chunk's key."""
        bucket = self.buckets[chunk.bucket]
        for p in bucket.views.keys() - bucket.versions:  # frozen since
            bucket.views[p].zero_()
            bucket.versions[p] = None
        x = bucket.flat[chunk.start : chunk.stop]
        bucket.unsent -= x.numel()
        if self.notes_ranges:
            self.ranges.append(x.aminmax())
        work = reduce(f"{prefix} {chunk.bucket}:{chunk.start}", x)
        bucket.works.append(trace.transfer(f"bucket {chunk.bucket}", x, work))

    def overflow(self, largest: float) -> Tensor:
        """1 if a gradient that was sent in this step is above `largest` in magnitude, or NaN; else 0."""
        low, high = (torch.stack(values) for values in zip(*self.ranges, strict=True))
        self.ranges.clear()
        return (~((high <= largest) & (low >= -largest))).any().float().reshape(1)

    def missing(self) -> list[Tensor]:
        """The parameters without a gradient so far."""
        return [p for p, bucket in self.bucket_of.items() if p.requires_grad and p not in bucket.versions]

    def refuse_unknown(self, optimizer: Optimizer) -> None:
        """Raises InputError for a gradient outside the buckets: ranks would drift apart silently."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p not in self.bucket_of:
                    late = f"Overlap: a parameter of shape {tuple(p.shape)} has a gradient"
                    late += ", but required none when Overlap was applied, or was added later"
                    raise InputError(f"{late}: unfreeze and add parameters before apply")

    def refuse_changed(self, buckets: Sequence[Bucket]) -> None:
        """Raises InputError for a gradient that was written to after it was copied into its bucket."""
        views = ((bucket.versions.get(p), p, view) for bucket in buckets for p, view in bucket.views.items())
        for copied, p, view in views:
            if copied is not None and (p.grad is not view or version(view) != copied):
                changed = f"Overlap: the gradient of {self.names[p]} changed between backward and step, while sent"
                raise InputError(f"{changed}: clip with the technique Clip; for k backwards a step, Job(accumulate=k)")

    def refuse_missing(self) -> None:
        """Raises InputError for parameters without a gradient; those that were frozen since are not updated."""
        if missing := [self.names[p] for p in self.missing()]:
            none = f"Overlap: {len(missing)} parameters got no gradient in backward ({first_of(missing, 3)})"
            raise InputError(f'{none}: freeze them before apply, or set unused = "skip"')
        for bucket in self.buckets:
            bucket.idle = frozenset(p for p in bucket.views if not p.requires_grad)

    def fill_missing(self, comm: Comm, trace: Trace) -> None:
        """Puts zeros in the place of missing gradients; a parameter without one on all ranks is not updated."""
        present = [float(p.requires_grad and p in bucket.versions) for p, bucket in self.bucket_of.items()]
        used = torch.tensor(present, device=self.buckets[0].flat.device)
        with trace.span("wait", "parameters without a gradient"):
            comm.all_reduce(used, op="max").wait()
        idle = frozenset(p for p, u in zip(self.bucket_of, used.tolist(), strict=True) if not u)
        for p in self.missing():
            bucket = self.bucket_of[p]
            bucket.views[p].zero_()
            bucket.versions[p] = version(bucket.views[p])
        for bucket in self.buckets:
            bucket.idle = idle
