"""Overlap whose ranks share the update: each updates a part of every bucket, then all gather the parts.

Note: memory. The parameters of a bucket are views of a flat buffer, as their gradients are of another. Of each chunk, a
rank has a part, cut at the borders of tensors: the optimizer updates these slices instead of the parameters, with state
of their own. They begin at whole vectors, so that an element is rounded as it would be in its tensor.

Note: one order. After backward, which sends the reduce-scatters, all collectives of a step are those of one chain, on a
communicator of its own. It goes on wherever a layer is entered, as far as collectives have ended, and waits for the
buckets that the layer needs. So ranks may be at different places of the chain, but never in another order.

Note: whole state. `optimizer.state_dict()` and a new plan join the slices' state. The next step cuts all whole state.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from kasoku.core import Comm, Hyper, InputError, Job, Work
from kasoku.core.hardware import laid_out_like
from kasoku.distributed.ddp.bucket_buffers import Bucket, BucketLayout
from kasoku.distributed.ddp.compression import Mean, Reducer
from kasoku.distributed.ddp.cost_model import Chunk

_UNFIT = (  # attributes of techniques
    ("needs_whole_gradients", "needs whole gradients"),
    ("captures_graph", "needs parameters that keep their memory, since a graph is replayed on it"),
    ("is_asynchronous", "needs whole parameters, whose updates it sends"),
    ("reads_state", "needs the optimizer's whole state at each step"),
)
_ADAPTIVE = (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta)
_BY_ELEMENT = {unwrap(rule.step) for rule in (optim.SGD, optim.RMSprop, *_ADAPTIVE)}  # torch wraps them later


def refuse(job: Job, reducer: Reducer, *, frees: bool) -> None:
    """Raises InputError for a job whose updates cannot be sharded. `frees`: gradients are freed in backward."""
    reasons = [f"{type(t).__name__} {why}: leave it out" for t in job.applied for has, why in _UNFIT if getattr(t, has)]
    reasons += ["a technique needs whole gradients: leave it out"] if job.needs_whole_gradients else []
    reasons += ["SavedMemory updates whole parameters in backward: set its in_backward = false"] if frees else []
    reasons += [f"reducer {type(reducer).__name__} makes whole means: use Mean"] if reducer != Mean() else []
    if not _slices(rule := job.optimizer):
        advice = 'use sgd, adamw or lars, declare slices = "elements" in the class that defines its step'
        reasons += [f"{type(rule).__name__} is not known to update slices of tensors: {advice}"]
    if reasons:
        raise InputError(f"Overlap: shared updates: {reasons[0]}, or set shard = false (and shards, in Planned)")


def _slices(optimizer: Optimizer) -> str:
    """How a rule updates slices of tensors, as its class may say: by "elements", by "norms" of tensors, or "" (not)."""
    step = unwrap(type(optimizer).step)
    rule: Any = next((c for c in type(optimizer).__mro__ if "slices" in vars(c)), None)
    declared = rule.slices if rule and unwrap(rule.step) is step else ""  # not that of a class whose step is overridden
    return "elements" if step in _BY_ELEMENT else declared if declared in ("elements", "norms") else ""


def _own_memory(model: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Copies tensors that are parts of buffers: safetensors refuses these, and torch would save the whole buffers."""
    copies: dict[Any, Tensor] = {}  # tied weights stay tied
    for name, x in state.items():
        if isinstance(x, Tensor) and x.untyped_storage().nbytes() > x.nbytes:
            key = x.data_ptr(), x.shape, x.stride()
            copies[key] = state[name] = copies[key] if key in copies else x.clone()


