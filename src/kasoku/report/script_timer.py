"""Times the steps of a training loop that is not kasoku's, through torch's own hooks; the loop is not changed.

Note: where the rows come from. A step ends with `optimizer.step()`. Input is the time in the DataLoader's iterator.
Forward is that of the outermost module with most of the optimizer's weights, which is looked for after the first step;
backward lasts from its end to that of `backward()`. Exposed are collectives and waits for them, what DDP does before
the network's own forward, and the time from the last gradient to the end of backward, in which DDP waits for its
buckets. Copies to a GPU are those of `Tensor.to` and `Tensor.cuda`. The rest is "other".
"""

import atexit
import functools
import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from kasoku.core import Clock, Comm, Job, Solo, Trace, Wall
from kasoku.core.files import write_text
from kasoku.core.job_state import Patches
from kasoku.core.torch_internals import at_end_of_backward, data_loader_iterator
from kasoku.distributed import TorchComm
from kasoku.report.bottleneck import facts_of
from kasoku.report.ledger import Ledger
from kasoku.report.phase_timer import Steps

_COLLECTIVES = ("all_", "barrier", "broadcast", "gather", "recv", "reduce", "scatter", "send")  # names begin so


class ScriptTimer:
    """Follows the steps of the first optimizer that steps, on the thread that creates the timer.

    Attributes: `ledger`: of the steps after the first `warm`, None before; `patches`: the hooks, while it follows.
    """

    def __init__(self, clock: Clock | None = None, *, warm: int = 3) -> None:
        self.trace, self.patches = Trace(clock or Wall()), Patches()
        self.ledger: Ledger | None = None
        self.comm: Comm = Solo()
        self._warm, self._count, self._thread = warm, 0, threading.get_ident()
        self._optimizer: Callable[[], Optimizer | None] = lambda: None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._outermost: nn.Module | None = None  # whose forward runs
        self._in_backward = self._had_backward = False
        self._forwards, self._parts, self._batch = 0, 1, 1024  # of a step, of the last one; images of a forward

    def start(self, loader: object = None) -> None:
        """Registers the hooks that need no model; `loader`: other batches to follow than those of a DataLoader."""
        self.patches.callback(register_optimizer_step_pre_hook(lambda *_: self._phase("update")).remove)
        self.patches.callback(register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer)).remove)
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch, "save", self._within("save"))
        self._wrap(DataLoader, "__iter__", self._iterate)
        self._wrap(data_loader_iterator, "__next__", self._within("input"))
        if not isinstance(loader, DataLoader) and type(loader).__module__ != "builtins":
            self._wrap(type(loader), "__iter__", self._batches)
        for name in ("to", "cuda") if torch.cuda.is_available() else ():
            self._wrap(Tensor, name, self._copy)
        if dist.is_available():
            self._wrap(dist.Work, "wait", self._within("wait"))
            for name, function in [*vars(dist).items()]:
                if name.startswith(_COLLECTIVES) and type(function) is FunctionType:
                    self._wrap(dist, name, self._within("wait", name))

    def attach(self, optimizer: Optimizer, modules: Iterable[nn.Module]) -> None:
        """Times the forwards of the modules with most of the optimizer's weights, without parts of a compiled one."""
        modules = list(modules)
        sizes = {id(p): p.numel() for group in optimizer.param_groups for p in group["params"]}
        inside = {id(part) for m in modules if hasattr(m, "_orig_mod") for part in m.modules() if part is not m}
        for m in modules:
            if id(m) not in inside and 2 * sum(sizes.get(id(p), 0) for p in m.parameters()) > sum(sizes.values()):
                self.patches.callback(m.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True).remove)
                self.patches.callback(m.register_forward_hook(self._leave, always_call=True).remove)

    def begin(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Begins the ledger, of the steps from now on; measures the cost of a layer's call, some milliseconds."""
        self.comm = TorchComm() if dist.is_available() and dist.is_initialized() else Solo()
        self.trace.rank = self.comm.rank
        self._facts = facts_of(Job(model, optimizer, comm=self.comm), 1)
        self._phase("other")
        self.trace.follower = Steps(self.trace.clock, optimizer.param_groups[0]["params"][0].device)
        self.ledger = Ledger(self.trace, started=self.trace.clock.now())
        self._cpu_s = time.process_time()

    def finish(self) -> dict[str, Any]:
        """Removes the hooks; returns this rank's part of the documents, for JSON: empty without a whole step."""
        self.patches.close()
        if self.ledger is None or not self.ledger.steps.count:
            return {}
        facts = replace(self._facts, batch=self._batch, parts=self._parts, starved=min(0.95, self.ledger.starved()))
        own = self.ledger.of_rank()
        busy = (time.process_time() - self._cpu_s) / sum(own["rows"].values()) / min(facts.threads, facts.cores)
        if facts.device != "cpu":
            busy = sum(own["mean_s"][row] for row in ("forward", "backward", "update")) / sum(own["mean_s"].values())
        own |= {"rank": self.comm.rank, "ranks": self.comm.size, "steps": self.ledger.steps.count}
        return own | {"facts": asdict(facts), "idle": max(0.0, 1 - busy)}

    # ---- hooks

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Has the calls of a function that this thread makes go to around(function, ...)."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self._here() else original(*args, **kwargs)

        self.patches.set(owner, name, wrapped)

    def _here(self) -> bool:
        return threading.get_ident() == self._thread

    def _phase(self, kind: str) -> None:
        if self._here():
            self.trace.phase(kind)

    def _within(self, kind: str, name: str = "") -> Callable[..., Any]:
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.trace.span(kind, name):
                return original(*args, **kwargs)

        return call

    def _iterate(self, original: Callable[..., Any], loader: Any) -> Any:
        self._phase("other")  # an evaluation has ended
        return self._within("input")(original, loader)

    def _batches(self, original: Callable[..., Iterable[Any]], loader: Any) -> Iterator[Any]:
        iterator, end = iter(self._iterate(original, loader)), object()
        while (batch := self._within("input")(next, iterator, end)) is not end:
            yield batch

    def _copy(self, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if x.is_cuda else self.trace.span("copy"):
            return original(x, *args, **kwargs)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        outer, trains = self._outermost, module.training and torch.is_grad_enabled()
        if outer is None and self._here():
            self._outermost, wraps = module, isinstance(module, DistributedDataParallel)
            self._phase("evaluate" if not trains else "exposed" if wraps else "forward")
            self._forwards += trains
            if self.ledger is None or self._model() is None:
                sizes = [len(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
                self._model, self._batch = weakref.ref(module), sizes[0] if sizes else self._batch
        elif trains and isinstance(outer, DistributedDataParallel) and outer.module is module:
            self._phase("forward")

    def _leave(self, module: nn.Module, *_: object) -> None:
        if module is self._outermost and self._here():
            self._outermost = None
            if module.training and torch.is_grad_enabled():
                self._phase("backward")

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward:  # activations that are recomputed have a backward of their own
            return original(tensors, *args, **kwargs)
        self._phase("backward")
        self._in_backward = self._had_backward = True
        loss: Any = tensors if isinstance(tensors, Tensor) else tensors[0]
        if isinstance(self.comm, TorchComm) and getattr(loss, "requires_grad", False):
            loss.register_hook(lambda _: at_end_of_backward(lambda: self.trace.phase("exposed")))
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
            self._phase("other")

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._optimizer() is None and self._here():
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer and self._had_backward:  # a step that calls its parent's has two hooks
            self._count += 1
            if self.ledger is not None:
                self.ledger.steps.end()
            elif self._count == 1 and self._warm:
                self.attach(optimizer, [x for x in gc.get_objects() if issubclass(type(x), nn.Module)])
            elif self._count >= self._warm:
                self.begin(optimizer, self._model() or nn.Identity())
            self._parts, self._forwards, self._had_backward = max(1, self._forwards), 0, False
        self._phase("other")


def follow_script(folder: Path) -> None:
    """Times the steps of this process, if it makes any, and writes them into a folder at its end."""
    timer = ScriptTimer()
    timer.start()

    def write() -> None:
        if result := timer.finish():
            write_text(folder / f"{result['rank']}-{os.getpid()}.json", json.dumps(result))

    atexit.register(write)


@contextmanager
def watch(
    model: nn.Module, optimizer: Optimizer, loader: object = None, *, out: str | Path | None = None
) -> Iterator[Ledger]:
    """Times the steps of a loop of your own, which runs within it; at its end rank 0 prints the bottlenecks.

    Collective at its end if there is a process group: all ranks reach it, or none does. It does not drain.

    Args:
        model: the module that the loop calls.
        optimizer: its `step()` ends a step.
        loader: whose batches the loop takes: a DataLoader, or any iterable of a class that is not built in.
        out: a folder for the files that `kasoku profile` writes, and `kasoku report` draws.
    """
    timer = ScriptTimer(warm=0)
    with timer.patches:
        timer.start(loader)
        timer.attach(optimizer, model.modules())
        timer.begin(optimizer, model)
        yield timer.ledger  # type: ignore[misc]
        result = timer.finish()
    from kasoku.report.profile_tables import report_ranks  # imports kasoku.data, which no timed script waits for

    ranks = timer.comm.gather_objects(result)
    if timer.comm.rank == 0 and all(ranks):
        report_ranks(ranks, Path(out) if out else None)
