"""Which gradients are reduced together, and in which order: the policies, and the search for the best plan.

Note: the order matters most. If buckets are sent as they become ready, those near the input arrive last; the next
forward needs them first, so it hides nothing. A plan sends (1) as many buckets near the output as backward hides, (2)
the buckets near the input in forward order, (3) the rest in forward order, large ones in chunks, since a collective
cannot be overtaken. The head (1) must fill the link until backward ends, and no longer.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from kasoku.core import Checked, Range
from kasoku.distributed.ddp.cost_model import BucketPlan, Chunk, Forecast, LinkModel, Sized, UnitTimes, forecast

MIB = 2**20
_WORTH = 0.95  # of the step with OneBucket or Graded: a plan must promise less
_HEADS = 64  # sizes of a head that are tried


@dataclass(frozen=True)
class Policy(Checked):
    """How tensors (in order of definition) become buckets; a frozen dataclass with the settings as fields."""

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        """The buckets, and the order in which they are sent."""
        raise NotImplementedError(f"{type(self).__name__}.plan")


@dataclass(frozen=True)
class OneBucket(Policy):
    """Everything in one all-reduce, after backward.

    Saves: the latency of all other buckets.
    Costs: nothing overlaps with backward, and the next forward waits for all.
    """

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        return ready_order([tuple(range(len(tensors)))], tensors, "one bucket")


@dataclass(frozen=True)
class Fixed(Policy):
    """Groups of a fixed size, filled from the output on, with a small first one: what DDP does.

    Args:
        bucket_bytes: a bucket is closed when it has as many, at least 1.
        first_bytes: the same of the first bucket, which backward fills first, at least 1.

    Saves: latency, as fewer buckets; costs: a whole bucket waits for its last gradient.
    """

    bucket_bytes: Annotated[int, Range("one bucket for all is the policy OneBucket", at_least=1)] = 25 * MIB
    first_bytes: Annotated[int, Range(at_least=1)] = MIB

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        buckets: list[list[int]] = []
        size, limit = 0, 0
        for i in reversed(range(len(tensors))):
            if size >= limit:
                size, limit = 0, self.bucket_bytes if buckets else self.first_bytes
                buckets.append([])
            buckets[-1].append(i)
            size += tensors[i].size
        return ready_order(buckets, tensors, f"fixed, {self.bucket_bytes / MIB:g} MiB")


@dataclass(frozen=True)
class Graded(Policy):
    """Few tensors a bucket near the output, ever more towards the input.

    Args:
        first: tensors in the bucket at the output, at least 1.
        power: bucket k ends before tensor first * (k + 1)^power, counted from the output; above 0 and below 10.
        least_bytes: a smaller bucket takes in the next one; 0 or more.

    Saves: the first bucket is under way early, and the many small tensors near the input pay one latency.
    Costs: the buckets near the input, which the next forward needs first, are large and arrive last.
    Ref: [000] 4.4 (at least 1 MB) and its MLPerf v0.6 entry: the cubic form gives 3, 21, 57, 80 tensors of ResNet-50.
    """

    first: Annotated[int, Range(at_least=1)] = 3
    power: Annotated[float, Range(above=0, below=10)] = 3.0
    least_bytes: Annotated[int, Range(at_least=0)] = MIB

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        n = len(tensors)
        ends = {min(n, round(self.first * (k + 1) ** self.power)) for k in range(n)}
        from_output = range(n)[::-1]
        runs = [from_output[start:end] for start, end in itertools.pairwise(sorted({0, *ends, n}))]
        return ready_order(_merged(runs, tensors, self.least_bytes), tensors, "graded")


@dataclass(frozen=True)
class PerLayer(Policy):
    """One bucket a layer.

    Args:
        least_bytes: a smaller layer (a norm) joins the one behind it; 0 or more.

    Saves: each layer's transfer starts as early as can be, and its next forward waits for its own bucket alone.
    Costs: a latency a bucket.
    Ref: [003].
    """

    least_bytes: Annotated[int, Range(at_least=0)] = 2**16

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        return ready_order(_merged(_by_unit(tensors), tensors, self.least_bytes), tensors, "a layer")


@dataclass(frozen=True)
class PerTensor(Policy):
    """One bucket for each tensor of at least 1 MiB, and for each run of smaller ones: the smallest buffers."""

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        large = [(i,) for i, t in enumerate(tensors) if t.size >= MIB]
        small = [(i,) for i, t in enumerate(tensors) if t.size < MIB]
        return ready_order([*large, *_merged(small, tensors, MIB)], tensors, "a tensor")


@dataclass(frozen=True)
class Planned(Policy):
    """The plan with the shortest forecast step, searched for the times of this model on this device and these links.

    Measured are the latency of an empty all-reduce, at `apply`, and the first steps: `warm` that do not count, then
    `measure` times two: one that sends in chunks after backward (times of each unit, bandwidth of the link), and one
    that computes beside transfers (what computing and communicating cost each other). Until then the buckets are those
    of Graded. All ranks take the plan that rank 0 finds for the mean of their computing times.

    Args:
        warm: steps after the first one that are not measured yet, 0 or more.
        measure: steps of each of the two kinds, at least 1; of a short epoch one in 50 of each, and at least one.
        shards: share updates, as Overlap(shard=true) does, where that is forecast to make the step shorter.

    Saves: the time that communication shows; see Note: the order matters most.
    Costs: some slower steps at the start, with one more copy of the gradients; then seconds of search. On more than two
        ranks the plan decides in which order gradients are summed, so the last bits of the weights may differ between
        two runs; a resumed run keeps its plan.
    """

    warm: Annotated[int, Range(at_least=0)] = 2
    measure: Annotated[int, Range(at_least=1)] = 6
    shards: bool = False

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        """The plan until the times are known."""
        return Graded().plan(tensors)


def ready_order(buckets: Iterable[Sequence[int]], tensors: Sequence[Sized], policy: str) -> BucketPlan:
    """Whole buckets, sent in the order in which backward makes them ready: the nearest to the output first."""
    result: list[tuple[int, ...]] = []
    for bucket in buckets:
        kinds = {tensors[i].kind: None for i in bucket}
        result += [tuple(i for i in bucket if tensors[i].kind == kind) for kind in kinds]
    result.sort(key=lambda bucket: -min(tensors[i].unit for i in bucket))
    order = [Chunk(g, 0, sum(tensors[i].elements for i in bucket)) for g, bucket in enumerate(result)]
    return BucketPlan(tuple(result), tuple(order), policy)


def search(
    units: Sequence[UnitTimes], tensors: Sequence[Sized], link: LinkModel, *, next_forward: bool = True
) -> tuple[BucketPlan, Forecast, bool]:
    """The best plan, its forecast, and whether the next forward should start before all buckets have arrived.

    Tried: buckets of several least sizes, in chunks of several sizes, in the order of need; and OneBucket, Graded and
    Fixed of five sizes, overlapped with backward only. The better of OneBucket and Graded wins unless a plan promises
    5 % less: measured times are noisy, and many chunks cost time that no forecast sees. Compared with all orders of six
    random layers, where communication takes at least half as long as compute, the result was never 1 % worse
    (tests/distributed/test_virtual_clock.py).

    `units`: in forward order; `next_forward`: False where a technique needs all gradients at once.
    """
    policies: list[Policy] = [OneBucket(), Graded(), *(Fixed(size * MIB) for size in (1, 2, 5, 10, 25))]
    plans = [policy.plan(tensors) for policy in policies]
    waiting = [(plan, forecast(units, tensors, plan, link, next_forward=False)) for plan in plans]
    few, best = (min(pairs, key=lambda pair: pair[1].step_s) for pairs in (waiting[:2], waiting))
    enough_s = _WORTH * few[1].step_s
    plan, seen = best if best[1].step_s <= enough_s else few
    if next_forward:
        tried = ((plan, forecast(units, tensors, plan, link)) for plan in _in_order_of_need(units, tensors, link))
        late_plan, late = min(tried, key=lambda pair: pair[1].step_s)
        if late.step_s <= min(seen.step_s, enough_s):
            return late_plan, late, True
    return replace(plan, policy=f"planned: {plan.policy}"), seen, False


def _in_order_of_need(units: Sequence[UnitTimes], tensors: Sequence[Sized], link: LinkModel) -> Iterator[BucketPlan]:
    """Plans in which a free link sends, of the buckets that are ready, the one that the next forward needs first.

    A chunk that is sent may hold up one that is needed earlier. So also tried: the first chunks of this order, then the
    rest in forward order. Ref: Horn 1974 (optimal, if sending could be interrupted).
    """
    whole = sum(t.size for t in tensors)
    sizes = (min(MIB // 4, whole // 256), MIB // 4, MIB, 2 * MIB, 4 * MIB)
    ends = list(itertools.accumulate(unit.backward_s for unit in reversed(units)))[::-1]
    least = max(4 * MIB, whole // 16)  # a chunk; smaller ones cost the processor more: gloo's 1 MiB twice its 8 MiB
    merged = (_merged(_by_unit(tensors), tensors, size) for size in sizes)
    for buckets in dict.fromkeys(ready_order(groups, tensors, "").buckets[::-1] for groups in merged):
        ready_s = [ends[min(tensors[i].unit for i in bucket)] / link.compute_share for bucket in buckets]
        for chunk_bytes in (least, 2 * least, 4 * least, 2**60):
            left, order, now = cut(buckets, tensors, chunk_bytes), list[Chunk](), 0.0
            while left:
                now = max(now, min(ready_s[chunk.bucket] for chunk in left))
                chunk = next(chunk for chunk in left if ready_s[chunk.bucket] <= now)
                left.remove(chunk)
                order.append(chunk)
                size = (chunk.stop - chunk.start) * tensors[buckets[chunk.bucket][0]].width
                now += link.seconds(size) / link.link_share
            for head in {*range(0, len(order), -(-len(order) // _HEADS)), len(order)}:  # the rest in forward order
                yield BucketPlan(buckets, (*order[:head], *sorted(order[head:])), "planned")


def _by_unit(tensors: Sequence[Sized]) -> list[list[int]]:
    """The tensors of each unit, in forward order."""
    ordered = sorted(range(len(tensors)), key=lambda i: tensors[i].unit)
    return [list(run) for _, run in itertools.groupby(ordered, key=lambda i: tensors[i].unit)]


def _merged(runs: Iterable[Sequence[int]], tensors: Sequence[Sized], least_bytes: int) -> list[tuple[int, ...]]:
    """Neighbouring runs of tensors together, until they have least_bytes; what is left in the end joins the last."""
    merged: list[tuple[int, ...]] = []
    open_: tuple[int, ...] = ()
    for run in runs:
        open_ += tuple(run)
        if sum(tensors[i].size for i in open_) >= least_bytes:
            merged.append(open_)
            open_ = ()
    if open_:
        merged[-1:] = [merged[-1] + open_] if merged else [open_]
    return merged


def cut(buckets: Sequence[Sequence[int]], tensors: Sequence[Sized], chunk_bytes: int) -> list[Chunk]:
    """Each bucket, in order, in equal chunks of about chunk_bytes."""
    result: list[Chunk] = []
    for g, bucket in enumerate(buckets):
        elements, size = sum(tensors[i].elements for i in bucket), sum(tensors[i].size for i in bucket)
        parts = max(1, min(elements, round(size / chunk_bytes)))
        ends = [elements * (k + 1) // parts for k in range(parts)]
        result += [Chunk(g, start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return result


def table(plan: BucketPlan, tensors: Sequence[Sized], *, what: str = "gradients") -> str:
    """The plan as lines of text: its buckets in the order they are sent."""
    lines = [f"{what} in this order (buckets: {len(plan.buckets)}, chunks: {len(plan.order)}; {plan.policy}):"]
    for bucket, run in itertools.groupby(plan.order, key=lambda chunk: chunk.bucket):
        chunks, members = list(run), plan.buckets[bucket]
        size = sum(chunk.stop - chunk.start for chunk in chunks) * tensors[members[0]].width
        parts = f" in {len(chunks)} chunks" if len(chunks) > 1 else ""
        first, last = tensors[min(members)].name, tensors[max(members)].name
        lines.append(f"  bucket {bucket}: {size / MIB:.2f} MiB{parts}, tensors: {len(members)} ({first} to {last})")
    return "\n".join(lines)


def ddp_caps(plan: BucketPlan, tensors: Sequence[Sized]) -> list[float]:
    """The `bucket_cap_mb_list` (MiB) with which DDP makes these buckets: it closes one that has reached its limit."""
    return [round(sum(tensors[i].size for i in bucket) / MIB - 5e-7, 6) for bucket in plan.buckets]
