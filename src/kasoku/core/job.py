"""The plain objects of one training, the moments at which techniques act, and the few verbs they need.

Note: who takes a gradient does its update. A technique that updates a part of the model outside `optimizer.step()`
saves `job.hyper()` in `before_step` (a scheduler may move the rates before the late update), sets `p.grad = None` for
what it took, so that the user's own `step()` skips it, and calls `job.update(part, hyper)` when the part may be
written. Whoever reads parameters from outside calls `job.drain()` first.

Note: what happens inside a step. The step hooks of torch fire twice when an optimizer's `step` calls `super().step()`;
the depth is counted, so that ours run once. `before_step` runs the hooks of the technique applied last first: what
communicates (applied last) has finished before what reads whole gradients (clipping) starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kasoku.core.clock import Clock
from kasoku.core.comm import Comm, Solo
from kasoku.core.errors import InputError
from kasoku.core.hardware import laid_out_like
from kasoku.core.technique import Technique
from kasoku.core.trace import Trace

_TORCH_OWN = ("_need_device_dtype_check_for_fused",)  # what torch's own step() sets on itself, no state of the rule
Hyper = list[dict[str, Any]]
Batch = tuple[Tensor, Tensor]


class Stateful(Protocol):
    """What a checkpoint can hold: plain values and tensors out and in."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Takes back what `state_dict` gave."""
        ...


class Batches:
    """The job's loader as the loop sees it: the plain one inside what techniques put around it."""

    def __init__(self, plain: Iterable[Batch], inner: Iterable[Batch], around: Callable[..., Iterable[Batch]]) -> None:
        self.plain, self._inner, self._around = plain, inner, around

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._around(self._inner))

    def __len__(self) -> int:
        return len(self.plain)  # type: ignore[arg-type]


