"""Which rank takes how many images of a batch: equal shares, or by speed where tuning has found ranks that differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kasoku.config.recipe import Recipe
from kasoku.core import Comm, Job
from kasoku.data import by_speed
from kasoku.training.checkpoint import RunFolder

SHARES = "shares.json"  # in the run folder: images of a batch for each rank


def shares_of(recipe: Recipe, speeds: Sequence[float]) -> tuple[int, ...]:
    """The images of a batch that each rank takes; empty: as many each.

    By speed where the slowest rank is more than a tenth slower than the fastest. Equal where a rank takes virtual ranks
    one after the other (each would make another number of passes), and with CUDA graphs (whose BatchNorm is not
    steered).

    Args:
        recipe: what is trained.
        speeds: images a second of each rank in rank order; empty: not known.
    """
    ranks = len(speeds)
    if ranks < 2 or recipe.device.graphs:
        return ()
    parts = recipe.parts(ranks)
    unit = recipe.norm_batch or parts
    if (recipe.norm_batch and parts > 1) or recipe.batch % unit or recipe.batch // unit < ranks:
        return ()
    shares = by_speed(recipe.batch, speeds, unit=unit)
    return shares if len(set(shares)) > 1 else ()


def keep_shares(run: RunFolder, job: Job) -> None:
    """Writes which shares a run begins with, where they are unequal."""
    shares = getattr(job.plain_loader, "shares", ())
    if shares:
        run.write(SHARES, json.dumps(shares) + "\n")


def shares_in(folder: Path, comm: Comm, batch: int) -> tuple[int, ...]:
    """The shares that a run began with, where it goes on with as many ranks and images; all ranks call it."""
    told: Any = []
    if comm.rank == 0:
        with suppress(OSError, ValueError):  # shares were equal
            told = json.loads((folder / SHARES).read_text())
    told = comm.broadcast_object(told)
    whole = isinstance(told, list) and all(type(n) is int and n > 0 for n in told)
    return tuple(told) if whole and len(told) == comm.size and sum(told) == batch else ()
