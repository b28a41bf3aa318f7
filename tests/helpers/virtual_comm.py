"""One rank on a virtual clock stands for many: the real techniques run on it, exactly and in no time.

Note: what is simulated. Collectives take the time of the cost model (`LinkModel`), one after the other in the order of
their starts. Compute takes the times of `Emulate`. Values are those of this rank alone, so a model on the `meta` device
is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from kasoku.core.comm import Solo
from kasoku.core.errors import InputError
from kasoku.core.job import Job
from kasoku.core.technique import Stage, Technique
from kasoku.distributed.ddp.cost_model import LinkModel, UnitTimes

T = TypeVar("T")


class VirtualClock:
    """A clock that advances only by its methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds

    def until(self, moment: float) -> None:
        """Advances to a moment, unless it has passed."""
        self.seconds = max(self.seconds, moment)


class _Arrival:
    """A transfer that ends at a fixed moment of the virtual clock."""

    def __init__(self, clock: VirtualClock, stop: float) -> None:
        self.clock, self.stop = clock, stop

    def wait(self) -> None:
        self.clock.until(self.stop)

    def done(self) -> bool:
        return self.clock.now() >= self.stop


class SimComm(Solo):
    """Rank 0 of `size` equal ranks, which all do the same at every moment.

    An all-reduce takes the link's time and leaves its tensor unchanged; every other collective takes as long as an
    all-reduce of half the bytes.

    Attributes: `sent`: (what, bytes, start, stop) of every collective.
    """

    def __init__(self, size: int, link: LinkModel, clock: VirtualClock | None = None) -> None:
        if size < 1:
            raise InputError(f"SimComm({size}): at least 1 rank")
        self.rank, self.size, self.link = 0, size, link
        self.clock: VirtualClock = clock or VirtualClock()
        self.sent: list[tuple[str, int, float, float]] = []
        self._free = 0.0

    def _send(self, what: str, size: int) -> _Arrival:
        start = max(self.clock.now(), self._free)
        self._free = start + self.link.seconds(size)
        self.sent.append((what, size, start, self._free))
        return _Arrival(self.clock, self._free)

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> _Arrival:
        return self._send("all_reduce", x.nbytes)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> _Arrival:
        return self._send("reduce_scatter", x.nbytes // 2)

    def all_gather(self, out: Tensor, x: Tensor) -> _Arrival:
        return self._send("all_gather", out.nbytes // 2)

    def all_to_all(self, out: Tensor, x: Tensor) -> _Arrival:
        return self._send("all_to_all", x.nbytes // 2)

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> _Arrival:
        return self._send("send", x.nbytes // 2)

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> _Arrival:
        return self._send("receive", x.nbytes // 2)

    def gather_objects(self, thing: T) -> list[T]:
        return [thing] * self.size

    def sub(self, groups: Sequence[Sequence[int]]) -> SimComm:
        """The first of its group, with a link of its own on the same clock."""
        return SimComm(len(next(ranks for ranks in groups if self.rank in ranks)), self.link, self.clock)


@dataclass(frozen=True)
class Emulate(Technique):
    """Advances the clock of a `SimComm` by the times of forward, backward and update of the named modules.

    Args:
        units: names of modules of the model, in forward order, with their seconds.

    Saves: the machine that would compute.
    Costs: nothing is computed faster: on the `meta` device no value is computed at all.
    Maths: the gradients of a unit arrive when its backward has ended.
    """

    stage: ClassVar[Stage] = Stage.MODEL

    units: tuple[UnitTimes, ...] = ()

    def apply(self, job: Job) -> None:
        """Advances the clock in forward and backward of the units, and at each update by the parameters' shares."""
        clock = job.clock
        if not isinstance(clock, VirtualClock):
            raise InputError("Emulate: the job's clock is a real one: give Job a SimComm")
        modules = dict(job.model.named_modules())
        shares: dict[Tensor, float] = {}
        for unit in self.units:
            if unit.name not in modules:
                raise InputError(f"Emulate: no module {unit.name} in {type(job.model).__name__}")
            module = modules[unit.name]
            params = [p for p in module.parameters() if p.requires_grad]
            whole = sum(p.numel() for p in params)
            shares |= {p: unit.update_s * p.numel() / whole for p in params}
            job.on_close(module.register_forward_hook(partial(_pass, clock, unit)).remove)
        job.after_update(lambda params: clock.advance(sum(shares.get(p, 0.0) for p in params)))


def _pass(clock: VirtualClock, unit: UnitTimes, _: nn.Module, __: object, out: Tensor) -> None:
    clock.advance(unit.forward_s)
    if out.requires_grad:
        hook: Any = out.register_hook
        hook(lambda _: clock.advance(unit.backward_s))
