"""The plain objects of a training, the moments at which techniques act, and the methods they use.

Note: a technique that takes gradients also updates their parameters. If it updates a part of the model outside
`optimizer.step()`, it saves `job.hyper()` in `before_step` (a scheduler may change the rates before the late update),
sets `p.grad = None` for the gradients that it took, so that the user's own `step()` skips them, and calls
`job.update(part, hyper)` when the part may be changed. Other code calls `job.drain()` before it reads parameters.

Note: inside a step. Torch's step hooks fire twice if an optimizer's `step` calls `super().step()`, so the depth of the
calls is counted and ours run once. `before_step` runs the hooks of the technique applied last first: techniques that
communicate are applied last, and have finished before one that reads all gradients (clipping) starts.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kasoku.core.comm import Comm, default_comm
from kasoku.core.errors import InputError
from kasoku.core.hardware import laid_out_like
from kasoku.core.job_state import Batch, Batches, Hyper, Patches, Slices, Stateful, batches_of
from kasoku.core.technique import Technique
from kasoku.core.torch_internals import remove_step_hooks, runs_step_hooks
from kasoku.core.trace import Trace

Around = Callable[[], AbstractContextManager[object]]
_SET_BY_TORCH = ("_need_device_dtype_check_for_fused",)  # by torch's own step() on itself; no state of the rule


class Job:
    """Model, optimizer, loader and loss of one training, on one rank.

    Args:
        model: a plain module.
        optimizer: a torch optimizer, or a function model -> optimizer (called on first use, after MODEL techniques).
        loader: yields (x, y) on the device; one pass is one epoch.
        loss: (outputs, y) -> scalar.
        comm: the collectives between ranks; one rank by default, where no process group has several.
        accumulate: backward passes before each `optimizer.step()`.

    Attributes:
        steps: optimizer steps so far.
        needs_whole_gradients: an applied technique reads all gradients before the first parameter is updated.
        in_backward: the `BackwardUpdates` of a technique that uses gradients as they arrive; None without one.
        vetoes_steps: an applied technique decides at each step whether any parameter changes.
        rehearses: a technique runs a forward and backward of its own, which others are not to count.
        step_comm: the ranks that make each step together; not all of `comm` where ranks run ahead, until a sync point.
        patches: what techniques changed in other objects.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[nn.Module], Optimizer],
        *,
        loader: Iterable[Batch] = (),
        loss: Callable[[Any, Tensor], Tensor] = nn.functional.cross_entropy,
        comm: Comm | None = None,
        accumulate: int = 1,
    ) -> None:
        if accumulate < 1:
            raise InputError(f"accumulate={accumulate}: at least 1 backward pass before each step")
        self.model, self.loss, self.loader = model, loss, loader
        self.comm: Comm = comm or default_comm()
        self.step_comm = self.comm
        if self.comm.size > 1 and hasattr(loader, "trace") and getattr(loader, "size", 0) == 1:  # a loader of ours
            raise InputError(f"loader without comm beside a Job of {self.comm.size} ranks: give both the same comm")
        self.accumulate = accumulate
        self.clock = self.comm.clock
        self.trace = Trace(self.clock, rank=self.comm.rank)
        self.needs_whole_gradients = self.vetoes_steps = self.rehearses = False
        self.in_backward: Any = None
        self.patches = Patches()
        self.applied, self.documents = list[Technique](), dict[str, Callable[[], object]]()
        self.trackers: tuple[Any, ...] = ()  # of experiments, which take the metrics: see kasoku.tracking
        self.steps = self._depth = 0  # depth: of calls of `optimizer.step()` under way
        self._since: tuple[float, ...] = (0, 0.0)  # steps and epochs when the length of an epoch changed last
        self._make_optimizer = optimizer
        self._optimizer: Optimizer | None = None
        self._stepping, self._kept = list[Tensor](), dict[str, Stateful]()
        self._backwards: dict[Tensor, int] = {}  # how many each parameter has had since the last step
        self._hooks: defaultdict[str, list[Callable[..., object]]] = defaultdict(list)  # by the name of their moment
        self._around_evaluation: list[tuple[bool, Around]] = []
        if hasattr(loader, "trace"):
            self.patch(loader, "trace", self.trace)

    # ---- plain objects

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer; a function that builds it is called on first use."""
        if self._optimizer is None:
            build = self._make_optimizer
            optimizer = build if isinstance(build, Optimizer) else build(self.model)
            if not runs_step_hooks(optimizer):
                raise InputError(f"{type(optimizer).__name__}.step() runs no hooks: give Job the optimizer in it")
            self.on_close(optimizer.register_step_pre_hook(self._begin_step).remove)
            self.on_close(optimizer.register_step_post_hook(self._end_step).remove)
            self._optimizer = optimizer
        return self._optimizer

    @property
    def plain_loader(self) -> Any:
        """The user's loader, without the generators of techniques."""
        return getattr(self.loader, "plain", self.loader)

    @property
    def progress(self) -> float:
        """Epochs so far, by the number of steps: the argument of every Schedule."""
        steps, epochs = self._since
        batches = batches_of(self.loader)
        return epochs + (self.steps - steps) * self.accumulate / max(1, batches)

    def state_of(self, p: Tensor) -> dict[str, Any]:
        """The optimizer's state of a parameter, to be changed in place; empty while there is no optimizer or state."""
        optimizer = self._optimizer or self._make_optimizer
        return optimizer.state.get(p, {}) if isinstance(optimizer, Optimizer) else {}

    # ---- moments

    def gradient_ready(self, f: Callable[[Tensor], None]) -> None:
        """Calls f(p) when the gradient of parameter p is complete: added up over all `accumulate` backward passes."""
        if not self._hooks["gradient_ready"]:
            for p in self.model.parameters():
                if p.requires_grad:
                    hook: Callable[..., Any] = p.register_post_accumulate_grad_hook
                    self.on_close(hook(self._count_backward).remove)
        self._hooks["gradient_ready"].append(f)

    def before_step(self, f: Callable[[], object]) -> None:
        """Calls f() when the loop calls `optimizer.step()`, before any parameter changes."""
        _ = self.optimizer
        self._hooks["before_step"].append(f)

    def decide_step(self, f: Callable[[Tensor], float | None]) -> None:
        """Calls f(overflow) where a technique asks for the `decision` on a step; f returns a factor, or None."""
        self._hooks["decide_step"].append(f)

    def after_update(self, f: Callable[[Sequence[Tensor]], None]) -> None:
        """Calls f(params) after an update. `params`: the parameters that it changed, all of the model or some."""
        _ = self.optimizer
        self._hooks["after_update"].append(f)

    def after_step(self, f: Callable[[], None]) -> None:
        """Calls f() when `optimizer.step()` has ended and is counted, whether or not a parameter changed."""
        _ = self.optimizer
        self._hooks["after_step"].append(f)

    def around_loader(self, f: Callable[[Iterable[Batch]], Iterable[Batch]]) -> None:
        """Puts f around the loader: each epoch iterates f(loader)."""
        self.patch(self, "loader", Batches(self.plain_loader, self.loader, f))

    def configure_loader(self, **settings: Any) -> None:
        """Changes settings of the loader's pipeline, until `close()`."""
        self.on_close(self.plain_loader.configure(**settings))

    def around_evaluation(self, f: Around, *, renews_statistics: bool = False) -> None:
        """Evaluates inside the context f(), which sets averaged weights or new statistics, then the old ones again."""
        self._around_evaluation.append((renews_statistics, f))

    def on_drain(self, f: Callable[[], None]) -> None:
        """Calls f() before parameters are read from outside; f finishes pending updates."""
        self._hooks["on_drain"].append(f)

    def at_sync_point(self, f: Callable[[float], None]) -> None:
        """Calls f(steps) where ranks that ran ahead have equal weights again; `steps`: the mean number since then."""
        self._hooks["at_sync_point"].append(f)

    def after_regrouping(self, f: Callable[[], None]) -> None:
        """Calls f() on all ranks of `comm` when `step_comm` has changed, so f may call its collectives."""
        self._hooks["after_regrouping"].append(f)

    def on_close(self, f: Callable[[], object]) -> None:
        """Calls f() at `close()`; what was registered last comes first."""
        self.patches.callback(f)

    # ---- methods

    def apply(self, *techniques: Technique) -> "Job":
        """Applies techniques, sorted by stage. Raises InputError for two that cannot be combined."""
        ordered = sorted(techniques, key=lambda t: t.stage)
        for i, technique in enumerate(ordered):
            if isinstance(technique, type):
                raise InputError(f"{technique.__name__} is a class: give {technique.__name__}(...), with its settings")
            for other in [*self.applied, *ordered[:i]]:
                if conflict := technique.conflict(other):
                    raise InputError(conflict)
            if self.applied and technique.stage < self.applied[-1].stage:
                name, late = type(technique).__name__, type(self.applied[-1]).__name__
                raise InputError(f"technique {name} comes before {late}: give both to one call of apply")
        if ordered and isinstance(self._make_optimizer, Optimizer):
            _ = self.optimizer  # until `close()` its steps are counted, those of the user too
        self.applied += ordered
        for technique in ordered:
            self.step_comm = technique.ranks_in_step(self.step_comm, self.applied)
        for technique in ordered:
            self.needs_whole_gradients |= technique.needs_whole_gradients
            self.vetoes_steps |= technique.vetoes_steps
            technique.apply(self)
        return self

    def update(self, params: Iterable[Tensor], hyper: Hyper | None = None, *, slices: Slices | None = None) -> None:
        """The optimizer's own step on some of its parameters, without its step hooks; then the `after_update` hooks.

        A twin of the optimizer, which shares its state, steps on parameter groups that hold these parameters only.

        Args:
            params: parameters with their gradients in `p.grad`.
            hyper: the settings to use, saved earlier by `hyper()`; None: those of now.
            slices: updated instead of the parameters, with state of their own; no `after_update` hook runs.

        Raises:
            InputError: for an optimizer with state outside `state[p]`, which this would change for all parameters.
        """
        optimizer, part = self.optimizer, {p: (p,) if slices is None else slices[p] for p in params}
        settings = optimizer.param_groups if hyper is None else hyper
        twin = object.__new__(type(optimizer))
        vars(twin).update({k: v for k, v in vars(optimizer).items() if k != "step"})
        remove_step_hooks(twin)
        twin.param_groups = [
            {**own, "params": [x for p in group["params"] for x in part.get(p, ())]}
            for group, own in zip(optimizer.param_groups, settings, strict=True)
        ]
        before = {k: v for k, v in vars(twin).items() if k not in ("state", "param_groups")}
        type(optimizer).step(twin)
        changed = [k for k, v in vars(twin).items() if k in before and before[k] is not v and k not in _SET_BY_TORCH]
        groups = zip(twin.param_groups, settings, strict=True)
        changed += [f"param_groups[{k!r}]" for g, h in groups for k in g if k != "params" and g[k] is not h.get(k)]
        if changed or not all(isinstance(key, Tensor) for key in optimizer.state):
            what = f"self.{changed[0]}" if changed else "state of its own"
            got = f"optimizer {type(optimizer).__name__} keeps {what} outside state[p]"
            advice = "use a rule that keeps its state per parameter, or leave the technique out"
            raise InputError(f"{got}, so a part of the model cannot be updated alone: {advice}")
        if slices is None:
            self.run_after_update([p for group in optimizer.param_groups for p in group["params"] if p in part])

    def decision(self, overflow: Tensor) -> float | None:
        """The factor of this step's gradients; None: no parameter changes. Collective on `step_comm`, in `before_step`.

        `overflow`: above 0 where this rank's gradients are not all finite, or their mean over ranks may not be.
        """
        factors: list[Any] = [f(overflow) for f in self._hooks["decide_step"]]
        return None if None in factors else math.prod(factors)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one batch; its loss is divided by `accumulate`, so that a step takes the mean."""
        self._depth = 0  # also after a step that raised an error
        (loss / self.accumulate if self.accumulate > 1 else loss).backward()  # type: ignore[no-untyped-call]

    def run_after_update(self, params: Sequence[Tensor]) -> None:
        """Runs the `after_update` hooks. Techniques that update parameters without `update` call it."""
        if params:
            self.run_hooks("after_update", params)

    def run_hooks(self, moment: str, *arguments: Any) -> None:
        """Runs the hooks of a moment, such as "at_sync_point"."""
        for f in self._hooks[moment]:
            f(*arguments)

    def hyper(self) -> Hyper:
        """The settings of each parameter group as they are now (a scheduler may change a tensor of them in place)."""
        return [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]

    def set_progress(self, epochs: float, steps: int | None = None) -> None:
        """Sets `progress`, or keeps it: call it after changing the loader's length or `accumulate`.

        `steps`: sets the number of steps, too, where other ranks made some of them.
        """
        self.steps = self.steps if steps is None else steps
        self._since = (self.steps, epochs)

    def drain(self) -> None:
        """Finishes pending updates; call it before you read parameters. Collective with `Overlap(shard=True)`."""
        self.run_hooks("on_drain")

    @contextmanager
    def evaluation(self, *, renew_statistics: bool = True) -> Iterator[nn.Module]:
        """The model to evaluate: drained, in eval mode, with averaged weights where a technique has them.

        `renew_statistics`: False skips each `around_evaluation` that renews BatchNorm's, to measure its effect.
        """
        self.drain()
        with ExitStack() as stack, torch.no_grad():
            for module in self.model.modules():
                stack.callback(setattr, module, "training", module.training)
            for renews_statistics, f in self._around_evaluation:
                if renew_statistics or not renews_statistics:
                    stack.enter_context(f())
            self.model.eval()
            yield self.model

    def keep(self, name: str, stateful: Stateful) -> None:
        """Puts the state of an object into every checkpoint, as `name`."""
        if name in self._kept:
            raise ValueError(f"keep({name!r}): the name is taken; give the part another one")
        self._kept[name] = stateful
        self.on_close(lambda: self._kept.pop(name))

    def document(self, name: str, build: Callable[[], object]) -> None:
        """Adds a JSON file to the run folder; it is built when the training ends."""
        self.documents[name] = build
        self.on_close(lambda: self.documents.pop(name))

    def kept(self, name: str) -> Any:
        """The object that `keep` added as `name`."""
        return self._kept[name]

    def patch(self, thing: object, name: str, value: object) -> None:
        """Sets an attribute until `close()`."""
        self.patches.set(thing, name, value)

    def close(self) -> None:
        """Drains, removes all techniques, and leaves the user's objects as they were before the job."""
        if self._optimizer is not None:
            self.drain()
        self.patches.close()
        for kept in (self._hooks, self._around_evaluation, self.applied):
            kept.clear()
        self.needs_whole_gradients = self.vetoes_steps = False
        self.step_comm = self.comm

    # ---- checkpoints

    def state_dict(self, *, drain: bool = True) -> dict[str, Any]:
        """All that resuming needs but weights: optimizer, loader, techniques. Collective unless `drain` is False."""
        if drain:
            self.drain()
        return {
            "steps": self.steps,
            "since": list(self._since),
            "optimizer": self.optimizer.state_dict(),
            "loader": getattr(self.plain_loader, "state_dict", dict)(),
            "kept": {name: part.state_dict() for name, part in self._kept.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Apply the techniques first; raises InputError if they are other ones."""
        if state["kept"].keys() != self._kept.keys():
            kept = f"checkpoint keeps {sorted(state['kept'])}, this job keeps {sorted(self._kept)}"
            raise InputError(f"{kept}: use its recipe")
        theirs, ours = (
            [(len(group["params"]), sorted(group)) for group in groups]
            for groups in (state["optimizer"]["param_groups"], self.optimizer.param_groups)
        )
        if theirs != ours:
            raise InputError("checkpoint of another optimizer or other parameter groups: resume with the run's recipe")
        self.optimizer.load_state_dict(state["optimizer"])
        for p, values in self.optimizer.state.items():
            values.update({k: laid_out_like(p, x) for k, x in values.items()})
        self.steps, self._since = state["steps"], tuple(state["since"])
        for name, part in self._kept.items():
            part.load_state_dict(state["kept"][name])
        if state["loader"]:  # after the techniques, which may set its length
            self.plain_loader.load_state_dict(state["loader"])

    # ---- private

    def _count_backward(self, p: Tensor) -> None:
        self._depth = 0
        self._backwards[p] = self._backwards.get(p, 0) + 1
        if self._backwards[p] == self.accumulate:
            self.run_hooks("gradient_ready", p)

    def _begin_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(argument is not None for argument in (*args[1:], kwargs.get("closure"))):  # args[0] is the optimizer
            raise InputError("optimizer.step(closure) is not supported: call backward() in the loop, then step()")
        if self._depth == 0:
            if self.steps == 0 and self.comm.size > 1:
                self._warn_if_alone()
            self._backwards.clear()
            for f in reversed(self._hooks["before_step"]):
                f()
            self._stepping = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        self._depth += 1

    def _warn_if_alone(self) -> None:
        """Warns if nothing averages the gradients of the ranks."""
        averages = any(technique.exchanges_gradients for technique in self.applied)
        if not (averages or isinstance(self.model, DistributedDataParallel)):
            message = f"nothing averages the gradients of the {self.comm.size} ranks, so each trains a model of its own"
            warnings.warn(f"{message}: apply kasoku.distributed.Overlap() or AllReduce()", stacklevel=4)

    def _end_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.steps += 1
            self.run_after_update(self._stepping)
            self.run_hooks("after_step")
