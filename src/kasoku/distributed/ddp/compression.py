"""Averages chunks of gradients over ranks: uncompressed, compressed, or hierarchically over nodes.

Note: chains. A reducer may run several collectives, one after the other, without holding up who starts them. Between
GPUs a chain goes to a side stream, one for each key, and `wait()` lets the current stream wait. Between CPUs it runs on
one thread, in the order of calls, which is the same on every rank. Where ranks take turns in one process (`Threads`) a
chain runs at once, since the others run while one waits.
"""

import math
import queue
import threading
import zlib
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from kasoku.core import Checked, Comm, Range, Work
from kasoku.distributed.environment import nodes_of
from kasoku.distributed.liveness import daemon

_WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST = torch.finfo(torch.float32).max
Chain = Generator[Work, None, None]  # yields each collective that must end before it goes on


class Reduce:
    """A reducer that is bound to the ranks of one run: one all-reduce without state.

    A subclass with other collectives overrides `__call__`, and calls `super().__init__(comm)`.

    `scale`: Overlap multiplies gradients by it as it copies them. 1: the all-reduce averages them, else it adds them.
    """

    scale = 1.0

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __call__(self, key: str, x: Tensor) -> Work:
        """Starts to average x, a flat chunk of gradients, and returns at once; after `wait()`, x is the mean.

        A collective: all ranks use the same keys and lengths in the same order, and wait before they reuse a key.
        """
        return self.comm.all_reduce(x, op="mean" if self.scale == 1 else "sum")

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank keeps between steps, by key."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the `state_dict` of this rank; {} clears the state."""

    def settle(self) -> None:
        """Waits until no reduction is in progress and no thread runs."""


