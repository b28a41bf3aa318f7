"""Gradients shared while backward runs, and parameters updated while the next forward runs.

Note: one static order. Collectives must be issued in the same order on every rank, and cannot be overtaken. So the
pieces of all groups are sent in the order of the plan, each when its group is whole and those before it have been
sent, whatever the order in which gradients arrive.

Note: who writes to a gradient under way is told. A gradient is brought home to its group's flat buffer; what `p.grad`
then shows is that memory under a version counter of its own, so that clipping by hand or a second backward is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kasoku.core import Hyper, InputError, Job, Stage, Technique, Work
from kasoku.core.hardware import is_dense
from kasoku.core.torch_internals import version
from kasoku.distributed.ddp.all_reduce import start_equal
from kasoku.distributed.ddp.bucketing import Planned, Policy, table
from kasoku.distributed.ddp.compression import Mean, Reduce, Reducer
from kasoku.distributed.ddp.cost_model import Forecast, Link, Piece, Plan
from kasoku.distributed.ddp.layer_index import Units
from kasoku.distributed.ddp.step_profiler import Probe


@dataclass(frozen=True)
class Overlap(Technique):
    """Averages gradients over all ranks in planned groups, hidden behind backward and behind the next forward.

    A gradient is brought home to its group as it arrives, a group is sent when it is whole and updated when its mean
    has arrived: at the latest when the next forward enters a layer that has one of its parameters. Rank 0's parameters
    and buffers are given to all ranks at `apply`. Read parameters after `job.drain()`; `state_dict()`, evaluation and
    `close()` drain themselves.

    Args:
        buckets: the policy that groups gradients: Planned, OneGroup, Fixed, Graded, Layer.
        next_forward: False: the step waits for all groups, as DDP does.
        reducer: how a piece is averaged: Mean, Wire (bf16 or fp16), LowRank, Hierarchical.
        unused: a parameter without a gradient: "refuse" it, or "skip" it on ranks without (one more collective a step).
        show: print the plan once it is made.

    Saves: the time of communication, as far as computing covers it.
    Costs: a copy of the gradients; the reducer's state, in a checkpoint for every rank. With a technique that needs
        whole gradients (clipping, fp16 loss scaling) the update waits for all of them; a line says so once.
        A forward that reads parameters before it calls their layer (a weight penalty) needs next_forward = False.
    Maths: g = mean over ranks of g; bit for bit the step that waits for the same groups.
    Ref: [000] 4.4; [003]; Jayarajan et al. 2019 (P3, arXiv 1905.03960); Peng et al. 2019 (ByteScheduler).
    """

    stage: ClassVar[Stage] = Stage.COMM
    refuses: ClassVar[tuple[str, ...]] = ("exchanges_gradients", "captures_graph")
    exchanges_gradients: ClassVar[bool] = True
    overlaps_backward: ClassVar[bool] = True
    channels: ClassVar[int] = 1
    buckets: Policy = field(default_factory=Planned)
    next_forward: bool = True
    reducer: Reducer = field(default_factory=Mean)
    unused: Literal["refuse", "skip"] = "refuse"
    show: bool = False

    def __post_init__(self) -> None:
        if self.unused not in ("refuse", "skip"):
            raise InputError(f'unused="{self.unused}": "refuse" or "skip"')

    def apply(self, job: Job) -> None:
        if job.comm.size > 1:
            start_equal(job)
            Engine(job, self).install()
        else:
            job.keep("overlap", _Alone())


class _Alone:
    """One rank shares nothing; what several ranks kept it leaves aside, so that they may go on as one."""

    def state_dict(self) -> dict[str, Any]:
        return {"plan": {}, "reduce": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True, eq=False)
class _Member:
    """A parameter in its group. `home`: its stretch of the flat buffer, in its own shape and strides."""

    p: Tensor
    name: str
    group: Group
    home: Tensor


class Group:
    """A flat buffer of gradients, and what of it is under way."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        like = named[0][1]
        self.flat = torch.zeros(sum(p.numel() for _, p in named), dtype=like.dtype, device=like.device)
        self.members: list[_Member] = []
        start = 0
        for name, p in named:
            if not is_dense(p):
                raise InputError(
                    f"Overlap: {name} has strides {p.stride()} for shape {tuple(p.shape)}: dense ones only"
                )
            home = torch.as_strided(self.flat, p.shape, p.stride(), start).data
            self.members.append(_Member(p, name, self, home))
            start += p.numel()
        self.versions: dict[Tensor, int] = {}  # of the gradients that are home, as they came
        self.works: list[Work] = []
        self.pending = False  # its update is still to come after the step
        self.idle: frozenset[Tensor] = frozenset()  # got a gradient on no rank

    @property
    def whole(self) -> bool:
        """All its gradients are home."""
        return len(self.versions) == len(self.members)

    def missing(self) -> list[_Member]:
        """Those without a gradient so far."""
        return [m for m in self.members if m.p not in self.versions]

    def wait(self) -> None:
        """Returns when the buffer holds the mean."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def show(self, visible: bool) -> None:
        """Gives its parameters their gradients, or takes them away."""
        for m in self.members:
            m.p.grad = m.home if visible and m.p not in self.idle else None


class Engine:
    """Overlap at work on one job.

    Attributes: `plan`, and, when it was searched, its `forecast` and the `link` it was made for.
    """

    def __init__(self, job: Job, settings: Overlap) -> None:
        self.job, self.settings = job, settings
        self.comm = job.comm.channel()  # gradients under way must not hold up what others send
        self.reduce: Reduce = settings.reducer.bind(self.comm)
        self.units = Units(job.model)
        self.late = settings.next_forward
        self.hyper: Hyper = []
        self.sent, self.layout = 0, "first"
        if not self.units.named:
            raise InputError(f"Overlap: {type(job.model).__name__} has no parameter that requires a gradient")
        self.forecast: Forecast | None = None
        self.link: Link | None = None
        self.probe: Probe | None = None
        self.lay_out(settings.buckets.plan(self.units.tensors))
        kind = self.groups[0].flat.device.type
        known = torch.amp.is_autocast_available(kind)
        self.full_precision = torch.autocast(kind, enabled=False) if known else nullcontext()

    def install(self) -> None:
        """Puts itself into the job's moments."""
        job = self.job
        job.gradient_ready(self.arrive)
        job.before_step(self.step)
        job.after_step(self.stepped)
        job.on_drain(self.drain)
        job.keep("overlap", self)
        job.document("buckets.json", lambda: {"text": table(self.plan, self.units.tensors)})
        self.units.before(job, self.enter)
        saving: Any = job.model.register_state_dict_pre_hook
        job.undo(saving(lambda *_: self.drain()).remove)
        job.undo(self.reduce.settle)
        if job.needs_all and self.late:
            self.late = False
            self.say("Overlap: a technique needs all gradients before any update, so the update waits for all of them")
        if isinstance(self.settings.buckets, Planned):
            self.probe = Probe(self, self.settings.buckets)
        elif self.settings.show:
            self.say(table(self.plan, self.units.tensors))

    def say(self, line: str) -> None:
        """Prints on one rank."""
        if self.comm.rank == 0:
            print(f"kasoku: {line}", flush=True)

    def lay_out(self, plan: Plan) -> None:
        """Makes the buffers of a plan; between two steps only."""
        self.plan = plan
        self.groups = [Group([self.units.named[i] for i in group]) for group in plan.groups]
        self.member = {m.p: m for group in self.groups for m in group.members}
        last = {piece.group: i for i, piece in enumerate(plan.order)}
        self.in_order = [self.groups[g] for g in sorted(last, key=lambda g: last[g])]
        of_unit: list[set[int]] = [set() for _ in self.units.modules]
        for g, group in enumerate(self.groups):
            for unit in (unit for m in group.members for unit in self.units.users[m.p]):
                of_unit[unit].add(g)
        self.needs = [[self.groups[g] for g in sorted(mine, key=lambda g: last[g])] for mine in of_unit]

    # ---- in backward

    def arrive(self, p: Tensor) -> None:
        """Brings a whole gradient home, and sends what can be sent."""
        member = self.member.get(p)
        if member is None:
            return  # told in step()
        if member.group.pending:
            raise InputError(
                f"Overlap: {member.name} got a gradient before its last update, since the forward of its layer "
                f"({self.units.name_of(p)}) was bypassed: call that module itself, or set next_forward = false"
            )
        if p.grad is not member.home:
            if p.grad is None or p.grad.layout != torch.strided:
                raise InputError(f"Overlap: {member.name} has a sparse gradient: dense ones only")
            member.home.copy_(p.grad)
            p.grad = member.home
        member.group.versions[p] = version(member.home)
        if self.probe is not None:
            self.probe.arrived(p)
        if member.group.whole:
            self.send()

    def send(self) -> None:
        """Sends the pieces whose turn has come, in the plan's order."""
        if self.probe is not None and self.probe.holding:
            return
        self.job.trace.poll_transfers()
        while self.sent < len(self.plan.order) and self.groups[self.plan.order[self.sent].group].whole:
            self.send_piece(self.plan.order[self.sent])
            self.sent += 1

    def send_piece(self, piece: Piece) -> None:
        """Sends one piece; what a reducer keeps belongs to a piece of this layout."""
        group = self.groups[piece.group]
        key = f"{self.layout} {piece.group}:{piece.start}"
        x = group.flat[piece.start : piece.stop]
        group.works.append(self.job.trace.transfer(f"group {piece.group}", x, self.reduce(key, x)))

    # ---- at the step

    def step(self) -> None:
        """Every piece is under way; the updates come as they arrive, or after this where that is not possible."""
        self.refuse_strangers()
        self.bring_home()
        if not any(group.versions for group in self.groups) and self.settings.unused == "refuse":
            self.drain()
            return  # no backward since the last step: nothing moves
        self.refuse_changed()
        self.fill_missing()
        late = self.late and (self.probe is None or self.probe.late)
        if self.probe is not None:
            self.probe.at_step()
        if late:
            hyper = self.job.hyper()  # as they are now: a scheduler may change them in place
            self.hyper = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in g.items()} for g in hyper]
        for group in self.in_order:
            if not late:
                self.wait(group)
            group.pending = late
            group.show(not late)
            group.versions.clear()
        self.sent = 0
        if self.probe is not None:
            self.probe.waited()

    def refuse_strangers(self) -> None:
        """Raises InputError for a gradient that ranks do not share: they would drift apart without a word."""
        for group in self.job.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and p not in self.member:
                    raise InputError(
                        f"Overlap: a parameter of shape {tuple(p.shape)} has a gradient, but required none when "
                        "Overlap was applied, or was added later: unfreeze and add parameters before apply"
                    )

    def bring_home(self) -> None:
        """Gradients of blocks that only some of the accumulated passes used arrive here."""
        for m in [m for group in self.groups for m in group.missing() if m.p.grad is not None]:
            self.drain()
            self.arrive(m.p)

    def refuse_changed(self) -> None:
        """Raises InputError where a gradient was written to after it came home."""
        for member in self.member.values():
            copied = member.group.versions.get(member.p)
            if copied is not None and (member.p.grad is not member.home or version(member.home) != copied):
                raise InputError(
                    f"Overlap: the gradient of {member.name} was changed between backward and step, when it was under "
                    "way already: clip with the technique Clip, and say accumulate=k to Job for k backwards a step"
                )

    def fill_missing(self) -> None:
        """Parameters without a gradient: refused, or zeros where another rank has one."""
        missing = [m for group in self.groups for m in group.missing()]
        if self.settings.unused == "refuse":
            if missing:
                names = ", ".join([*(m.name for m in missing[:3]), *(["..."] if len(missing) > 3 else [])])
                raise InputError(
                    f"Overlap: {len(missing)} parameters got no gradient in backward ({names}): freeze them before "
                    'apply, or set unused = "skip"'
                )
            return
        self.drain()
        members = list(self.member.values())
        used = torch.tensor([float(m.p in m.group.versions) for m in members], device=self.groups[0].flat.device)
        self.job.comm.all_reduce(used, op="max").wait()
        idle = frozenset(m.p for m, u in zip(members, used.tolist(), strict=True) if not u)
        for m in missing:
            m.home.zero_()
            m.group.versions[m.p] = version(m.home)
        for group in self.groups:
            group.idle = idle
        self.send()

    def stepped(self) -> None:
        """The end of `optimizer.step()`."""
        if self.probe is not None:
            self.probe.stepped()

    # ---- after the step

    def enter(self, unit: int) -> None:
        """Before a unit's forward: its groups are updated."""
        for group in self.needs[unit]:
            self.update(group)
        if self.probe is not None:
            self.probe.entered(unit)

    def drain(self) -> None:
        """Updates all groups that are still to be."""
        for group in self.in_order:
            self.update(group)

    def update(self, group: Group) -> None:
        """Updates a group, once, when its mean has arrived."""
        if not group.pending:
            return
        self.wait(group)
        group.pending = False
        group.show(True)
        with torch.inference_mode(False), self.full_precision, self.job.trace.span("update"):
            self.job.update([m.p for m in group.members if m.p not in group.idle], self.hyper)
        group.show(False)

    def wait(self, group: Group) -> None:
        """Waits for a group; on a GPU its stream does."""
        with self.job.trace.span("wait", bytes=group.flat.nbytes):
            group.wait()
        self.job.trace.poll_transfers()

    def adopt(self, plan: Plan, forecast: Forecast, link: Link, *, late: bool) -> None:
        """Takes the plan that was searched; between two steps."""
        self.forecast, self.link = forecast, link
        self.take(plan, late=late)
        if self.settings.show:
            self.say(table(plan, self.units.tensors, forecast, link, next_forward=self.late))

    def take(self, plan: Plan, *, late: bool) -> None:
        """Goes by a searched plan from here on, and measures no longer."""
        self.end_probe()
        self.late = self.late and late
        self.layout = "planned"
        self.lay_out(plan)

    def end_probe(self) -> None:
        """Measures no longer."""
        if self.probe is not None:
            self.probe.close()
            self.probe = None
        self.reduce.load_state_dict({})  # errors of the pieces so far are not those of the planned ones

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The plan that was searched, and what the reducer keeps."""
        made = {} if self.probe is not None else {
            "groups": [list(group) for group in self.plan.groups],
            "order": [[p.group, p.start, p.stop] for p in self.plan.order],
            "policy": self.plan.policy,
            "late": self.late,
        }  # fmt: skip
        own = self.reduce.state_dict()  # errors not sent yet are each rank's own, and only one writes the checkpoint
        return {"plan": made, "reduce": self.job.comm.gather_objects(own) if own else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with that plan. Raises InputError for a plan of another model."""
        made = state["plan"]
        if made and isinstance(self.settings.buckets, Planned):
            groups = tuple(tuple(group) for group in made["groups"])
            if sorted(i for group in groups for i in group) != list(range(len(self.units.tensors))):
                raise InputError("checkpoint of Overlap: a plan for another model; resume with the run's recipe")
            order = tuple(Piece(*piece) for piece in made["order"])
            self.take(Plan(groups, order, made["policy"]), late=made["late"])
        kept = state["reduce"]
        self.reduce.load_state_dict(kept[self.comm.rank] if len(kept) == self.comm.size else {})
