"""A cluster as a small TOML file: its nodes, its network, its GPUs, and what a run costs beside its steps."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from kasoku.config.toml import parse
from kasoku.core import InputError
from kasoku.simulate.fair_share import Floats

T = TypeVar("T")
_HERE = Path(__file__).parent


def _check_numbers(of: object) -> None:
    """Raises InputError for a number below 0, or none at all: rates and times of such would never come to an end."""
    for name, value in vars(of).items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not 0 <= number < 1e12:
                raise InputError(f"{name}={value}: finite numbers of 0 or more are wanted")


@dataclass(frozen=True)
class Gpu:
    """What one GPU takes for a step of `network`: alpha_ms + beta_ms * images, forward, backward and update together.

    Args:
        name: what people call it.
        alpha_ms: what a step takes whatever its batch: starting kernels, updates.
        beta_ms: what each image adds.
        least: the smallest batch it was measured at; below, a warning.
        most: the largest.
        tflops: peak of matrix products in the precision it trains in.
        memory_gb_s: of its memory.
        spread: standard deviation of the logarithm of the speeds of many such GPUs.
        usd_hour: what one costs to rent.
        precision: what precision = "auto" trains in there, as these times are of; fp16 comes with loss scaling.
        source: where all that comes from.
    """

    name: str
    alpha_ms: float
    beta_ms: float
    least: int
    most: int
    tflops: float
    memory_gb_s: float
    spread: float = 0.0
    usd_hour: float = 0.0
    precision: Literal["bf16", "fp16"] = "bf16"
    source: str = ""

    network = "resnet50"

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.alpha_ms < 0 or self.beta_ms <= 0 or not 0 < self.least <= self.most:
            raise InputError(
                f"alpha_ms={self.alpha_ms}, beta_ms={self.beta_ms}, least={self.least}, most={self.most}: times of 0 "
                "or more, above 0 an image, and batches from at least 1 up"
            )
        if self.tflops <= 0 or self.memory_gb_s <= 0 or self.spread < 0:
            raise InputError("tflops and memory_gb_s: above 0; spread: 0 or more")


@dataclass(frozen=True)
class ClusterNode:
    """One machine. A GPU sends `port_gb_s` to the others of its node, and each of the `nics` sends `nic_gb_s` out.

    Both are rates of one direction, and hold in both at once.
    """

    gpus: int
    port_gb_s: float
    nics: int = 1
    nic_gb_s: float = 0.0
    input_images_s: float = 0.0  # that its CPUs can decode; 0: as many as are wanted

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.gpus < 1 or self.nics < 1:
            raise InputError(f"gpus={self.gpus}, nics={self.nics}: at least 1 of each")
        if (self.gpus > 1 and self.port_gb_s <= 0) or self.nic_gb_s < 0 or self.input_images_s < 0:
            raise InputError(f"port_gb_s={self.port_gb_s}, nic_gb_s={self.nic_gb_s}: GB/s above 0")
        if self.gpus % self.nics:
            raise InputError(
                f"gpus={self.gpus} with nics={self.nics}: as many NICs as GPUs, or a divisor of them; of more, one "
                "a GPU at their rates together"
            )


@dataclass(frozen=True)
class Racks:
    """Nodes in racks. Within one all talk at full rate; a rack sends `uplink_gb_s` to the others, 0: as much as all."""

    nodes: int
    uplink_gb_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.nodes < 1 or self.uplink_gb_s < 0:
            raise InputError(f"nodes={self.nodes}, uplink_gb_s={self.uplink_gb_s}: at least 1 node, 0 GB/s or more")


@dataclass(frozen=True)
class Protocol:
    """What messages take in a protocol of a communication library, in microseconds, and what it keeps of a link's rate.

    A message waits `start_us` once, `tree_more_us` more of a tree, and `ring_us` or `tree_us` a hop: [within a node,
    between nodes].
    """

    name: str
    start_us: float
    ring_us: tuple[float, float]
    tree_us: tuple[float, float]
    share: float = 1.0
    tree_more_us: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not 0 < self.share <= 1 or min(self.start_us, *self.ring_us, *self.tree_us) < 0:
            raise InputError(f"{self.name}: share={self.share} from 0 to 1, times of 0 or more")
        if self.tree_more_us < 0:
            raise InputError(f"{self.name}: tree_more_us={self.tree_more_us}: 0 or more")


# Source: NCCL's own model, src/graph/tuning.cc; the shares of LL and LL128 are its 1/4 and .92 of a ring's bandwidth.
NCCL = (
    Protocol("LL", 6.6, (0.6, 2.7), (0.6, 5.0), 0.25, tree_more_us=0.2),
    Protocol("LL128", 14.0, (1.9, 4.0), (1.25, 8.5), 0.92),
    Protocol("Simple", 8.4, (3.4, 14.0), (4.0, 14.0), 1.0),
)


@dataclass(frozen=True)
class Costs:
    """What a run takes beside its steps, in seconds; `evaluation_s`: the least of each."""

    setup_s: float = 0.0
    first_epoch_s: float = 0.0
    evaluation_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True)
class Cluster:
    """The whole file. `gpu`: the name of one that is shipped, or `[own_gpu]` describes it."""

    name: str
    nodes: int
    node: ClusterNode
    gpu: str = ""
    own_gpu: Gpu | None = None
    racks: Racks | None = None
    protocols: tuple[str, ...] = ("LL", "LL128", "Simple")
    own_protocol: Protocol | None = None
    latency: float = 1.0  # of the table's latencies
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 1_000_000:
            raise InputError(f"nodes={self.nodes}: at least 1, at most 1,000,000")
        if not 0 < self.latency < 1e6:
            raise InputError(f"latency={self.latency}: a factor above 0")
        if self.nodes > 1 and self.node.nic_gb_s <= 0:
            raise InputError(f"node.nic_gb_s={self.node.nic_gb_s}: {self.nodes} nodes need a network; GB/s above 0")
        known = [p.name for p in NCCL]
        wrong = [name for name in self.protocols if name not in known]
        if wrong or not (self.protocols or self.own_protocol):
            raise InputError(f"protocols={list(self.protocols)}: of {', '.join(known)}, or a table own_protocol")
        if bool(self.gpu) == bool(self.own_gpu):
            raise InputError(f"gpu={self.gpu!r}: one of {', '.join(shipped('gpus'))}, or a table own_gpu, not both")

    @property
    def most(self) -> int:
        """All its GPUs."""
        return self.nodes * self.node.gpus

    @cached_property
    def device(self) -> Gpu:
        """What each GPU is."""
        return self.own_gpu or _read(Gpu, "gpus", self.gpu)

    @property
    def table(self) -> tuple[Protocol, ...]:
        """The latencies and bandwidths of its communication library."""
        used = (self.own_protocol,) if self.own_protocol else (p for p in NCCL if p.name in self.protocols)
        return tuple(_scaled(protocol, self.latency) for protocol in used)

    def nodes_for(self, gpus: int) -> int:
        """How many nodes so many GPUs fill. Raises InputError where they do not fill them, or are not there."""
        each = self.node.gpus
        if not 1 <= gpus <= self.most:
            raise InputError(
                f"{gpus} GPUs: {self.name} has {self.nodes:,} nodes of {each}: 1 to {self.most:,} can be had"
            )
        if gpus > each and gpus % each:
            raise InputError(f"{gpus} GPUs: nodes of {each}: take 1 to {each}, or a multiple of {each}")
        return max(1, gpus // each)

    def capacity(self, gpus: int) -> Floats:
        """The rate of each link in bytes/s: of GPUs out and in, of NICs, of racks; `route` counts them so."""
        nodes, node = self.nodes_for(gpus), self.node
        parts = [np.full(2 * gpus, 1e9 * (node.port_gb_s or 1e6)), np.full(2 * nodes * node.nics, 1e9 * node.nic_gb_s)]
        if self.racks and self.racks.uplink_gb_s:
            parts.append(np.full(2 * -(-nodes // self.racks.nodes), 1e9 * self.racks.uplink_gb_s))
        return np.concatenate(parts)

    def route(self, gpus: int, start: int, stop: int, nic: int) -> list[int]:
        """The links from one GPU to another, by the nodes' NIC of that number where it leaves its node."""
        each, nics = self.node.gpus, self.node.nics
        here, there = start // each, stop // each
        if here == there:
            return [2 * start, 2 * stop + 1]
        first = 2 * gpus
        links = [first + 2 * (here * nics + nic), first + 2 * (there * nics + nic) + 1]
        if self.racks and self.racks.uplink_gb_s and here // self.racks.nodes != there // self.racks.nodes:
            first += 2 * nics * max(1, gpus // each)
            links += [first + 2 * (here // self.racks.nodes), first + 2 * (there // self.racks.nodes) + 1]
        return links

    def nic_of(self, gpu: int) -> int:
        """The NIC nearest to a GPU."""
        local, each, nics = gpu % self.node.gpus, self.node.gpus, self.node.nics
        return local * nics // each

    def altered(self, what: str) -> Cluster:
        """The cluster with changes such as "network*2,latency/2": of network, latency, nvlink, gpu."""
        out = self
        for change in filter(None, (part.strip() for part in what.split(","))):
            out = _altered(out, change)
        return out


def _altered(cluster: Cluster, change: str) -> Cluster:
    name, sign, by = change.partition("*" if "*" in change else "/")
    try:
        factor = float(by) if sign == "*" else 1 / float(by)
    except (ValueError, ZeroDivisionError):
        factor = 0.0
    node = cluster.node
    if 1e-6 < factor < 1e6:
        if name == "network":
            racks = cluster.racks and replace(cluster.racks, uplink_gb_s=cluster.racks.uplink_gb_s * factor)
            return replace(cluster, node=replace(node, nic_gb_s=node.nic_gb_s * factor), racks=racks)
        if name == "nvlink":
            return replace(cluster, node=replace(node, port_gb_s=node.port_gb_s * factor))
        if name == "latency":
            return replace(cluster, latency=cluster.latency * factor)
        if name == "gpu":
            gpu = cluster.device
            faster = replace(gpu, alpha_ms=gpu.alpha_ms / factor, beta_ms=gpu.beta_ms / factor)
            return replace(cluster, gpu="", own_gpu=faster)
    raise InputError(f'what-if "{change}": network, latency, nvlink or gpu, * or /, and a number, as network*2')


def _scaled(protocol: Protocol, factor: float) -> Protocol:
    (a, b), (c, d) = protocol.ring_us, protocol.tree_us
    ring, tree = (a * factor, b * factor), (c * factor, d * factor)
    start_us, more_us = protocol.start_us * factor, protocol.tree_more_us * factor
    return replace(protocol, start_us=start_us, tree_more_us=more_us, ring_us=ring, tree_us=tree)


def shipped(kind: str) -> list[str]:
    """The names that need no file: of "clusters" or "gpus"."""
    return sorted(file.stem for file in (_HERE / kind).glob("*.toml"))


def load(name: str) -> Cluster:
    """A cluster that is shipped, or one from a file. Raises InputError for what is not there or not one."""
    if name in shipped("clusters"):
        return _read(Cluster, "clusters", name)
    path = Path(name)
    if path.suffix != ".toml":
        raise InputError(f"cluster {name}: one of {', '.join(shipped('clusters'))}, or a file that ends in .toml")
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): a cluster file is wanted") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML ({error})") from error
    return _parsed(Cluster, document, str(path))


def _read(cls: type[T], kind: str, name: str) -> T:
    if name not in shipped(kind):
        raise InputError(f"{kind[:-1]} {name}: one of {', '.join(shipped(kind))}")
    return _parsed(cls, tomllib.loads((_HERE / kind / f"{name}.toml").read_text()), name)


def _parsed(cls: type[T], document: dict[str, Any], where: str) -> T:
    try:
        return parse(cls, document)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
