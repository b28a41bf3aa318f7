"""Which of the ranks this process is, and how many share its host: what the launcher's variables say.

Note: what a launcher says. torchrun (and what does as it does) sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE;
srun sets SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and SLURM_NTASKS_PER_NODE. MASTER_ADDR and MASTER_PORT say where
rank 0 is. A batch script has Slurm's variables too; what it runs without srun and without MASTER_ADDR is alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kasoku.core import InputError
from kasoku.core.hardware import cores


@dataclass(frozen=True)
class Place:
    """Where a process stands among the ranks: in all, and on its host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    bound: bool = False  # to cores of its own: those it may use are not shared with the others on its host
    launched: bool = False  # by something that said so; else alone by default

    @property
    def sharing(self) -> int:
        """How many processes share the cores that this one may use."""
        return 1 if self.bound else self.local_size

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or not 0 <= self.local_rank < self.local_size <= self.size:
            raise InputError(
                f"rank {self.rank} of {self.size}, {self.local_rank} of {self.local_size} on this host: ranks count "
                "from 0 to below their number; start them with kasoku launch, torchrun or srun"
            )

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell a process its place, as torchrun sets them."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return dict(zip(names, map(str, (self.rank, self.size, self.local_rank, self.local_size)), strict=True))


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place, from what its launcher set; alone without one. Raises InputError for half of it."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local_rank = _number(environment, "LOCAL_RANK", 0)
        return Place(rank, size, local_rank, _number(environment, "LOCAL_WORLD_SIZE", local_rank + 1), launched=True)
    if "SLURM_PROCID" in environment and ("MASTER_ADDR" in environment or "SLURM_STEP_ID" in environment):
        rank, size = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
        local_rank = _number(environment, "SLURM_LOCALID")
        a_node = size // max(1, _number(environment, "SLURM_NNODES", 1))
        local_size = _number(environment, "SLURM_NTASKS_PER_NODE", max(a_node, local_rank + 1))
        if torch.cuda.device_count() == 1:  # Slurm shows each task a GPU of its own
            local_rank = 0
        bound = cores() <= _number(environment, "SLURM_CPUS_PER_TASK", 0)
        launched = size > 1 or "MASTER_ADDR" in environment
        return Place(rank, size, local_rank, min(size, local_size), bound=bound, launched=launched)
    return Place()


def ranks_on_host(environment: Mapping[str, str] = os.environ) -> int | None:
    """Ranks of a node: $LOCAL_WORLD_SIZE, or else Slurm's tasks a node or equal share; None where nothing says it."""
    if environment.get("LOCAL_WORLD_SIZE"):
        return _number(environment, "LOCAL_WORLD_SIZE")
    if "SLURM_PROCID" not in environment:
        return None
    if environment.get("SLURM_NTASKS_PER_NODE"):
        return _number(environment, "SLURM_NTASKS_PER_NODE")
    nodes = _number(environment, "SLURM_NNODES", 0)
    each, left = divmod(_number(environment, "SLURM_NTASKS", 0), max(1, nodes))
    return each if nodes and not left else None


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    given = environment.get(name, default)
    try:
        return int(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        said = f'{name}="{given}"' if given is not None else f"no {name}"
        raise InputError(f"{said} beside other variables of a launcher: a number is wanted; launch anew") from None
