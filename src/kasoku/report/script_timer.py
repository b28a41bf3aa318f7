"""Times the steps of a training loop that is not kasoku's, from the outside; docs/report.md says what each row is."""

import atexit
import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial, wraps
from pathlib import Path
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
from kasoku.core.torch_internals import at_end_of_backward, data_loader_iterator, replace_call
from kasoku.distributed import TorchComm
from kasoku.report.bottleneck import StepBottleneck, StepFacts, facts_of
from kasoku.report.ledger import Document, Ledger, Steps, documents_of

_COLLECTIVES = ("all_", "barrier", "broadcast", "gather", "recv", "reduce", "scatter", "send")  # names begin so
_ONE_CALL = (nn.DataParallel, torch.jit.ScriptModule)  # and what torch.compile returns: nothing within is timed
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: of classes written in C
_REMEDIES = {  # where those of a recipe do not fit
    "input-bound": "raise the DataLoader's num_workers, keep its workers, or store smaller images (kasoku pack)",
    "communication-bound": "plan DDP's buckets (kasoku plan --buckets), send bf16, or take a larger batch",
    "loop-bound": "read losses with .item() and write logs less often",
    "oversubscribed": "set OMP_NUM_THREADS to the cores of a rank",
}


class ScriptTimer:
    """Follows the steps of the thread that creates it; `ledger`: of those after the first `warm`, None before."""

    def __init__(self, loader: object = None, *, clock: Clock | None = None, warm: int = 3) -> None:
        self.trace, self.patches = Trace(clock or Wall()), Patches()
        self.ledger: Ledger | None = None
        self.comm: Comm = Solo()
        self._warm, self._count, self._thread = warm, 0, threading.get_ident()
        self._optimizers = weakref.WeakKeyDictionary[Optimizer, None]()  # in the order of their first steps
        self._model: Callable[[], nn.Module | None] = lambda: None  # which was trained last
        self._outermost: nn.Module | None = None  # whose forward runs
        self._in_backward = self._had_backward = False
        self._forwards, self._batch, self._rest = 0, 0, "other"  # in training; images of one; the phase between others

        self.patches.callback(register_optimizer_step_pre_hook(lambda *_: self._phase("update")).remove)
        self.patches.callback(register_optimizer_step_post_hook(self._stepped).remove)
        self.wrap(torch.autograd, "backward", self._backward)
        self.wrap(torch, "save", partial(self._within, "save", ""))
        self.wrap(DataLoader, "__iter__", self._input)
        self.wrap(data_loader_iterator, "__next__", self._input)
        if hasattr(loader, "__iter__") and not (isinstance(loader, DataLoader) or type(loader).__flags__ & _IMMUTABLE):
            self.wrap(type(loader), "__iter__", self._batches)
        for name in ("to", "cuda") if torch.version.cuda or torch.version.hip else ():
            self.wrap(Tensor, name, self._copy)
        self.wrap(dist.Work, "wait", partial(self._within, "wait", ""))
        for name, function in [*vars(dist).items()]:
            if name.startswith(_COLLECTIVES) and type(function) is type(dist.barrier):
                self.wrap(dist, name, partial(self._within, "wait", name))

    def attach(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Times the calls of the modules with most of the optimizer's weights."""
        sizes = {id(p): p.numel() for group in optimizer.param_groups for p in group["params"]}
        closed = [m for m in modules if hasattr(m, "_orig_mod") or isinstance(m, _ONE_CALL)]
        inside = {id(part) for m in closed for part in m.modules() if part is not m}
        for m in modules:
            if id(m) not in inside and 2 * sum(sizes.get(id(p), 0) for p in m.parameters()) > sum(sizes.values()):
                self.patches.callback(replace_call(m, self._forward))

    def begin(self, optimizer: Optimizer, model: nn.Module | None) -> Ledger:
        """Begins the ledger, of the steps from now on; measures the cost of a layer's call, some milliseconds."""
        self.comm = TorchComm() if dist.is_initialized() else Solo()
        self.trace.rank = self.comm.rank
        self._facts = facts_of(Job(nn.Identity() if model is None else model, optimizer, comm=self.comm), 1)
        self._rest = "forward" if model is None else "other"  # compiled code hides the model
        self.trace.follower = Steps(self.trace.clock, optimizer.param_groups[0]["params"][0].device)
        self.trace.phase(self._rest)
        self.ledger = Ledger(self.trace, started=self.trace.clock.now())
        self._forwards, self._others_s = 0, _others_s(self._facts.processes)
        return self.ledger

    def finish(self) -> dict[str, Any]:
        """Undoes the changes; returns this rank's part of the documents, for JSON: empty without a whole step."""
        self.patches.close()
        if self.ledger is None or not self.ledger.steps.count:
            return {}
        own, n = self.ledger.of_rank(), self.ledger.steps.count
        others = max(0.0, _others_s(self._facts.processes) - self._others_s) / sum(own["rows"].values())
        starved = round(min(0.95, others, self.ledger.starved()), 4)  # a core that a thread of ours takes is no loss
        facts = replace(self._facts, batch=self._batch or 1024, parts=round(self._forwards / n) or 1, starved=starved)
        return own | {"rank": self.comm.rank, "ranks": self.comm.size, "steps": n, "facts": asdict(facts)}

    # ---- called by the script

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Has the calls of a function that this thread makes go to around(function, ...)."""
        call = getattr(owner, name)
        timed = partial(around, call)
        self.patches.set(owner, name, wraps(call)(lambda *args, **kw: (timed if self._here() else call)(*args, **kw)))

    def _here(self) -> bool:
        mine = not torch.compiler.is_compiling() and threading.get_ident() == self._thread
        return mine and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]

    def _phase(self, kind: str) -> None:
        if self._here():
            self.trace.phase(kind)

    def _within(self, kind: str, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.trace.span(kind, name):
            return original(*args, **kwargs)

    def _input(self, original: Callable[..., Any], *args: Any) -> Any:
        model = self._model()
        trains = torch.is_grad_enabled() and (model is None or model.training)
        self.trace.phase(self._rest if trains else "evaluate")
        return self._within("input", "", original, *args)

    def _batches(self, original: Callable[..., Iterable[Any]], loader: Any) -> Iterator[Any]:
        iterator, end = iter(self._input(original, loader)), object()
        while (batch := self._input(next, iterator, end)) is not end:
            yield batch

    def _copy(self, original: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if x.is_cuda else self.trace.span("copy"):
            return original(x, *args, **kwargs)

    def _forward(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outer, trains = self._outermost, module.training and torch.is_grad_enabled()
        if not self._here() or outer is not None:
            if trains and isinstance(outer, DistributedDataParallel) and outer.module is module:
                self._phase("forward")
            return call(*args, **kwargs)
        self._outermost, waits = module, isinstance(module, DistributedDataParallel)
        self.trace.phase("evaluate" if not trains else "exposed" if waits else "forward")
        if trains:
            sizes = (len(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim())
            self._forwards, self._batch = self._forwards + 1, max(self._batch, next(sizes, 0))  # the last may be small
            self._model = weakref.ref(module)
        try:
            return call(*args, **kwargs)
        finally:
            self._outermost = None
            if trains:
                self.trace.phase("backward")

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward:  # activations that are recomputed have a backward of their own
            return original(tensors, *args, **kwargs)
        self.trace.phase("backward")
        self._in_backward = self._had_backward = True
        loss: Any = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if isinstance(self.comm, TorchComm) and getattr(loss, "requires_grad", False):
            loss.register_hook(lambda _: at_end_of_backward(lambda: self.trace.phase("exposed")))
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
            self.trace.phase(self._rest)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        if not self._here():
            return
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = None
            if self._warm:
                self.attach(optimizer, [x for x in gc.get_objects() if issubclass(type(x), nn.Module)])
        if optimizer is next(iter(self._optimizers)) and self._had_backward:  # a step within a step has hooks, too
            self._count += 1
            if self.ledger is not None:
                self.ledger.steps.end()
            elif self._count >= self._warm:
                self.begin(optimizer, self._model())
            self._had_backward = False
        self.trace.phase(self._rest)


def _others_s(ranks: int) -> float:
    """Seconds for which programs other than these ranks have computed on this machine; 0 unless it runs Linux."""
    with suppress(OSError, ValueError), open("/proc/stat") as stat:
        return sum(map(int, stat.readline().split()[1:4])) / os.sysconf("SC_CLK_TCK") - ranks * time.process_time()
    return 0.0


def follow_script() -> None:
    """Times the steps of this process, if it makes any, and writes them into $KASOKU_PROFILE at its end."""
    timer, process, folder = ScriptTimer(), os.getpid(), Path(os.environ["KASOKU_PROFILE"])

    def write() -> Any:
        if os.getpid() == process and (result := timer.finish()):  # no fork, as the workers of a DataLoader are
            write_text(folder / f"{result['rank']}-{process}.json", json.dumps(result))

    def write_and(leave: Callable[[int], Any], code: int) -> Any:
        try:
            write()
        finally:
            leave(code)

    timer.wrap(os, "_exit", write_and)
    atexit.register(write)


def script_documents(ranks: Sequence[Document]) -> tuple[Document, Document]:
    """The contents of ledger.json and timeline.json, of what `ScriptTimer.finish` gave on each rank."""
    document, timeline = documents_of(ranks, StepFacts(**ranks[0]["facts"] | {"ranks": [r["rank"] for r in ranks]}))
    for cause in document["verdict"]:
        cause["remedy"] = _REMEDIES.get(cause["cause"], cause["remedy"])
    return document, timeline


@contextmanager
def watch(model: nn.Module, optimizer: Optimizer, loader: object = None) -> Iterator[Ledger]:
    """Times the steps of a loop of your own, which runs within it; at its end rank 0 prints the bottlenecks.

    Collective at its end if there is a process group: all ranks reach it, or none does. It does not drain.
    `loader`: a DataLoader, or any iterable; one of a class written in C, such as a list, is not timed.
    """
    timer = ScriptTimer(loader, warm=0)
    with timer.patches:
        timer.attach(optimizer, [*model.modules()])
        yield timer.begin(optimizer, model)
        ranks = timer.comm.gather_objects(timer.finish())
    if timer.comm.rank == 0 and all(ranks):
        print(*(StepBottleneck(**cause) for cause in script_documents(ranks)[0]["verdict"]), sep="\n")