class Job:
    """Model, optimizer, loader and loss of one training, on one rank.

    Args:
        model: a plain module.
        optimizer: a torch optimizer, or a function model -> optimizer (called after MODEL techniques were applied).
        loader: yields (x, y) on the device; one pass is one epoch.
        loss: (outputs, y) -> scalar.
        comm: the collectives between ranks; alone by default.
        accumulate: how many backward passes come before each `optimizer.step()`; it cannot be guessed.
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
        self.model = model
        self.loss = loss
        self.loader = loader
        self.comm: Comm = comm or Solo()
        self.accumulate = accumulate
        self.trace = Trace(self.comm.clock, rank=self.comm.rank)
        self.steps = 0
        self._since = (0, 0.0)  # steps and epochs when the loader last took its present length
        self.needs_all = False  # set by techniques that need every gradient before any update
        self.applied: list[Technique] = []
        self.documents: dict[str, Callable[[], object]] = {}
        self._make_optimizer = optimizer
        self._optimizer: Optimizer | None = None
        self._depth = 0
        self._moving: list[Tensor] = []
        self._arrived: dict[Tensor, int] = {}
        self._kept: dict[str, Stateful] = {}
        self._undo = ExitStack()
        self._on_gradient: list[Callable[[Tensor], None]] = []
        self._on_step: list[Callable[[], None]] = []
        self._on_update: list[Callable[[Sequence[Tensor]], None]] = []
        self._on_stepped: list[Callable[[], None]] = []
        self._on_drain: list[Callable[[], None]] = []
        self._on_evaluate: list[tuple[str, Callable[[], AbstractContextManager[object]]]] = []
        self.patched: list[tuple[object, str, object]] = []  # what techniques set, and what was there; ...: nothing
        self.first_hook = RemovableHandle.next_id  # of torch: those from here on are of techniques, not of the user
        if hasattr(loader, "trace"):
            self.patch(loader, "trace", self.trace)

    # ---- plain objects

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer; made on first use where a function was given."""
        if self._optimizer is None:
            made = self._make_optimizer
            self._optimizer = made if isinstance(made, Optimizer) else made(self.model)
            self._undo.callback(self._optimizer.register_step_pre_hook(self._before).remove)
            self._undo.callback(self._optimizer.register_step_post_hook(self._after).remove)
        return self._optimizer

    @property
    def plain_loader(self) -> Any:
        """The loader as it was handed in, without what techniques put around it."""
        return getattr(self.loader, "plain", self.loader)

    @property
    def clock(self) -> Clock:
        """What tells the time of this job."""
        return self.comm.clock

    @property
    def progress(self) -> float:
        """Epochs trained so far, by updates made: what every Schedule takes."""
        steps, epochs = self._since
        return epochs + (self.steps - steps) * self.accumulate / max(1, len(self.loader))  # type: ignore[arg-type]

    def state_of(self, p: Tensor) -> dict[str, Any]:
        """The optimizer's state of a parameter, to be changed in place; empty while there is no optimizer or state."""
        made = self._optimizer or self._make_optimizer
        return made.state.get(p, {}) if isinstance(made, Optimizer) else {}

    # ---- moments

    def gradient_ready(self, f: Callable[[Tensor], None]) -> None:
        """Calls f(p) when the gradient of parameter p is whole: after the last accumulated backward reached it."""
        if not self._on_gradient:
            for p in self.model.parameters():
                if p.requires_grad:
                    hook: Callable[..., Any] = p.register_post_accumulate_grad_hook
                    self._undo.callback(hook(self._gradient).remove)
        self._on_gradient.append(f)

    def before_step(self, f: Callable[[], None]) -> None:
        """Calls f() when the loop calls `optimizer.step()`, before any parameter moves."""
        _ = self.optimizer
        self._on_step.append(f)

    def after_update(self, f: Callable[[Sequence[Tensor]], None]) -> None:
        """Calls f(params) after an update, with the parameters just written: all of them, or a part."""
        _ = self.optimizer
        self._on_update.append(f)

    def after_step(self, f: Callable[[], None]) -> None:
        """Calls f() when `optimizer.step()` has ended and is counted, whether or not a parameter moved in it."""
        _ = self.optimizer
        self._on_stepped.append(f)

    def around_loader(self, f: Callable[[Iterable[Batch]], Iterable[Batch]]) -> None:
        """Puts f around the loader: each epoch iterates f(loader)."""
        self.patch(self, "loader", Batches(self.plain_loader, self.loader, f))

    def configure_loader(self, **settings: Any) -> None:
        """Changes settings of the loader's pipeline, until `close()`."""
        self.undo(self.plain_loader.configure(**settings))

    def around_evaluation(self, f: Callable[[], AbstractContextManager[object]], *, name: str = "") -> None:
        """Evaluates inside f(): averaged weights step in, statistics are renewed, and all is put back."""
        self._on_evaluate.append((name, f))

    def on_drain(self, f: Callable[[], None]) -> None:
        """Calls f() when somebody is about to read parameters: pending updates are finished there."""
        self._on_drain.append(f)

    # ---- verbs

    def apply(self, *techniques: Technique) -> Job:
        """Applies techniques, sorted by stage. Raises InputError for two that cannot be combined."""
        ordered = sorted(techniques, key=lambda t: t.stage)
        for i, technique in enumerate(ordered):
            for other in [*self.applied, *ordered[:i]]:
                if conflict := technique.conflict(other):
                    raise InputError(conflict)
            if self.applied and technique.stage < self.applied[-1].stage:
                name, late = type(technique).__name__, type(self.applied[-1]).__name__
                raise InputError(f"technique {name} comes before {late}: give both to one call of apply")
        for technique in ordered:
            technique.apply(self)
            self.applied.append(technique)
        return self

    def update(self, params: Iterable[Tensor], hyper: Hyper | None = None) -> None:
        """The optimizer's own step on a subset of its parameters, then the `after_update` hooks.

        Args:
            params: parameters with their gradients in `p.grad`.
            hyper: what `hyper()` gave earlier; None: the rates as they are now.

        Raises:
            InputError: for a rule that keeps state outside `state[p]`, which a part would move for all.
        """
        wanted = set(params)
        own = self.optimizer
        twin = object.__new__(type(own))
        twin.__dict__.update({k: v for k, v in own.__dict__.items() if k != "step"})
        twin._optimizer_step_pre_hooks = OrderedDict()
        twin._optimizer_step_post_hooks = OrderedDict()
        twin.param_groups = [
            {**(group if hyper is None else hyper[i]), "params": [p for p in group["params"] if p in wanted]}
            for i, group in enumerate(own.param_groups)
        ]
        before = {k: v for k, v in twin.__dict__.items() if k not in ("state", "param_groups")}
        type(own).step(twin)
        moved = [k for k, v in twin.__dict__.items() if k in before and before[k] is not v and k not in _TORCH_OWN]
        groups = zip(twin.param_groups, own.param_groups if hyper is None else hyper, strict=True)
        moved += [f"param_groups[{k!r}]" for g, h in groups for k in g if k != "params" and g[k] is not h[k]]
        if moved or not all(isinstance(key, Tensor) for key in own.state):
            what = f"self.{moved[0]}" if moved else "state of its own"
            raise InputError(
                f"optimizer {type(own).__name__} keeps {what} outside state[p], so a part of the model cannot be "
                "updated alone: use a rule that keeps its state per parameter, or leave the technique out"
            )
        self.updated([p for group in own.param_groups for p in group["params"] if p in wanted])

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one batch: `optimizer.step()` then sees the mean over `accumulate` of them."""
        (loss / self.accumulate if self.accumulate > 1 else loss).backward()  # type: ignore[no-untyped-call]

    def updated(self, params: Sequence[Tensor]) -> None:
        """Runs the `after_update` hooks; a technique that updates parameters without `update` calls it."""
        if params:
            for f in self._on_update:
                f(params)

    def hyper(self) -> Hyper:
        """The settings of each parameter group as they are now: rate, momentum, weight decay."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    @contextmanager
    def other_length(self) -> Iterator[None]:
        """The loader's length or `accumulate` changes in the body; the progress made so far stays what it was."""
        since = (self.steps, self.progress)
        yield
        self._since = since

    def at(self, epochs: float) -> None:
        """Says how far the training is, where other ranks go on at their own pace."""
        self._since = (self.steps, epochs)

    def drain(self) -> None:
        """Finishes every pending update; call it before anyone reads parameters."""
        for f in self._on_drain:
            f()

    @contextmanager
    def evaluation(self, *, without: str = "") -> Iterator[nn.Module]:
        """The model as it is to be judged: drained, in eval mode, averaged where a technique does that.

        What was put around evaluation under the name `without` is left out, to see what it is worth.
        """
        self.drain()
        modes = [(m, m.training) for m in self.model.modules()]

        def put_back() -> None:
            for module, training in modes:
                module.training = training

        with ExitStack() as stack, torch.no_grad():
            stack.callback(put_back)
            for name, f in self._on_evaluate:
                if not name or name != without:
                    stack.enter_context(f())
            self.model.eval()
            yield self.model

    def keep(self, name: str, stateful: Stateful) -> None:
        """Puts a part's state into every checkpoint under `name`."""
        if name in self._kept:
            raise ValueError(f"keep({name!r}): the name is taken; give the part another one")
        self._kept[name] = stateful
        self.undo(lambda: self._kept.pop(name))

    def document(self, name: str, build: Callable[[], object]) -> None:
        """Adds a JSON file to the run folder; it is built when the training ends."""
        self.documents[name] = build
        self.undo(lambda: self.documents.pop(name))

    def kept(self, name: str) -> Any:
        """The part that was put there by `keep`."""
        return self._kept[name]

    def patch(self, thing: object, name: str, value: object) -> None:
        """Sets an attribute until `close()`."""
        own = vars(thing) if hasattr(thing, "__dict__") else {}
        self.patched.append((thing, name, own.get(name, ...)))
        if name in own:
            old = own[name]
            self.undo(lambda: setattr(thing, name, old))
        else:
            self.undo(lambda: delattr(thing, name))
        setattr(thing, name, value)

    def undo(self, f: Callable[[], object]) -> None:
        """Calls f() at `close()`, last first."""
        self._undo.callback(f)

    def close(self) -> None:
        """Drains, takes every technique off, and gives the plain objects back as they were handed in."""
        if self._optimizer is not None:
            self.drain()
        self._undo.close()
        for hooks in (self._on_gradient, self._on_step, self._on_update, self._on_stepped, self._on_drain):
            hooks.clear()
        self._on_evaluate.clear()
        self.patched.clear()
        self.applied.clear()
        self.needs_all = False

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that resuming needs but the model's weights: optimizer, step count and what techniques keep."""
        self.drain()
        loader = self.plain_loader
        return {
            "steps": self.steps,
            "since": list(self._since),
            "optimizer": self.optimizer.state_dict(),
            "loader": loader.state_dict() if hasattr(loader, "state_dict") else {},
            "kept": {name: part.state_dict() for name, part in self._kept.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; techniques must be applied first. Raises InputError if they differ."""
        if set(state["kept"]) != set(self._kept):
            raise InputError(
                f"checkpoint keeps {sorted(state['kept'])}, this job keeps {sorted(self._kept)}: use its recipe"
            )
        theirs, ours = (
            [(len(group["params"]), sorted(group)) for group in groups]
            for groups in (state["optimizer"]["param_groups"], self.optimizer.param_groups)
        )
        if theirs != ours:
            raise InputError("checkpoint of another optimizer or other parameter groups: resume with the run's recipe")
        self.optimizer.load_state_dict(state["optimizer"])
        for p, values in self.optimizer.state.items():
            values.update({k: laid_out_like(p, x) for k, x in values.items()})
        self.steps = state["steps"]
        self._since = (int(state["since"][0]), float(state["since"][1]))
        for name, part in self._kept.items():
            part.load_state_dict(state["kept"][name])
        if state["loader"]:  # after the parts, which may set its length
            self.plain_loader.load_state_dict(state["loader"])

    # ---- inside

    def _gradient(self, p: Tensor) -> None:
        self._arrived[p] = self._arrived.get(p, 0) + 1
        if self._arrived[p] == self.accumulate:
            for f in self._on_gradient:
                f(p)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(given is not None for given in (*args[1:], kwargs.get("closure"))):  # args[0] is the optimizer
            raise InputError("optimizer.step(closure) is not supported: call backward() in the loop, then step()")
        self._depth += 1
        if self._depth == 1:
            self._arrived.clear()
            try:
                for f in reversed(self._on_step):
                    f()
            except BaseException:
                self._depth = 0
                raise
            self._moving = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.steps += 1
            self.updated(self._moving)
            for f in self._on_stepped:
                f()
