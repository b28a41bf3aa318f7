"""Which gradients are reduced together, and in which order: the policies, and the search for the best plan.

Note: the order matters most. Sent first-ready-first, the groups near the input arrive last, and the next forward,
which needs them first, can hide nothing. So a plan sends (1) as many groups near the output as backward can hide, (2)
the groups near the input in forward order, (3) the rest in forward order, large ones in pieces, since what is under way
cannot be overtaken. The head (1) must fill the link until backward ends, and no longer.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kasoku.core import InputError
from kasoku.distributed.ddp.cost_model import Forecast, Link, Piece, Plan, Sized, Unit, forecast

MIB = 2**20
_WORTH = 0.95  # of one group's step: what a plan must promise
_KEPT, _ROUNDS, _HEADS = 4, 4, 64  # of the search: plans that are improved, how often; heads that are tried


@dataclass(frozen=True)
class Policy:
    """How tensors (in order of definition) become groups; a frozen dataclass with the settings as fields."""

    def plan(self, tensors: Sequence[Sized]) -> Plan:
        """The groups, and the order in which they are sent."""
        raise NotImplementedError(f"{type(self).__name__}.plan")


@dataclass(frozen=True)
class OneGroup(Policy):
    """Everything in one all-reduce, after backward.

    Saves: the latency of all other groups.
    Costs: nothing overlaps with backward, and the next forward waits for all.
    """

    def plan(self, tensors: Sequence[Sized]) -> Plan:
        """One group."""
        return ready_order([tuple(range(len(tensors)))], tensors, "one group")


@dataclass(frozen=True)
class Fixed(Policy):
    """Groups of a fixed size, filled from the output on, with a small first one: what DDP does.

    Args:
        bucket_bytes: a group is closed when it has as many.
        first_bytes: the same of the first group, which backward fills first.

    Saves: latency, as fewer groups; costs: a whole group waits for its last gradient.
    """

    bucket_bytes: int = 25 * MIB
    first_bytes: int = MIB

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 or self.first_bytes < 1:
            raise InputError(
                f"bucket_bytes={self.bucket_bytes}, first_bytes={self.first_bytes}: at least 1 byte; one group for "
                "all is the policy OneGroup"
            )

    def plan(self, tensors: Sequence[Sized]) -> Plan:
        """Groups from the output on."""
        limits = itertools.chain([self.first_bytes], itertools.repeat(self.bucket_bytes))
        return ready_order(_filled(tensors, limits), tensors, f"fixed, {self.bucket_bytes / MIB:g} MiB")


@dataclass(frozen=True)
class Graded(Policy):
    """Few tensors a group near the output, ever more towards the input.

    Args:
        first: tensors in the group at the output.
        power: group k ends before tensor first * (k + 1)^power, counted from the output.
        least_bytes: a smaller group takes in the next one.

    Saves: the first group is under way early, and the many small tensors near the input pay one latency.
    Costs: the groups near the input, which the next forward needs first, are large and arrive last.
    Ref: [000] 4.3 (at least 1 MB) and its MLPerf v0.6 entry: the cubic form gives 3, 21, 57, 80 tensors of ResNet-50.
    """

    first: int = 3
    power: float = 3.0
    least_bytes: int = MIB

    def __post_init__(self) -> None:
        if self.first < 1 or not 0 < self.power < 10 or self.least_bytes < 0:
            raise InputError(
                f"first={self.first}, power={self.power}, least_bytes={self.least_bytes}: at least 1 tensor, a power "
                "above 0 and below 10, and 0 bytes or more"
            )

    def plan(self, tensors: Sequence[Sized]) -> Plan:
        """Groups from the output on."""
        n = len(tensors)
        ends = [min(n, round(self.first * (k + 1) ** self.power)) for k in range(n)]
        cut: list[tuple[int, ...]] = []
        start, size = 0, 0
        for end in sorted(set(ends)):
            size = sum(tensors[n - 1 - i].size for i in range(start, end))
            if size >= self.least_bytes or end == n:
                cut.append(tuple(n - 1 - i for i in range(start, end)))
                start = end
        if len(cut) > 1 and size < self.least_bytes:
            cut[-2:] = [cut[-2] + cut[-1]]
        return ready_order(cut, tensors, "graded")


@dataclass(frozen=True)
class Layer(Policy):
    """One group a layer.

    Args:
        least_bytes: a smaller layer (a norm) joins the one behind it.

    Saves: each layer's transfer starts as early as can be, and its next forward waits for its own group alone.
    Costs: a latency a group.
    Ref: [003].
    """

    least_bytes: int = 2**16

    def __post_init__(self) -> None:
        if self.least_bytes < 0:
            raise InputError(f"least_bytes={self.least_bytes}: 0 bytes or more")

    def plan(self, tensors: Sequence[Sized]) -> Plan:
        """One group a unit, small ones together."""
        return ready_order(_merged(tensors, self.least_bytes), tensors, "a layer")


@dataclass(frozen=True)
class Planned(Policy):
    """The plan with the shortest forecast step, searched for the times of this model on this device and these links.

    Measured are the latency of an empty all-reduce, at `apply`, and the first steps: `warm` that do not count, then
    `measure` times two: one that sends in pieces after backward (times of each unit, bandwidth of the link), and one
    that computes beside transfers (what computing and communicating cost each other). Until then the groups are those
    of Graded. All ranks take the plan that rank 0 finds for the mean of their computing times.

    Args:
        warm: steps before anything is measured.
        measure: steps of each of the two kinds; of a short epoch one in 50 of each, and at least one.

    Saves: the time that communication shows; see Note: the order matters most.
    Costs: some slower steps at the start, with one more copy of the gradients; then seconds of search. On more than two
        ranks the plan decides in which order gradients are summed, so the last bits of the weights may differ between
        two runs; a resumed run keeps its plan.
    """

    warm: int = 2
    measure: int = 6

    def __post_init__(self) -> None:
        if self.warm < 0 or self.measure < 1:
            raise InputError(f"warm={self.warm}, measure={self.measure}: 0 steps or more, and at least 1 step")

    def plan(self, tensors: Sequence[Sized]) -> Plan:
        """What holds until the times are known."""
        return Graded().plan(tensors)


def ready_order(groups: Iterable[Sequence[int]], tensors: Sequence[Sized], policy: str) -> Plan:
    """Whole groups, sent in the order in which backward makes them ready: the nearest to the output first."""
    found: list[tuple[int, ...]] = []
    for group in groups:
        kinds = {tensors[i].kind: None for i in group}
        found += [tuple(i for i in group if tensors[i].kind == kind) for kind in kinds]
    found.sort(key=lambda group: -min(tensors[i].unit for i in group))
    order = [Piece(g, 0, sum(tensors[i].elements for i in group)) for g, group in enumerate(found)]
    return Plan(tuple(found), tuple(order), policy)


def search(
    units: Sequence[Unit],
    tensors: Sequence[Sized],
    link: Link,
    *,
    next_forward: bool = True,
    limit_s: float = 20.0,
    tries: float = math.inf,
) -> tuple[Plan, Forecast, bool]:
    """The best plan, its forecast, and whether the next forward should start before all groups have arrived.

    `next_forward`: False where it cannot, as something needs all gradients at once. `limit_s`: no plan is improved any
    further after so many seconds; for a network of 50 convolutions the search takes two. `tries`: nor after so many
    changes of it, which are the same on every machine.

    Tried: all sizes of the head (64 of them where there are more), for groups of units down to several sizes, in pieces
    of several sizes, the others in forward order, or of those that are ready the first in forward order; the best few
    are then changed as long as that helps. And every other policy, with overlap with backward alone. One group it is
    unless a plan promises a twentieth less: times are measured with noise, and many pieces take time of their own that
    no forecast sees. Against all orders of six random layers, where communicating takes half of computing or more, it
    was never 1 % worse (tests/parallel/test_virtual_clock.py).
    """
    until = time.monotonic() + limit_s
    waiting = [(plan, forecast(units, tensors, plan, link, next_forward=False)) for plan in _simple(tensors)]
    one = waiting[0]
    plan, seen = min(waiting, key=lambda pair: pair[1].step_s)
    if seen.step_s > _WORTH * one[1].step_s:
        plan, seen = one
    if not next_forward:
        return replace(plan, policy=f"planned: {plan.policy}"), seen, False
    found: list[tuple[float, Plan]] = []
    least = max(2 * MIB, sum(t.size for t in tensors) // 64)
    for groups in _mergings(tensors):
        ready_s = _ready(groups, units, tensors)
        for piece_bytes in (least, 2 * least, 4 * least, 2**60):
            pieces = cut(groups, tensors, piece_bytes)
            seconds = {p: link.seconds((p.stop - p.start) * tensors[groups[p.group][0]].width) for p in pieces}
            heads = {*range(0, len(pieces), -(-len(pieces) // _HEADS)), len(pieces)}
            orders = {_headed(pieces, head) for head in heads}
            orders |= {_busy(pieces, head, ready_s, seconds) for head in heads}
            tried = [Plan(groups, order, "planned") for order in sorted(orders)]
            found.append(min(((forecast(units, tensors, p, link).step_s, p) for p in tried), key=lambda pair: pair[0]))
    best = sorted(found, key=lambda pair: pair[0])[:_KEPT]
    late = min((_improved(p, units, tensors, link, (until, tries)) for _, p in best), key=lambda pair: pair[1].step_s)
    if late[1].step_s < min(seen.step_s, _WORTH * one[1].step_s):
        return *late, True
    return replace(plan, policy=f"planned: {plan.policy}"), seen, False


def _ready(groups: Sequence[Sequence[int]], units: Sequence[Unit], tensors: Sequence[Sized]) -> list[float]:
    """When each group is whole, from the start of backward."""
    ends = list(itertools.accumulate(unit.backward_s for unit in reversed(units)))[::-1]
    return [ends[min(tensors[i].unit for i in group)] for group in groups]


def _simple(tensors: Sequence[Sized]) -> list[Plan]:
    policies: list[Policy] = [OneGroup(), Graded(), *(Fixed(size * MIB) for size in (1, 2, 5, 10, 25))]
    return [policy.plan(tensors) for policy in policies]


def _improved(
    plan: Plan, units: Sequence[Unit], tensors: Sequence[Sized], link: Link, limits: tuple[float, float]
) -> tuple[Plan, Forecast]:
    """Moves single pieces a little, and runs of a group's pieces anywhere, as long as the forecast falls.

    `limits`: the time it ends at, and how many moves are tried.
    """
    until, tries = limits
    tried_before = 0
    seen = forecast(units, tensors, plan, link)
    for _ in range(_ROUNDS):
        before = seen.step_s
        for order in _moved(plan.order):
            if tried_before >= tries or time.monotonic() > until:
                return plan, seen
            tried_before += 1
            tried = replace(plan, order=order)
            result = forecast(units, tensors, tried, link)
            if result.step_s < seen.step_s:
                plan, seen = tried, result
        if seen.step_s >= before * 0.999 or seen.step_s <= seen.bound_s * 1.001:
            break
    return plan, seen


def _moved(order: Sequence[Piece]) -> Iterator[tuple[Piece, ...]]:
    runs = [tuple(run) for _, run in itertools.groupby(order, key=lambda piece: piece.group)]
    singles = [(piece,) for piece in order]
    for parts, reach in ((runs, len(runs)), (singles, 3)):
        for i, j in itertools.product(range(len(parts)), repeat=2):
            if i != j and abs(i - j) <= reach:
                other = list(parts)
                other.insert(j, other.pop(i))
                yield tuple(itertools.chain.from_iterable(other))


def _mergings(tensors: Sequence[Sized]) -> list[tuple[tuple[int, ...], ...]]:
    """Groups of neighbouring units, in forward order, for several least sizes."""
    sizes = (min(MIB // 4, sum(t.size for t in tensors) // 256), MIB // 4, MIB, 2 * MIB, 4 * MIB)
    found = {ready_order(_merged(tensors, least), tensors, "").groups[::-1]: None for least in sizes}
    return list(found)


def _merged(tensors: Sequence[Sized], least_bytes: int) -> list[tuple[int, ...]]:
    """Groups of neighbouring units, in forward order, each closed once it has least_bytes."""
    merged: list[tuple[int, ...]] = []
    open_: tuple[int, ...] = ()
    for layer in _by_unit(tensors):
        open_ += layer
        if sum(tensors[i].size for i in open_) >= least_bytes:
            merged.append(open_)
            open_ = ()
    if open_:
        merged[-1:] = [merged[-1] + open_] if merged else [open_]
    return merged


def _by_unit(tensors: Sequence[Sized]) -> list[tuple[int, ...]]:
    """The tensors of each unit, in forward order."""
    ordered = sorted(range(len(tensors)), key=lambda i: tensors[i].unit)
    return [tuple(group) for _, group in itertools.groupby(ordered, key=lambda i: tensors[i].unit)]


def _filled(tensors: Sequence[Sized], limits: Iterable[int]) -> list[tuple[int, ...]]:
    """Groups from the last tensor on, each closed once it has its limit of bytes."""
    found: list[list[int]] = []
    size, limit = 0, 0
    sizes = iter(limits)
    for i in reversed(range(len(tensors))):
        if size >= limit:
            found.append([])
            size, limit = 0, next(sizes)
        found[-1].append(i)
        size += tensors[i].size
    return [tuple(group) for group in found]


def cut(groups: Sequence[Sequence[int]], tensors: Sequence[Sized], piece_bytes: int) -> list[Piece]:
    """Each group, in order, in equal pieces of about piece_bytes."""
    found: list[Piece] = []
    for g, group in enumerate(groups):
        elements, size = sum(tensors[i].elements for i in group), sum(tensors[i].size for i in group)
        parts = max(1, min(elements, round(size / piece_bytes)))
        ends = [elements * (k + 1) // parts for k in range(parts)]
        found += [Piece(g, start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return found


def _headed(pieces: Sequence[Piece], head: int) -> tuple[Piece, ...]:
    """The last `head` pieces (groups are in forward order) from the output on, then the others in forward order."""
    first = pieces[len(pieces) - head :]
    return (*reversed(first), *pieces[: len(pieces) - head])


def _busy(
    pieces: Sequence[Piece], head: int, ready_s: Sequence[float], seconds: Mapping[Piece, float]
) -> tuple[Piece, ...]:
    """The same head; then, whenever the link is free, the first piece in forward order that is ready."""
    order = list(reversed(pieces[len(pieces) - head :]))
    now = 0.0
    for piece in order:
        now = max(now, ready_s[piece.group]) + seconds[piece]
    left = list(pieces[: len(pieces) - head])
    while left:
        now = max(now, min(ready_s[piece.group] for piece in left))
        piece = next(piece for piece in left if ready_s[piece.group] <= now)
        left.remove(piece)
        order.append(piece)
        now += seconds[piece]
    return tuple(order)


def table(
    plan: Plan,
    tensors: Sequence[Sized],
    forecast: Forecast | None = None,
    link: Link | None = None,
    *,
    next_forward: bool = False,
    what: str = "gradients",
) -> str:
    """The plan as lines of text: its groups in the order they are sent, and what is expected of it."""
    lines = [f"{what} in {len(plan.groups)} groups, {len(plan.order)} pieces ({plan.policy}), in this order:"]
    for group, run in itertools.groupby(plan.order, key=lambda piece: piece.group):
        pieces = list(run)
        members = plan.groups[group]
        size = sum(piece.stop - piece.start for piece in pieces) * tensors[members[0]].width
        parts = f" in {len(pieces)} pieces" if len(pieces) > 1 else ""
        first, last = tensors[min(members)].name, tensors[max(members)].name
        lines.append(f"  group {group}: {size / MIB:.2f} MiB{parts} of {len(members)} tensors, {first} to {last}")
    if forecast is not None:
        until = "the next forward needs them" if next_forward else "the step ends"
        step, exposed, bound, computing, sending = (
            f"{1e3 * s:.1f} ms"
            for s in (forecast.step_s, forecast.exposed_s, forecast.bound_s, forecast.compute_s, forecast.link_s)
        )
        lines.append(f"  waited for when {until}; expected: {step} a step, {exposed} of it exposed communication")
        lines.append(f"  no plan can be faster than {bound} (computing {computing}, communicating {sending})")
    if link is not None:
        lines.append(
            f"  measured: {1e3 * link.latency_s:.2f} ms and {link.bytes_per_s / 1e6:.1f} MB/s an all-reduce; in "
            f"company computing keeps {link.compute_share:.0%} of its speed, communicating {link.link_share:.0%}"
        )
    return "\n".join(lines)
