"""Updates in backward: each gradient is used as soon as it is complete, and freed, so there is no buffer of gradients.

Note: code that reads a freed gradient notices it. A placeholder of one element, NaN, expanded to the parameter's shape,
takes its place: a norm of it is NaN, and writing to it (clipping by hand, a second backward) raises.

Note: pending updates. Between ranks a gradient must be averaged before it is used. The technique that averages it
starts the collectives in backward and enqueues an update, which runs when they have ended: at a later gradient, or at
the latest in `optimizer.step()`. Before it takes memory it reserves the bytes. That waits for the oldest updates while
more than `LIMIT` bytes are in use, so that a slow link costs time and no memory.

Note: no deadlock. Gradients may arrive in different orders on different ranks. All collectives, also those of factors,
start in the order of the buckets, and a rank waits only for those that it has started. Of all that ranks wait for, the
first in this order has been started by each rank that waits, and will be by the others; so it ends.
"""

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from kasoku.core.comm import Work
from kasoku.core.errors import InputError
from kasoku.core.job import Job
from kasoku.core.job_state import GradientExchange, Hyper

LIMIT = 2**25  # bytes of gradients that are averaged at once; one bucket may have more


class BackwardUpdates:
    """Updates the parameters of a job in backward, unless something needs all gradients at once.

    `name`: of the technique that messages are about.

    `senders`: for weights whose layer may exchange the factors of their gradient. The exchange calls `senders[p]()` on
    all ranks, in the turn of p's bucket, if no other gradient is in it. True: the layer has started to exchange
    factors. False: `p.grad` is the gradient, to be averaged.
    """

    def __init__(self, job: Job, name: str, *, enabled: bool, show: bool) -> None:
        self.job, self.name, self.enabled, self.show = job, name, enabled, show
        self.exchange: GradientExchange | None = None  # averages gradients of several ranks in backward
        self.placeholders: dict[Tensor, Tensor] = {}  # of gradients that were used, or whose factors a layer holds
        self.senders: dict[Tensor, Callable[[], bool]] = {}
        self._settings: Hyper = []
        self._pending: deque[tuple[int, Sequence[Work], Callable[[], object]]] = deque()
        self._bytes, self._most = 0, LIMIT  # reserved; at most, but for buckets that cannot be sent yet
        if enabled:
            job.gradient_ready(self.update)
            job.before_step(self.before_step)
            job.on_drain(lambda: self.finish(wait=True))
            job.on_close(self.clear)

    def active(self, *, exchanged: bool = False) -> bool:
        """Whether gradients are used as they arrive; known after all techniques are applied. Says why not, once.

        `exchanged`: as if an exchange took part already.
        """
        job, rule, exchanged = self.job, type(self.job.optimizer), exchanged or self.exchange is not None
        reason = ""
        if job.needs_whole_gradients or job.vetoes_steps:
            reason = "a technique needs all gradients before any update"
        elif job.comm.size > 1 and not (exchanged and job.step_comm.size == job.comm.size):
            reason = "ranks exchange at the step, and not in backward"
        elif not rule.step.__module__.startswith(("torch.optim.", "kasoku.optim.")):
            reason = f"{rule.__name__} has its own step()"
        if reason and self.show and self.enabled and job.comm.rank == 0:
            self.show = False
            print(f"kasoku: {self.name}: {reason}, so gradients are kept until optimizer.step()", flush=True)
        return self.enabled and not reason

    def update(self, p: Tensor) -> None:
        """Updates a parameter whose gradient is complete, unless its layer or the exchange does so."""
        if p.grad is None or p in self.placeholders or not (self.exchange or self.active()):
            return
        settings = self.settings()
        if self.exchange is None:
            self.job.update([p], settings)
            self.free_gradient(p)

    def settings(self) -> Hyper:
        """The optimizer's settings when the first gradient of this step arrived: those of all its updates."""
        self._settings = self._settings or self.job.hyper()
        return self._settings

    def free_gradient(self, p: Tensor) -> None:
        """Puts a placeholder in place of the gradient of a parameter."""
        p.grad = self.placeholders[p] = p.new_full((), float("nan")).expand(p.shape)

    # ---- pending updates

    def reserve(self, n: int) -> None:
        """Waits for the oldest updates until n more bytes may be used.

        With accumulated gradients it does not wait, since those that are averaged are then freed.
        """
        self._most = max(self._most, n)
        while self._pending and self._bytes + n > self._most and self.job.accumulate == 1:
            self._finish_first()
        self._bytes += n

    def enqueue(self, n: int, works: Sequence[Work], update: Callable[[], object]) -> None:
        """Runs an update, for which n bytes are reserved, when its collectives have ended."""
        self._pending.append((n, works, update))
        self.reserve(0)  # more may have been used while nothing could be waited for

    def finish(self, *, wait: bool) -> None:
        """Runs the updates whose collectives have ended; waits for all of them, or for none."""
        while self._pending and (wait or all(work.done() for work in self._pending[0][1])):
            self._finish_first()

    def _finish_first(self) -> None:
        n, works, update = self._pending.popleft()
        with self.job.trace.span("wait", bytes=n):
            for work in works:
                work.wait()
        update()
        self._bytes -= n

    # ---- moments

    def before_forward(self) -> None:
        """Raises InputError if the optimizer's step after the last backward is missing."""
        if self.placeholders or self._pending:
            got = "a second forward before optimizer.step(), after gradients were used as they arrived"
            advice = "say accumulate=k to Job for k backwards a step, or set in_backward = false"
            raise InputError(f"{self.name}: {got}: {advice}")

    def before_step(self) -> None:
        """Lets the optimizer skip updated parameters. Raises InputError if they would be updated otherwise now."""
        changed = ""
        if any(p.grad is not None and p.grad is not placeholder for p, placeholder in self.placeholders.items()):
            changed = "a gradient was replaced"
        elif self._settings and self._settings != self.job.hyper():
            changed = "a rate, or another setting of the optimizer, was changed"
        if changed:
            when = "between backward and optimizer.step(), after parameters were updated in backward"
            raise InputError(f"{self.name}: {changed} {when}: do it before the forward, or set in_backward = false")
        self.clear()

    def clear(self) -> None:
        """Takes the placeholders away."""
        for p, placeholder in self.placeholders.items():
            if p.grad is placeholder:
                p.grad = None
        self.placeholders.clear()
        self._settings = []
