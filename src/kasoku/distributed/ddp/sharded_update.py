"""Overlap whose ranks share the update: each updates a part of every bucket, then all gather the parts.

Note: memory. The parameters of a bucket are views of a flat buffer, as their gradients are of another. Of each chunk, a
rank has a part, cut at the borders of tensors: the optimizer updates these slices in place of the parameters, with
state of their own. They begin at whole vectors, so that an element is rounded as it would be in its tensor.

Note: one order. After backward, which sends the reduce-scatters, all collectives of a step are those of one chain, on a
communicator of its own. It goes on wherever a layer is entered, as far as collectives have ended, and waits for the
buckets that the layer needs. So ranks may be at different places of the chain, but never in another order.

Note: whole state. `optimizer.state_dict()` and a new plan join the slices' state. The next update cuts any state that
is whole, so it does not matter who wrote it: some number of ranks, with or without shards.
"""

from collections.abc import Iterator, MutableMapping, Sequence
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

State = MutableMapping[Tensor, dict[str, Any]]
_ADAPTIVE = (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta)
_BY_ELEMENT = {unwrap(rule.step) for rule in (optim.SGD, optim.RMSprop, *_ADAPTIVE)}  # torch wraps them later


def refuse(job: Job, reducer: Reducer, *, frees: bool) -> None:
    """Raises InputError beside what needs whole gradients or tensors. `frees`: gradients are freed in backward."""
    unfit = [t for t in job.applied if t.needs_whole_gradients or t.captures_graph or t.is_asynchronous]
    reasons = [f"{type(t).__name__} needs whole gradients, or memory that stays: leave it out" for t in unfit]
    if frees:
        reasons += ["SavedMemory updates whole parameters in backward: set its in_backward = false"]
    if reducer != Mean():
        reasons += [f"reducer {type(reducer).__name__} leaves whole means on all ranks: use Mean"]
    if not _slices(rule := job.optimizer):
        reasons += [f"{type(rule).__name__} is not known to update slices of tensors: use sgd, adamw or lars"]
    if reasons:
        raise InputError(f"Overlap(shard=true): {reasons[0]}, or set shard = false")


def _slices(optimizer: Optimizer) -> str:
    """How a rule updates slices of tensors, as its class may say: by "elements", by "norms" of tensors, or "" (not)."""
    return "elements" if unwrap(type(optimizer).step) in _BY_ELEMENT else str(getattr(optimizer, "slices", ""))