class Shard:
    """The part of one bucket that this rank updates.

    Attributes: `own`: its part of each chunk, in elements of the flat buffers. `slices`: by parameter, with gradients.
    `used`: the parameters that this step updates. `updated`: they are being gathered.
    """

    def __init__(self, bucket: Bucket, chunks: Sequence[Chunk], comm: Comm) -> None:
        self.comm, self.chunks = comm, [slice(c.start, c.stop) for c in chunks]
        self.used, self.updated = list[Tensor](), False
        self.flat = torch.zeros_like(bucket.flat.zero_())  # of the parameters
        sizes = [(chunk.start, (chunk.stop - chunk.start) // comm.size) for chunk in chunks]
        self.own = [slice(start + comm.rank * n, start + (comm.rank + 1) * n) for start, n in sizes]
        self.starts: dict[Tensor, int] = {p: int(view.storage_offset()) for p, view in bucket.views.items()}
        self.slices: dict[Tensor, list[Tensor]] = {p: [] for p in bucket.views}
        for p, start in self.starts.items():
            p.data = self.flat.as_strided(p.shape, p.stride(), start).copy_(p.data)
            for own in self.own:
                begin, end = max(own.start, start), min(own.stop, start + p.numel())
                self.slices[p] += [self.flat[begin:end]] if begin < end else []
            self.slices[p] = self.slices[p] or [self.flat[start:start]]  # so that each rank has state of each parameter
            for x in self.slices[p]:
                x.grad = bucket.flat[x.storage_offset() : x.storage_offset() + x.numel()]

    def gather(self, flat: Tensor) -> list[Work]:
        """Starts to gather the parts of all ranks in a buffer like the flat one."""
        return [self.comm.all_gather(flat[chunk], flat[own]) for chunk, own in zip(self.chunks, self.own, strict=True)]

    def squares(self, params: Sequence[Tensor]) -> Tensor:
        """The sums of squares of this rank's weights and gradients of each parameter, 2 x params."""
        sums = torch.zeros(2, len(params), dtype=torch.float64, device=self.flat.device)
        index, slices = zip(*((i, x) for i, p in enumerate(params) for x in self.slices[p]), strict=True)
        norms = torch._foreach_norm([*slices, *(x.grad for x in slices)], 2, torch.float64)
        return sums.index_add_(1, torch.tensor(index, device=sums.device), torch.stack(norms).square_().view(2, -1))

    def cut(self, state: Any) -> None:
        """Leaves of whole states only this rank's slices."""
        for p, slices in self.slices.items():
            for key, x in (state.pop(p, None) or {}).items():
                by_element = isinstance(x, Tensor) and x.shape == p.shape and key != "step"
                whole = laid_out_like(p, x).as_strided((p.numel(),), (1,)) if by_element else None
                for own in slices:
                    at = int(own.storage_offset()) - self.starts[p]
                    value = whole[at : at + own.numel()] if whole is not None else x
                    state.setdefault(own, {})[key] = value.clone() if isinstance(value, Tensor) else value

    def join(self, state: Any) -> None:
        """Makes the state of the bucket's parameters whole again. Collective."""
        wholes: dict[str, Tensor] = {}
        for p, x in ((p, x) for p, slices in self.slices.items() for x in slices):
            for key, value in state.pop(x, {}).items():
                state[p][key] = value
                if isinstance(value, Tensor) and value.shape == x.shape:
                    if key not in wholes:
                        wholes[key] = self.flat.new_zeros(len(self.flat), dtype=value.dtype)
                    wholes[key][x.storage_offset() : x.storage_offset() + x.numel()] = value
                    state[p][key] = wholes[key].as_strided(p.shape, p.stride(), self.starts[p])
        for work in [work for key in sorted(wholes) for work in self.gather(wholes[key])]:
            work.wait()


class SharedUpdates:
    """This rank's share of all updates; `comm` reduce-scatters gradients times `scale`. `shards`: by bucket."""

    def __init__(self, job: Job, comm: Comm, around: AbstractContextManager[Any], scale: float) -> None:
        self.job, self.comm, self.around, self.divisor = job, comm, around, comm.size if scale == 1 else 1
        self.gathers = comm.channel()  # now, by all ranks together: on resume each takes the plan by itself
        self.shards: dict[Bucket, Shard] = {}
        self._needs_norms = _slices(job.optimizer) == "norms"
        self._chain: Iterator[Work] = iter(())
        self._awaited: Work | None = None  # by the chain
        self._cut = False  # the state
        device = next(job.model.parameters()).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        job.on_close(job.optimizer.register_state_dict_pre_hook(lambda _: self.join()).remove)
        saved: Any = job.model.register_state_dict_post_hook
        job.on_close(saved(_own_memory).remove)
        job.on_close(self.close)

    def share(self, layout: BucketLayout) -> None:
        """Takes over the buckets of a plan, and the memory of their parameters; between two steps."""
        self.join()
        self.names = layout.names
        chunks = {bucket: [c for c in layout.order if c.bucket == i] for i, bucket in enumerate(layout.buckets)}
        self.shards = {bucket: Shard(bucket, own, self.gathers) for bucket, own in chunks.items()}

    def join(self) -> None:
        """Makes the optimizer's state whole, until the next update. Collective; drains."""
        self.job.drain()
        for shard in self.shards.values() if self._cut else ():
            shard.join(self.job.optimizer.state)
        self._cut = False

    def close(self) -> None:
        """Makes the state whole, and gives the parameters memory of their own. Collective."""
        try:
            self.join()
        finally:
            for p in (p for shard in self.shards.values() for p in shard.slices):
                p.data = p.data.clone()
            self.shards = {}

    def send(self, _: str, x: Tensor) -> Work:
        """Starts to sum this rank's part of a chunk over the ranks, in place."""
        return self.comm.reduce_scatter(x.tensor_split(self.comm.size)[self.comm.rank], x)

    def start(self, buckets: Sequence[Bucket], hyper: Hyper, factor: float) -> None:
        """Begins the updates of a step: the buckets in the order of need, the gradients times the factor."""
        self._cut, trained = True, {p for group in self.job.optimizer.param_groups for p in group["params"]}
        for bucket, shard in self.shards.items():
            for p, start in shard.starts.items():
                if p.numel() and p.data_ptr() != shard.flat.data_ptr() + start * shard.flat.element_size():
                    moved = f"Overlap: shared updates: {self.names[p]} has other memory than at the last step"
                    advice = "convert the model before apply, or set shard = false (and shards, in Planned)"
                    raise InputError(f"{moved}: {advice}")
            shard.used = [p for p in bucket.views if p in trained and p not in bucket.idle]
            shard.cut(self.job.optimizer.state)  # now, since a checkpoint's state belongs to the current stream
        self._chain = self._update_all(buckets, hyper, factor)
        self._awaited = next(self._chain)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self.go_on()

    def go_on(self, bucket: Bucket | None = None) -> None:
        """Updates as far as collectives have ended, and waits for those up to a bucket, which is then being gathered.

        On a GPU a stream of its own waits, and not the host, so all is enqueued at once.
        """
        while self._awaited and (self._stream or (bucket and not self.shards[bucket].updated) or self._awaited.done()):
            with torch.inference_mode(False), torch.no_grad(), self.around, torch.cuda.stream(self._stream):
                with self.job.trace.span("wait"):
                    self._awaited.wait()
                self._awaited = next(self._chain, None)

    def update(self, bucket: Bucket) -> None:
        """Returns when the parameters of a bucket are whole (on a GPU its stream waits); goes on with the others."""
        self.go_on(bucket if bucket.pending else None)
        self.job.trace.poll_transfers()
        if bucket.pending:
            with self.job.trace.span("wait", bytes=bucket.flat.nbytes):
                bucket.wait()
            shard = self.shards[bucket]
            bucket.pending = shard.updated = False
            with torch.inference_mode(False), torch.no_grad():
                torch.autograd.graph.increment_version(shard.used)  # which were updated through other views
                self.job.run_after_update(shard.used)

    def _update_all(self, buckets: Sequence[Bucket], hyper: Hyper, factor: float) -> Iterator[Work]:
        """The chain of a step; yields each collective that must end before it goes on."""
        for bucket in buckets:
            shard = self.shards[bucket]
            yield from bucket.works
            for own in shard.own:
                if self.divisor != 1:
                    bucket.flat[own].div_(self.divisor)
                if factor != 1:
                    bucket.flat[own].mul_(factor)
            if self._needs_norms and shard.used:
                sums = shard.squares(shard.used)
                yield self.gathers.all_reduce(sums)
                for p, squares in zip(shard.used, sums.unbind(1), strict=True):
                    for x in shard.slices[p]:
                        self.job.optimizer.state[x]["squares"] = squares
            with self.job.trace.span("update"):
                self.job.update(shard.used, hyper, slices=shard.slices)
            bucket.works, shard.updated = shard.gather(shard.flat), True
