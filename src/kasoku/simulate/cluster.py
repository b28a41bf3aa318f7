"""A cluster as a small TOML file: nodes, network, GPUs, and the costs of a run beside its steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from kasoku.config.toml import parse, read
from kasoku.core import Checked, InputError, Range

_HERE = Path(__file__).parent
_FINITE = Range(at_least=0, below=10**12)  # with larger numbers a simulation would never end
Amount = Annotated[float, _FINITE]
Positive = Annotated[float, Range(above=0, below=10**12)]
Count = Annotated[int, Range(at_least=1, below=10**12)]
Share = Annotated[float, Range(above=0, at_most=1)]


@dataclass(frozen=True)
class Gpu(Checked):
    """A GPU. A step of `network` takes alpha_ms + beta_ms * images: forward, backward and update together."""

    name: str  # its common name
    alpha_ms: Amount  # the time that does not depend on the batch: kernel launches, updates
    beta_ms: Positive  # the time of each image
    least: Count  # the smallest measured batch; below it there is a warning
    most: Count  # the largest measured batch
    tflops: Positive  # peak of matrix products in the precision of training
    memory_gb_s: Positive  # bandwidth of its memory
    spread: Amount = 0.0  # standard deviation of the logarithm of the speeds of many such GPUs
    jitter: Amount = 0.0  # that of the times of one such GPU's steps
    compute_share: Share = 1.0  # the speed of computing that is left during a transfer
    usd_hour: Amount = 0.0  # the price of an hour
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"  # of these times; "auto" selects it, fp16 with loss scaling
    source: str = ""  # of these numbers

    network = "resnet50"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise InputError(f"least={self.least} is above most={self.most}: give the smallest batch as least")


@dataclass(frozen=True)
class ClusterNode(Checked):
    """One machine. A GPU sends `port_gb_s` within its node; each of the `nics` sends `nic_gb_s` out of it.

    The GPUs of a NIC share `pcie_gb_s` on their way to it, 0: no limit. All are rates of one direction; both directions
    have them at the same time.
    """

    gpus: Count
    port_gb_s: Amount
    nics: Count = 1
    nic_gb_s: Amount = 0.0
    pcie_gb_s: Amount = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpus > 1 and self.port_gb_s <= 0:
            raise InputError(f"port_gb_s={self.port_gb_s}, nic_gb_s={self.nic_gb_s}: GB/s above 0")
        if self.gpus % self.nics:
            allowed = "as many NICs as GPUs, or a divisor of them; for more NICs, one a GPU with the sum of their rates"
            raise InputError(f"gpus={self.gpus} with nics={self.nics}: {allowed}")


@dataclass(frozen=True)
class Racks(Checked):
    """Nodes in racks. Within a rack all nodes have their full rate; a rack sends `uplink_gb_s` out, 0: no limit."""

    nodes: Count
    uplink_gb_s: Amount = 0.0


@dataclass(frozen=True)
class Protocol(Checked):
    """A protocol of a communication library: latencies in microseconds, and the share of a link's rate that it uses.

    A message takes `start_us` once, in a tree `tree_more_us` more, and `ring_us` or `tree_us` for each hop: [within a
    node, between nodes].
    """

    name: str
    start_us: Amount
    ring_us: Annotated[tuple[float, float], _FINITE]
    tree_us: Annotated[tuple[float, float], _FINITE]
    share: Share = 1.0
    tree_more_us: Amount = 0.0


# Source: NCCL's own model, src/graph/tuning.cc; the shares of LL and LL128 are its 1/4 and .92 of a ring's bandwidth.
NCCL = (
    Protocol("LL", 6.6, (0.6, 2.7), (0.6, 5.0), 0.25, tree_more_us=0.2),
    Protocol("LL128", 14.0, (1.9, 4.0), (1.25, 8.5), 0.92),
    Protocol("Simple", 8.4, (3.4, 14.0), (4.0, 14.0), 1.0),
)


@dataclass(frozen=True)
class Costs(Checked):
    """The costs of a run beside its steps, in seconds; `evaluation_s`: the least time of one evaluation."""

    setup_s: Amount = 0.0
    first_epoch_s: Amount = 0.0
    evaluation_s: Amount = 0.0


@dataclass(frozen=True)
class Cluster(Checked):
    """The contents of a cluster file. `gpu`: the name of a shipped GPU; otherwise `[own_gpu]` describes it."""

    name: str
    nodes: Annotated[int, Range(at_least=1, at_most=1_000_000)]
    node: ClusterNode
    gpu: str = ""
    own_gpu: Gpu | None = None
    racks: Racks | None = None
    protocols: tuple[Literal["LL", "LL128", "Simple"], ...] = ("LL", "LL128", "Simple")
    own_protocol: Protocol | None = None
    latency: Positive = 1.0  # a factor on the latencies of the protocols
    cycle_ms: Amount = 0.0  # how often each rank looks for gradients to send, as by HOROVOD_CYCLE_TIME; 0: at once
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes > 1 and self.node.nic_gb_s <= 0:
            raise InputError(f"node.nic_gb_s={self.node.nic_gb_s}: {self.nodes} nodes need a network; GB/s above 0")
        if not (self.protocols or self.own_protocol):
            raise InputError("protocols=[]: some of LL, LL128, Simple are wanted, or a table own_protocol")
        if bool(self.gpu) == bool(self.own_gpu) or (self.gpu and self.gpu not in shipped("gpus")):
            raise InputError(f"gpu={self.gpu!r}: one of {', '.join(shipped('gpus'))}, or a table own_gpu, not both")

    @property
    def most(self) -> int:
        """The number of its GPUs."""
        return self.nodes * self.node.gpus

    @cached_property
    def device(self) -> Gpu:
        return self.own_gpu or parse(Gpu, read(_HERE / "gpus" / f"{self.gpu}.toml"))

    @property
    def table(self) -> tuple[Protocol, ...]:
        """The protocols of its communication library."""
        return (self.own_protocol,) if self.own_protocol else tuple(p for p in NCCL if p.name in self.protocols)

    def fills(self, gpus: int) -> bool:
        """Whether so many GPUs fill their nodes, or are in one."""
        return gpus <= self.node.gpus or gpus % self.node.gpus == 0

    def nodes_for(self, gpus: int) -> int:
        """The number of nodes of these GPUs. Raises InputError if they do not fill them, or the cluster has fewer."""
        each, top = self.node.gpus, self.most
        if not 1 <= gpus <= top:
            raise InputError(f"{gpus} GPUs: {self.name} has {self.nodes:,} nodes of {each}: 1 to {top:,} are available")
        if not self.fills(gpus):
            raise InputError(f"{gpus} GPUs: nodes of {each}: take 1 to {each}, or a multiple of {each}")
        return max(1, gpus // each)

    def route(self, start: int, stop: int) -> list[tuple[str, int, float]]:
        """The links from one GPU to another: kind, number, bytes/s. Between nodes, the NICs nearest to the sender."""
        each, nics, racks = self.node.gpus, self.node.nics, self.racks
        here, there = start // each, stop // each
        if here == there:
            rate = 1e9 * self.node.port_gb_s
            return [("from GPU", start, rate), ("to GPU", stop, rate)]
        nic, rate = start % each * nics // each, 1e9 * min(self.node.nic_gb_s, self.node.pcie_gb_s or math.inf)
        links = [("from NIC", here * nics + nic, rate), ("to NIC", there * nics + nic, rate)]
        if racks and racks.uplink_gb_s and here // racks.nodes != there // racks.nodes:
            rate = 1e9 * racks.uplink_gb_s
            links += [("from rack", here // racks.nodes, rate), ("to rack", there // racks.nodes, rate)]
        return links


def shipped(kind: str) -> list[str]:
    """The names of the shipped "clusters" or "gpus"."""
    return sorted(file.stem for file in (_HERE / kind).glob("*.toml"))


def load(name: str, settings: Sequence[str] = ()) -> Cluster:
    """A shipped cluster, or one from a file, with `path=value` over it. Raises InputError for what it cannot have."""
    path = _HERE / "clusters" / f"{name}.toml" if name in shipped("clusters") else Path(name)
    if path.suffix != ".toml":
        raise InputError(f"cluster {name}: one of {', '.join(shipped('clusters'))}, or a file that ends in .toml")
    document = read(path, settings, wanted="a cluster file is wanted")
    try:
        cluster = parse(Cluster, document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    return replace(cluster, name=", ".join([cluster.name, *settings]))
