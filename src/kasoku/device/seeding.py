"""The global random state as a pure function of seed, step and rank: for dropout and the like inside models."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch

from kasoku.core import Job, Range, Stage, Technique
from kasoku.core.job_state import Batch, first_part


@dataclass(frozen=True)
class Seeded(Technique, stage=Stage.DATA):
    """Seeds torch's random state for each batch, so that a run resumed in mid-epoch draws what it would have drawn.

    Args:
        seed: of the run, 0 or more.

    Saves: nothing; makes dropout reproducible and resuming exact.
    Costs: a hash and a seeding a batch.
    Maths: state = hash(seed, updates made, virtual rank), where the batches of one step on one rank are virtual ranks:
        rank * accumulate + batch within the step. So k accumulated batches draw what k ranks would.
    """

    seed: Annotated[int, Range(at_least=0)] = 0

    def apply(self, job: Job) -> None:
        step, micro = -1, 0

        def seeded(batches: Iterable[Batch]) -> Iterator[Batch]:
            nonlocal step, micro
            for batch in batches:
                # The loop asks for a batch when it is done with the one before, so job.steps is the step it is for.
                step, micro = job.steps, micro + 1 if job.steps == step else 0
                numbers = (self.seed, step, first_part(job) + micro)
                seed = int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()) >> 1
                # `torch.manual_seed` goes on to devices that were never used, for each of which it formats a stack.
                torch.default_generator.manual_seed(seed)
                first = next(job.model.parameters(), None)
                if first is not None and first.device.type not in ("cpu", "meta"):
                    torch.get_device_module(first.device).manual_seed(seed)
                yield batch

        job.around_loader(seeded)
