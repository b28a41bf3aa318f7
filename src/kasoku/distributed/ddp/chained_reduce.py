"""Reducers that run several collectives, one after the other, without holding up who starts them.

Note: chains. Between GPUs a chain goes to a side stream, one for each key, and `wait()` lets the current stream wait.
Between CPUs it runs on one thread, in the order of calls, which is the same on every rank. Where ranks take turns in
one process (`Threads`) a chain runs at once, since the others run while one waits.
"""

import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from kasoku.core import Comm, Work
from kasoku.distributed.liveness import daemon

Chain = Generator[Work, None, None]  # yields each collective that must end before it goes on


class Reduce:
    """A reducer that is bound to the ranks of one run: one all-reduce without state.

    A subclass with other collectives overrides `__call__`, and calls `super().__init__(comm)`.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __call__(self, key: str, x: Tensor) -> Work:
        """Starts to average x, a flat chunk of gradients, and returns at once; after `wait()`, x is the mean.

        A collective: all ranks use the same keys and lengths in the same order, and wait before they reuse a key.
        """
        return self.comm.all_reduce(x, op="mean")

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