class ChainedReduce(Reduce):
    """A reducer that keeps state or needs several collectives, those of `chain`; see Note: chains.

    `chain(reduce, key, x)`: yields the collectives that leave the mean in x.
    """

    def __init__(self, comm: Comm, chain: Callable[[Any, str, Tensor], Chain]) -> None:
        super().__init__(comm)
        self._chain = chain
        self.kept = _Kept()  # saved in checkpoints
        self.buffers = _Kept()
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._todo: queue.SimpleQueue[tuple[Chain, _Later] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, key: str, x: Tensor) -> Work:
        chain, later = self._chain(self, key, x), _Later()
        if not self.comm.thread_safe:
            _run(chain)
            later.set_result(None)
            return later
        if x.is_cuda:
            if key not in self._streams:
                self._streams[key] = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
            return _Aside(chain, x, self._streams[key])
        if self._thread is None:
            self._thread = daemon("reducer", self._run_queue)
        self._todo.put((chain, later))
        return later

    def _run_queue(self) -> None:
        """Runs chains in the order of calls; after an error all later ones fail with it."""
        error: BaseException | None = None
        while (item := self._todo.get()) is not None:
            chain, later = item
            try:
                if error is not None:
                    raise error
                _run(chain)
                later.set_result(None)
            except BaseException as e:
                error = e  # the other ranks' next collective is not ours any more
                later.set_exception(e)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {name: {key: x.to("cpu", copy=True) for key, x in by_key.items()} for name, by_key in self.kept.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.settle()
        self.buffers.clear()
        self.kept = _Kept({name: {key: x.clone() for key, x in by_key.items()} for name, by_key in state.items()})

    def settle(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None


def _run(chain: Chain) -> None:
    for work in chain:
        work.wait()


class _Kept(dict[str, dict[str, Tensor]]):
    """Tensors by name and key, allocated once; again when the shape or type of a key changes."""

    def at(self, name: str, key: str, shape: tuple[int, ...], x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The kept tensor, on the device of x; zeros at first."""
        tensor = self.setdefault(name, {}).get(key)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            tensor = torch.zeros(shape, dtype=dtype, device=x.device)
        self[name][key] = tensor = tensor.to(x.device)
        return tensor


class _Aside:
    """A chain on a side stream: issued whole, since between GPUs a wait holds up the stream and not the host."""

    def __init__(self, chain: Chain, x: Tensor, stream: torch.cuda.Stream) -> None:
        self._device, self._x = x.device, [x]  # whose memory is not reused before the chain has ended
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            _run(chain)
            self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._x.clear()


class _Later(Future[None]):
    """The end of a chain on another thread."""

    def wait(self) -> None:
        self.result()


@dataclass(frozen=True)
class Reducer(Checked):
    """The settings of a method that averages chunks of gradients; `bind` creates the reducer."""

    def bind(self, comm: Comm) -> Reduce:
        """Creates the reducer of this rank; a collective, which all ranks of `comm` call in the same order."""
        raise NotImplementedError(f"{type(self).__name__}.bind")

    def largest(self, ranks: int) -> float:
        """The magnitude up to which gradients are sure to have a finite mean over the ranks; 0: it is not known."""
        return 0.0


@dataclass(frozen=True)
class Mean(Reducer):
    """Averages in the gradients' own type, by one all-reduce.

    Saves: nothing; it is the baseline of the other reducers.
    Costs: all bytes on every link.
    Maths: x = mean over ranks of x.
    """

    def bind(self, comm: Comm) -> Reduce:
        """Each call is one collective; no state is kept."""
        return Reduce(comm)

    def largest(self, ranks: int) -> float:
        return _LARGEST / ranks


@dataclass(frozen=True)
class Wire(Reducer):
    """Sends gradients in 16 bits, and adds the rounding errors to the next step's gradients.

    Each rank sums its part of all ranks' gradients in fp32 and sends the mean to all ranks.

    Args:
        dtype: "bf16" has the range of fp32 and 8 significant bits; "fp16" has 11 bits and ends at 65,504. Larger values
            arrive as inf, which loss scaling detects.

    Saves: half the bytes of fp32: an all-to-all and an all-gather send those of a ring all-reduce.
    Costs: memory, 8 bytes an element (the error in fp32, a send and a receive buffer). When the loss scale changes, the
        kept errors still have the old scale.
    Maths: c = round(x + e); e = x + e - c, or 0 if that is not finite; x = round(mean over ranks of c + f), with f the
        error of that rounding in the last step.
    Ref: Seide et al. 2014 (1-bit SGD: error feedback); Tang et al. 2019 (arXiv 1905.05957: on the mean as well).
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    def bind(self, comm: Comm) -> Reduce:
        """Errors are kept by key and start at zero."""
        return ChainedReduce(comm, self._chain)

    def _chain(self, reduce: ChainedReduce, key: str, x: Tensor) -> Chain:
        n, size, dtype, buffers = x.numel(), reduce.comm.size, _WIRES[self.dtype], reduce.buffers
        part = -(-n // size)
        sent = buffers.at("sent", key, (size * part,), x, dtype)
        parts = buffers.at("parts", key, (size, part), x, dtype)
        mean = buffers.at("mean", key, (part,), x)

        def round_off(x: Tensor, out: Tensor, name: str) -> None:
            """Sets out = x in the wire's dtype, and keeps the rounding error."""
            error = reduce.kept.at(name, key, (x.numel(),), x)
            error.add_(x)
            out.copy_(error)
            error.sub_(out).nan_to_num_(0.0, 0.0, 0.0)

        round_off(x, sent[:n], "error")
        yield reduce.comm.all_to_all(parts, sent)
        torch.sum(parts, 0, dtype=torch.float32, out=mean)
        round_off(mean.div_(size), parts[0], "mean_error")
        yield reduce.comm.all_gather(sent, parts[0])
        x.copy_(sent[:n])

    def largest(self, ranks: int) -> float:
        """Half of what the wire holds: rounding, and the errors of earlier steps, add less than the other half."""
        return _LARGEST / (2 * ranks) if self.dtype == "bf16" else torch.finfo(torch.float16).max / 2


@dataclass(frozen=True)
class LowRank(Reducer):
    """Sends a chunk of gradients, seen as a near-square matrix, as a product of two thin ones (PowerSGD).

    Args:
        rank: columns of the thin matrices, at least 1.
        min_elements: smaller chunks (0 or more) are averaged uncompressed, as are those that two thin matrices would
            not shrink.
        seed: any number, of the first Q, which is random for each key and equal on all ranks.

    Saves: sends 2 * rank * sqrt(n) of n elements: with rank 4, 1 in 128 of 1 M elements.
    Costs: accuracy, if few steps are left to send the kept errors; two collectives, three thin products and a QR a
        chunk; 8 bytes of memory an element (the error in fp32 and the product). A chunk is not a layer, so its matrix
        has less low-rank structure than the layers' own. The ranks get equal bits only on equal hardware, since each
        computes the product itself.
    Maths: M = x + e; P = orthonormal(mean of M Q); e = M - P (M'P)'; Q = mean of M'P; x = P Q'. Q starts the next step.
    Ref: Vogels et al. 2019 (arXiv 1905.13727).
    """

    rank: Annotated[int, Range(at_least=1)] = 4
    min_elements: Annotated[int, Range(at_least=0)] = 2**14
    seed: int = 0

    def shape(self, elements: int) -> tuple[int, int]:
        """The rows and columns of a chunk's matrix; (0, 0) if the chunk is averaged uncompressed."""
        columns = max(1, math.isqrt(elements))
        rows = -(-elements // columns)
        whole = elements < self.min_elements or self.rank * (rows + columns) >= elements
        return (0, 0) if whole else (rows, columns)

    def bind(self, comm: Comm) -> Reduce:
        """Errors and factors are kept by key."""
        return ChainedReduce(comm, self._chain)

    def _chain(self, reduce: ChainedReduce, key: str, x: Tensor) -> Chain:
        n, (rows, columns), buffers, kept = x.numel(), self.shape(x.numel()), reduce.buffers, reduce.kept
        if not rows:
            yield reduce.comm.all_reduce(x, op="mean")
            return
        error = kept.at("error", key, (rows * columns,), x)
        last_q = kept.get("q", {}).get(key)
        p, q = buffers.at("p", key, (rows, self.rank), x), kept.at("q", key, (columns, self.rank), x)
        if last_q is None or last_q.shape != q.shape:  # at first random, from the seed and the key alone
            own = torch.Generator().manual_seed(((self.seed << 32) + zlib.crc32(key.encode())) % 2**64)
            q.copy_(torch.randn(q.shape, generator=own))
        whole = buffers.at("product", key, (rows * columns,), x)
        error[:n].add_(x)
        m = error.view(rows, columns)
        torch.mm(m, q, out=p)
        yield reduce.comm.all_reduce(p, op="mean")
        p.copy_(torch.linalg.qr(p).Q)  # Householder QR is orthonormal even if P is 0, so a lost column comes back
        torch.mm(m.T, p, out=q)
        m.addmm_(p, q.T, alpha=-1)  # minus its own product: with the mean's, differences of ranks would pile up
        error[n:] = 0
        error.nan_to_num_(0.0, 0.0, 0.0)
        yield reduce.comm.all_reduce(q, op="mean")
        torch.mm(p, q.T, out=whole.view(rows, columns))
        x.copy_(whole[:n])
        q.nan_to_num_(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Hierarchical(Reducer):
    """Reduce-scatters inside each node, averages each rank's part across nodes, then all-gathers inside the node.

    Args:
        node: ranks of a node, which have consecutive numbers, 0 or more; 0: those that share a host.
        across: the reducer across nodes: Mean, or Wire or LowRank for slow links.

    Saves: each rank sends only n / node of n bytes across nodes, in a ring with one member for each node.
    Costs: two more collectives a chunk; memory for a part, and for a copy of the chunk if `node` does not divide it.
    Maths: x = mean over ranks of x, summed in another order.
    Ref: [000] and its MLPerf v0.6 entry; Jia et al. 2018 (arXiv 1807.11205); Mikami et al. 2018 (arXiv 1811.05233).
    """

    node: Annotated[int, Range("0 takes the ranks that share a host", at_least=0)] = 0
    across: Reducer = field(default_factory=Mean)

    def bind(self, comm: Comm) -> Reduce:
        """Creates the groups of ranks. Mean if all share one node, `across` alone if each has its own."""
        nodes = nodes_of(comm, self.node, "Hierarchical")
        if len(nodes) == 1:
            return Reduce(comm)
        return self.across.bind(comm) if len(nodes) == comm.size else _Hierarchical(comm, nodes, self.across)

    def largest(self, ranks: int) -> float:
        return min(_LARGEST / ranks, self.across.largest(ranks))


class _Hierarchical(ChainedReduce):
    def __init__(self, comm: Comm, nodes: list[list[int]], across: Reducer) -> None:
        super().__init__(comm, _Hierarchical._within_and_across)
        self._node = len(nodes[0])
        # scatter and gather have a group each, so that one piece can be scattered while another is gathered
        self._scatter, self._gather = (comm.sub(nodes) for _ in range(2))
        self._across = across.bind(comm.sub(list(zip(*nodes, strict=True))))

    def _within_and_across(self, key: str, x: Tensor) -> Chain:
        n = x.numel()
        length = -(-n // self._node)
        part = self.buffers.at("part", key, (length,), x, x.dtype)
        whole = x
        if length * self._node > n:
            whole = self.buffers.at("whole", key, (length * self._node,), x, x.dtype)
            whole[:n].copy_(x)
            whole[n:] = 0
        yield self._scatter.reduce_scatter(part, whole)
        part.div_(self._node)
        yield self._across(key, part)
        yield self._gather.all_gather(whole, part)
        if whole is not x:
            x.copy_(whole[:n])

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return self._across.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({})
        self._across.load_state_dict(state)

    def settle(self) -> None:
        super().settle()
        self._across.settle()
