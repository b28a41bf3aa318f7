"""The rank of this process and the ranks on its host, from the variables of the launcher, and the nodes of all ranks.

Note: a batch script has Slurm's variables too; what it starts without srun and without MASTER_ADDR runs alone.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kasoku.core import Comm, InputError
from kasoku.core.hardware import cores


@dataclass(frozen=True)
class Place:
    """The position of a process among all ranks, and among those of its host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    bound: bool = False  # to cores that the other ranks of its host do not use
    launched: bool = False  # by a launcher

    @property
    def ranks_on_its_cores(self) -> int:
        """The number of ranks that use the cores of this process, with this one."""
        return 1 if self.bound else self.local_size

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or not 0 <= self.local_rank < self.local_size <= self.size:
            given = f"rank {self.rank} of {self.size}, {self.local_rank} of {self.local_size} on this host"
            raise InputError(f"{given}: ranks count from 0; start them with kasoku launch, torchrun or srun")

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell a process its place, as torchrun sets them."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return dict(zip(names, map(str, (self.rank, self.size, self.local_rank, self.local_size)), strict=True))


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """The place of this process; alone without a launcher. Raises InputError if variables are missing."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local_rank = _number(environment, "LOCAL_RANK", 0)
        return Place(rank, size, local_rank, _number(environment, "LOCAL_WORLD_SIZE", local_rank + 1), launched=True)
    if "SLURM_PROCID" in environment and ("MASTER_ADDR" in environment or "SLURM_STEP_ID" in environment):
        rank, tasks = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
        size = _number(environment, "SLURM_STEP_NUM_TASKS", tasks)  # one in the shell of salloc
        local_rank = _number(environment, "SLURM_LOCALID")
        a_node = size // max(1, _number(environment, "SLURM_STEP_NUM_NODES", _number(environment, "SLURM_NNODES", 1)))
        local_size = _number(environment, "SLURM_NTASKS_PER_NODE", max(a_node, local_rank + 1))
        if torch.cuda.device_count() == 1:  # Slurm shows each task a GPU of its own
            local_rank = 0
        bound = cores() <= _number(environment, "SLURM_CPUS_PER_TASK", 0)
        launched = size > 1 or "MASTER_ADDR" in environment
        return Place(rank, size, local_rank, min(size, local_size), bound=bound, launched=launched)
    return Place()


def nodes_of(comm: Comm, size: int, asks: str) -> list[list[int]]:
    """The ranks of each node: `size` consecutive ones, or with 0 those that share a host. Collective.

    Raises InputError for nodes of unequal size. `asks`: the technique or reducer that asks.
    """
    if comm.size % max(1, size):
        raise InputError(f"{asks}: {comm.size} ranks in nodes of {size}: node must divide {comm.size}")
    if size:
        return [[*range(first, first + size)] for first in range(0, comm.size, size)]
    hosts = comm.gather_objects(socket.gethostname())
    nodes = [[rank for rank, each in enumerate(hosts) if each == host] for host in dict.fromkeys(hosts)]
    if len({*map(len, nodes)}) > 1:
        got = f"{asks}: hosts of {[*map(len, nodes)]} ranks"
        raise InputError(f"{got}; start as many on each, or give node, a divisor of all these numbers")
    return nodes


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name, default)
    try:
        return int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        what = f'{name}="{value}"' if value is not None else f"no {name}"
        raise InputError(f"{what} beside other variables of a launcher: a number is wanted; launch anew") from None