def _per_element(key: str, x: Any, p: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == p.shape and key != "step"


def _own_memory(model: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Copies what is a part of a buffer, which files of safetensors refuse and torch's would hold as a whole."""
    for name, x in state.items():
        if isinstance(x, Tensor) and x.untyped_storage().nbytes() > x.nbytes:
            state[name] = x.clone()


class Shard:
    """The part of one bucket that this rank updates.

    Attributes: `own`: its part of each chunk, in elements of the flat buffers. `slices`: by parameter, with gradients.
    """

    def __init__(self, bucket: Bucket, chunks: Sequence[Chunk], comm: Comm) -> None:
        self.chunks, self.comm = chunks, comm
        self.flat = torch.zeros_like(bucket.flat.zero_())  # of the parameters
        sizes = [(chunk, (chunk.stop - chunk.start) // comm.size) for chunk in chunks]
        self.own = [slice(c.start + comm.rank * n, c.start + (comm.rank + 1) * n) for c, n in sizes]
        self.starts: dict[Tensor, int] = {p: int(view.storage_offset()) for p, view in bucket.views.items()}
        self.slices: dict[Tensor, list[Tensor]] = {p: [] for p in bucket.views}
        self.gathers: list[Work] = []
        for p, start in self.starts.items():
            with torch.no_grad():
                p.data = self.flat.as_strided(p.shape, p.stride(), start).copy_(p)
            for own in self.own:
                begin, end = max(own.start, start), min(own.stop, start + p.numel())
                self.slices[p] += [self.flat[begin:end]] if begin < end else []
            self.slices[p] = self.slices[p] or [self.flat[start:start]]  # so that each rank has state of each parameter
            for x in self.slices[p]:
                x.grad = bucket.flat[x.storage_offset() : x.storage_offset() + x.numel()]

    def gather(self, flat: Tensor) -> list[Work]:
        """Starts to gather the parts of all ranks in a buffer like the flat one."""
        pairs = [(flat[chunk.start : chunk.stop], flat[own]) for chunk, own in zip(self.chunks, self.own, strict=True)]
        return [self.comm.all_gather(whole, own) for whole, own in pairs]

    def squares(self, params: Sequence[Tensor]) -> Tensor:
        """The sums of squares of this rank's weights and gradients of each parameter, 2 x params."""
        sums = torch.zeros(2, len(params), dtype=torch.float64, device=self.flat.device)
        index, slices = zip(*((i, x) for i, p in enumerate(params) for x in self.slices[p]), strict=True)
        norms = torch._foreach_norm([*slices, *(x.grad for x in slices)], 2, torch.float64)
        return sums.index_add_(1, torch.tensor(index, device=sums.device), torch.stack(norms).square_().view(2, -1))

    def cut(self, state: State) -> None:
        """Leaves of whole states only this rank's slices."""
        for p, slices in self.slices.items():
            for key, x in (state.pop(p, None) or {}).items():
                whole = laid_out_like(p, x).as_strided((p.numel(),), (1,)) if _per_element(key, x, p) else None
                for own in slices:
                    at = int(own.storage_offset()) - self.starts[p]
                    one = x.clone() if isinstance(x, Tensor) else x
                    state.setdefault(own, {})[key] = one if whole is None else whole[at : at + own.numel()].clone()

    def join(self, state: State) -> None:
        """Makes the state of the bucket's parameters whole again. Collective."""
        wholes: dict[str, Tensor] = {}
        for p, x in ((p, x) for p, slices in self.slices.items() for x in slices):
            for key, value in state.pop(x, {}).items():
                state[p][key] = value
                if _per_element(key, value, x):
                    if key not in wholes:
                        wholes[key] = self.flat.new_zeros(len(self.flat), dtype=value.dtype)
                    wholes[key][x.storage_offset() : x.storage_offset() + x.numel()] = value
                    state[p][key] = wholes[key].as_strided(p.shape, p.stride(), self.starts[p])
        for work in [work for key in sorted(wholes) for work in self.gather(wholes[key])]:
            work.wait()


class SharedUpdates:
    """This rank's share of all updates; `comm` is of the reduce-scatters. Attributes: `shards`, by bucket."""

    def __init__(self, job: Job, comm: Comm, around: AbstractContextManager[Any]) -> None:
        self.job, self.comm, self.around = job, comm, around
        self.gathers = comm.channel()
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
        chunks = {bucket: [c for c in layout.order if c.bucket == i] for i, bucket in enumerate(layout.buckets)}
        self.shards = {bucket: Shard(bucket, own, self.gathers) for bucket, own in chunks.items()}

    def join(self) -> None:
        """Makes the optimizer's state whole, until the next update. Collective; drains."""
        self.job.drain()
        for shard in self.shards.values() if self._cut else ():
            shard.join(self.job.optimizer.state)
        self._cut = False

    @torch.no_grad()
    def close(self) -> None:
        """Makes the state whole, and gives the parameters memory of their own. Collective."""
        self.join()
        for p in (p for shard in self.shards.values() for p in shard.slices):
            p.data = torch.empty_like(p).copy_(p)
        self.shards = {}

    # ---- a step

    def send(self, _: str, x: Tensor) -> Work:
        """Starts to sum this rank's part of a chunk over the ranks, in place."""
        return self.comm.reduce_scatter(x.tensor_split(self.comm.size)[self.comm.rank], x)

    def start(self, buckets: Sequence[Bucket], hyper: Hyper, factor: float) -> None:
        """Begins the updates of a step: the buckets in the order of need, the gradients times the factor."""
        self._chain = self._update_all(buckets, hyper, factor)
        self._awaited = next(self._chain)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self.go_on()

    def go_on(self, bucket: Bucket | None = None) -> None:
        """Updates as far as collectives have ended, and waits for those up to a bucket, which is then being gathered.

        On a GPU a stream of its own waits, and not the host, so all is enqueued at once.
        """
        shard = self.shards[bucket] if bucket is not None else None
        while self._awaited is not None:
            if not (self._stream or (shard is not None and not shard.gathers) or self._awaited.done()):
                return
            with torch.inference_mode(False), torch.no_grad(), self.around, torch.cuda.stream(self._stream):
                with self.job.trace.span("wait"):
                    self._awaited.wait()
                self._awaited = next(self._chain, None)

    def update(self, bucket: Bucket) -> None:
        """Returns when the parameters of a bucket are whole (on a GPU its stream waits); goes on with the others."""
        self.go_on(bucket if bucket.pending else None)
        self.job.trace.poll_transfers()
        if bucket.pending:
            gathers, self.shards[bucket].gathers = self.shards[bucket].gathers, []
            with self.job.trace.span("wait", bytes=bucket.flat.nbytes):
                for work in gathers:
                    work.wait()
            bucket.pending = False
            self.job.run_after_update(bucket.used)

    def _update_all(self, buckets: Sequence[Bucket], hyper: Hyper, factor: float) -> Iterator[Work]:
        """The chain of a step; yields each collective that must end before it goes on."""
        state: Any = self.job.optimizer.state
        for bucket in buckets:
            shard = self.shards[bucket]
            yield from bucket.works
            bucket.works.clear()
            for grads in (bucket.flat[own] for own in shard.own):
                grads.div_(self.comm.size)
                if factor != 1:
                    grads.mul_(factor)
            shard.cut(state)
            if self._needs_norms and bucket.used:
                sums = shard.squares(bucket.used)
                yield self.gathers.all_reduce(sums)
                for p, squares in zip(bucket.used, sums.unbind(1), strict=True):
                    for x in shard.slices[p]:
                        state[x]["squares"] = squares
            with self.job.trace.span("update"):
                self.job.update(bucket.used, hyper, slices=shard.slices)
            shard.gathers = shard.gather(shard.flat)
        self._cut = True
