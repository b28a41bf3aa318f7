"""Checks for silent corruption: forward and backward of a step run twice, and their bits must agree.

Note: the first pass. It runs in front of the model's forward, after all pending updates, and takes its gradients by
`torch.autograd.grad`, which runs no hook that sends, uses or frees them. `job.rehearses` tells techniques that count
forwards. Then buffers and random states are put back, and the loop makes its own pass. Each gradient is compared when
it is complete and not yet averaged; if one differs, all ranks raise before the first parameter is updated.
"""

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from kasoku.core import Batch, CorruptionError, InputError, Job, Range, Technique
from kasoku.distributed.consensus import name_ranks

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True)
class Replay(Technique, vetoes_steps=True, reads_state=True, in_sandbox=False):
    """Runs forward and backward of every N-th step twice, and ends the training where their bits differ.

    It finds what defective processors and memory do without an error. In a checked step it finds a wrong gradient, and
    a weight or an optimizer state that changes before the update. On several ranks it finds weights and states that
    differ, at the next check. One line names step, rank, host and tensor. The loop takes its batches from `job.loader`
    and its loss from `job.loss`, and the forward draws random numbers from torch's global generators only.

    Args:
        every: at least 1. The first step is checked, and each one whose number is a multiple of `every`.

    Saves: trainings that silent errors of a device would spoil.
    Costs: another forward and backward in each checked step, with the memory of the gradients once more; two digests
        of weights and optimizer state there, and a small collective. On CUDA all steps must be deterministic
        (`device.deterministic = true`). Updates never run in backward, and Overlap reads the range of each bucket.
    Maths: none: the training has the same bits without it.
    Ref: Dixit et al. 2021 (arXiv 2102.11245); Hochschild et al. 2021 (Cores that don't count).
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "captures_graph": "which of the two passes a graph replays depends on the batch before; leave one of them out",
        "stale": "the other ranks' updates may arrive between the two passes; use Overlap instead",
    }
    every: Annotated[int, Range(at_least=1)] = 100

    def apply(self, job: Job) -> None:
        """Watches batches, forwards and gradients. Raises InputError on a device that does not repeat its bits."""
        kinds = {p.device.type for p in job.model.parameters()} - {"cpu"}
        if kinds - {"cuda"} or (kinds and not torch.are_deterministic_algorithms_enabled()):
            advice = "set device.deterministic = true (torch.use_deterministic_algorithms) on CUDA, or use a CPU"
            raise InputError(f"Replay: a step on {', '.join(kinds)} does not repeat its bits: {advice}")
        check = _Check(job, self.every)
        job.around_loader(check.follow)
        # a lambda, as a deep copy of the model would copy a bound method, and the whole job with it
        job.on_close(job.model.register_forward_pre_hook(lambda *args: check.rehearse(*args)).remove)
        job.gradient_ready(check.compare)
        job.decide_step(check.decide)
        job.before_step(check.end)


class _Check:
    """The check of a step. `passed`: the last step whose check found nothing, or the first one of this training."""

    def __init__(self, job: Job, every: int) -> None:
        self.job, self.every = job, every
        self.names: dict[Tensor, str] = {p: name for name, p in job.model.named_parameters()}
        self.batch: Batch | None = None  # of a step to be checked, until its forward
        self.step, self.passed = -1, -1  # the step that is being checked, or -1
        self.expected: dict[Tensor, Tensor] = {}  # gradients, added up over the batches of the step
        self.digests: dict[str, int] = {}
        self.differs: dict[str, Tensor] = {}

    @property
    def due(self) -> bool:
        return self.job.steps % self.every == 0

    def follow(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        self.passed = self.job.steps if self.passed < 0 else self.passed
        for batch in batches:
            self.batch = batch if self.due else None
            yield batch

    def rehearse(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """The first pass over a batch of a checked step."""
        job, batch = self.job, self.batch
        if batch is None or model is not job.model or args[0] is not batch[0] or not torch.is_grad_enabled():
            return  # not a step's, a deep copy's, an evaluation's
        if self.step != job.steps:
            job.drain()
            self.step, self.digests = job.steps, self._digests()
            self.expected, self.differs = {}, {}
        self.batch, before = None, [(b, b.clone()) for b in model.buffers()]
        learning = [p for p in self.names if p.requires_grad]
        job.rehearses = True
        try:
            with torch.random.fork_rng([batch[0].device] if batch[0].is_cuda else []):
                loss = job.loss(model.forward(*args), batch[1])
                grads = torch.autograd.grad(loss / job.accumulate, learning, allow_unused=True)
        finally:
            job.rehearses = False
        for p, grad in zip(learning, grads, strict=True):
            if grad is not None:
                self.expected[p] = self.expected[p] + grad if p in self.expected else grad
        for b, value in before:
            b.copy_(value)

    def compare(self, p: Tensor) -> None:
        """Compares a complete gradient with the sum of those of the first passes."""
        if self.step == self.job.steps and p.grad is not None:
            both = self.expected.pop(p, torch.zeros_like(p.grad)), p.grad
            one, other = (x.detach().view(_INTEGERS[x.element_size()]) for x in both)
            self.differs[f"the gradient of {self.names[p]}"] = (one != other).any()
        elif self.due:
            got = f"Replay: step {self.job.steps} is to be checked, but its batch is not one of job.loader"
            raise InputError(f"{got}: iterate over job.loader, and call job.model with its images as they are")

    def decide(self, overflow: Tensor) -> float:
        self.end()
        return 1.0

    def end(self) -> None:
        """Raises CorruptionError on all ranks if a rank has found a difference. Collective, in a checked step."""
        step, self.step = self.step, -1
        if step != self.job.steps:
            return
        now, passes, trusted = self._digests(), "differs between two passes over the same batch", step
        flags = torch.stack([*self.differs.values()]).tolist() if self.differs else []
        found = [f"{name} changed between forward and update" for name in now if now[name] != self.digests[name]]
        found += [f"{name} {passes}" for name, differs in zip(self.differs, flags, strict=True) if differs]
        own = socket.gethostname(), found, now
        hosts, lines, digests = zip(*self.job.step_comm.gather_objects(own), strict=True)
        if ranks := [rank for rank, line in enumerate(lines) if line]:
            what, *others = lines[ranks[0]]
            what += f" (and {len(others)} more)" if others else ""
        elif name := next((name for name in now if any(now[name] != other.get(name) for other in digests)), ""):
            usual, count = Counter(other.get(name) for other in digests).most_common(1)[0]
            most, trusted = 2 * count > len(digests), self.passed
            ranks = [rank for rank, other in enumerate(digests) if other.get(name) != usual or not most]
            what = f"other bits of {name} than {'most ranks' if most else 'the other ranks'}"
        else:
            self.passed = step
            return
        who = name_ranks(ranks, lambda rank: f"{rank} (host {hosts[rank]})")
        cause = "memory or a processor changed bits, or the forward draws numbers that are not torch's"
        advice = f"resume from a checkpoint of step {trusted} or before, without that host"
        raise CorruptionError(f"silent corruption at step {step}, {who}: {what}; {cause}: {advice}", trusted=trusted)

    def _digests(self) -> dict[str, int]:
        """By name, of all weights and of the optimizer's state: the XOR of all elements, so a flipped bit shows."""
        tensors = {name: p.detach() for p, name in self.names.items()}
        for p, name in self.names.items():
            tensors |= {f"{key} of {name}": x for key, x in self.job.state_of(p).items() if isinstance(x, Tensor)}
        digests = [torch.hash_tensor(x).to(next(iter(self.names)).device) for x in tensors.values()]
        return dict(zip(tensors, torch.stack(digests).view(torch.int64).tolist(), strict=True))
