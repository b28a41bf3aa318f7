"""How accurately does the simulator predict published steps, on clusters that we do not have?

    python benchmarks/simulate_published.py

Rows marked "calibrates" give alpha and beta of each GPU: the least squares of the logarithms of simulated over
published steps, each row simulated as it was run, with its own all-reduces and its own slowest rank. The other rows are
scored; no constant is fitted to them. Links are data sheets', latencies NCCL's. Jitter, computing slowed by transfers
and the range have the laws of docs/simulate.md. Gradients are grouped, and collectives started, as the published code
of each entry does it; of the other rows that is unknown, and DDP's groups are assumed.

Jitter of steps belongs to software: two releases on one DGX-1 differ by a factor of 4. Entries of MLPerf v0.6 have what
that release logged on one DGX-1 (0.0118); all others that of the GPU's file, the root mean square of both releases.
abci_abs_error_of_file: ABCI's error with the latter.
UNSEEN: rows that were named before any of them was simulated. How the code of these entries groups gradients, and how
it starts collectives, was added after the naming and before the look; after it one law changed, by at most 0.1 points.
The scored rows are older: it was known that ABCI came out too fast when causes were added, but not by which constants.
without: errors of the scored rows if one cause were left out, at unchanged alpha and beta.
range_coverage: the share of all rows that lie within the range that `kasoku plan` would print; ..._of_tested: of those
that calibrate nothing.

Sources: MLPerf training v0.6 to v3.0, logs and code of the entries (github.com/mlcommons/training_results_v0.6, ...);
NVIDIA DeepLearningExamples, MxNet RN50v1.5 (single V100); arXiv 1903.12650 (77.0 % of linear at 2,048 GPUs and 1.73 M
images/s, so 36.4 ms for 40 images alone: it calibrates the small batches of V100, for which there is no other source;
so the V100 rows are predicted with the help of that paper's efficiency, though not of its own step).
Result: records/. Known to be left out: NVIDIA's DGX-1 x130 keeps decoded images on the GPU (DALI_CACHE_SIZE), and the
rows that calibrate V100 decode them in every step; how ABCI's ranks lay in its racks is not published; neither sums in
switches (SHARP) nor BatchNorm over two GPUs, which the largest A100 and H100 entries use, are simulated.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from common import finish, parse
from kasoku.distributed import Fixed, Graded, Hierarchical, OneBucket, Policy
from kasoku.distributed.ddp.bucket_plan import ready_order
from kasoku.distributed.ddp.cost_model import BucketPlan, Sized
from kasoku.models import resnet50
from kasoku.report import print_table
from kasoku.simulate import Cluster, ModelCosts, Sharing, Simulator, load, model_costs
from kasoku.simulate.step import extremes

CLAIMS = {
    "simulate/published/median_error": ("median_abs_error", "errors", "no_communication_median_abs_error"),
    "simulate/published/max_error": ("max_abs_error", "mean_signed_error", "abci_abs_error_of_file"),
    "simulate/published/unseen_error": ("unseen_median_abs_error", "unseen_rows", "unseen_max_abs_error"),
    "simulate/published/range_coverage": ("range_coverage_of_tested", "range_coverage", "outside_range"),
    "simulate/published/abci_wall_error": ("abci_wall_abs_error", "abci_wall_s"),
}
EPOCHS, STEPS, EVALUATIONS, WALL_S = 90, 15, 23, 70.4  # of the ABCI run, 86,016 images a step


@dataclass(frozen=True)
class NormsApart(Policy):
    """The groups of another policy for tensors of several dimensions; norms and biases in one last group, in fp32."""

    policy: Policy = field(default_factory=Graded)

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        """The groups count all tensors; those of norms are then taken out."""
        whole = self.policy.plan(tensors)
        norms = {i for i, t in enumerate(tensors) if t.kind == "norm"}
        groups = [tuple(i for i in bucket if i not in norms) for bucket in whole.buckets]
        return ready_order([*(g for g in groups if g), tuple(sorted(norms))], tensors, "graded, norms apart")


@dataclass(frozen=True)
class EqualCounts(Policy):
    """Groups of equally many tensors, as MXNet's Horovod makes them (MXNET_HOROVOD_NUM_GROUPS)."""

    groups: int = 1

    def plan(self, tensors: Sequence[Sized]) -> BucketPlan:
        """The last tensors of each group are ready first."""
        each = -(-len(tensors) // self.groups)
        groups = [tuple(range(i, min(i + each, len(tensors)))) for i in range(0, len(tensors), each)]
        return ready_order(groups[::-1], tensors, "equal counts")


@dataclass(frozen=True)
class Row:
    """A published step: images a GPU, milliseconds; 0: it has the time of a GPU alone over `efficiency`."""

    name: str
    cluster: str
    gpus: int
    images: int
    step_ms: float
    sharing: Sharing
    calibrates: bool = False
    efficiency: float = 1.0
    settings: tuple[str, ...] = ()  # of the entry, over the cluster's file
    jitter: float = 0.0  # of the entry's software, where it was logged; 0: that of the GPU's file

    def cluster_as_run(self) -> Cluster:
        cluster = load(self.cluster, self.settings)
        gpu = replace(cluster.device, jitter=self.jitter or cluster.device.jitter)
        return replace(cluster, gpu="", own_gpu=gpu)


# The settings of each entry, as its published code has them: how gradients are grouped (MXNET_HOROVOD_NUM_GROUPS), how
# often Horovod looks for them (HOROVOD_CYCLE_TIME), NCCL's protocols (Fujitsu: NCCL_LL_THRESHOLD=1024 bytes, so no LL).
DDP, ONE = Sharing(Fixed()), Sharing(OneBucket())
MX16, MX20 = Sharing(EqualCounts(16)), Sharing(EqualCounts(20))
ABCI = Sharing(NormsApart(), reducer=Hierarchical())
V06 = 0.0118  # jitter that MLPerf v0.6's release of MXNet logged on one DGX-1
NVIDIA, FUJITSU = ("cycle_ms=0.1",), ("cycle_ms=0.2", 'protocols=["Simple"]')
ROWS = (
    Row("V100, 1 GPU", "dgx1-v100", 1, 192, 1e3 * 192 / 1376, DDP, calibrates=True),
    Row("V100, 1 GPU", "dgx1-v100", 1, 256, 1e3 * 256 / 1492, DDP, calibrates=True),
    Row("V100, 1 GPU of ABCI", "abci", 1, 40, 36.4, ABCI, calibrates=True),
    Row("DGX-1, DeepLearningExamples", "dgx1-v100", 8, 192, 1e3 * 8 * 192 / 10723, DDP, calibrates=True),
    Row("DGX-1", "dgx1-v100", 8, 208, 149.8, MX20, calibrates=True, settings=NVIDIA, jitter=V06),
    Row("DGX-A100", "dgx-a100", 8, 408, 120.9, ONE, calibrates=True, settings=NVIDIA),
    Row("DGX-A100 x8", "dgx-a100", 64, 51, 19.6, ONE, calibrates=True, settings=NVIDIA),
    Row("DGX-H100", "dgx-h100", 8, 400, 56.1, ONE, calibrates=True, settings=NVIDIA),
    Row("DGX-H100 x8", "dgx-h100", 64, 50, 10.2, ONE, calibrates=True, settings=NVIDIA),
    Row("DGX-1 x130", "dgx1-v100", 1040, 52, 47.4, MX16, settings=NVIDIA, jitter=V06),
    Row("ABCI", "abci", 2048, 42, 49.6, ABCI, settings=FUJITSU, jitter=V06),
    Row("DGX-A100 x128", "dgx-a100", 1024, 35, 15.5, ONE, settings=NVIDIA),
)
# Named, with published figures and sources, before any of them was simulated, and looked at once, at the end. Steps are
# the medians over the logs of an entry of the median epoch but the first, over its updates.
UNSEEN = (
    # MLPerf v0.6, NVIDIA/results/dgx2_ngc19.05_mxnet: 16 V100 of 32 GB on NVSwitch
    Row("DGX-2", "dgx1-v100", 16, 208, 147.7, MX20, settings=(*NVIDIA, "nodes=1", "node.gpus=16"), jitter=V06),
    # MLPerf v1.1, Azure/results/nd96amsr_a100_v4_n8_ngc21.09_mxnet
    Row("Azure ND A100 x8", "dgx-a100", 64, 51, 19.7, ONE, settings=NVIDIA),
    # MLPerf v1.1, NVIDIA/results/dgxa100_n540_ngc21.09_mxnet; BatchNorm over two GPUs is not simulated
    Row("DGX-A100 x540", "dgx-a100", 4320, 15, 8.80, ONE, settings=NVIDIA),
    # MLPerf v3.0, NVIDIA/results/dgxh100_n64_ngc23.04_mxnet
    Row("DGX-H100 x64", "dgx-h100", 512, 40, 9.05, ONE, settings=NVIDIA),
    # MLPerf v3.0, NVIDIA/results/dgxh100_n96_ngc23.04_mxnet
    Row("DGX-H100 x96", "dgx-h100", 768, 42, 9.38, ONE, settings=NVIDIA),
    # MLPerf v3.0, NVIDIA_CoreWeave/results/coreweave_hgxh100_n448_ngc23.04_mxnet; neither its sums in switches nor
    # BatchNorm over two GPUs is simulated
    Row("HGX-H100 x448", "dgx-h100", 3584, 16, 5.52, ONE, settings=NVIDIA),
    # arXiv 1711.04325: 90 epochs at batch 32,768, 3,519 updates, in 15 minutes on 1,024 P100 of MN-1
    Row("MN-1", "mn1", 1024, 32, 1e3 * 900 / 3519, ONE),
    # arXiv 1811.05233, quoted by developer.nvidia.com/blog (Sony breaks ResNet-50 training record): 1,088 V100 of ABCI
    # at 91.62 % of the speed of one, by a 2-D torus; 32 images a GPU and DDP's groups are assumed
    Row("ABCI, 2-D torus", "abci", 1088, 32, 0.0, Sharing(Fixed(), reducer=Hierarchical(32)), efficiency=0.9162),
)
LAWS = {  # other laws of jitter, for comparison; none of them was chosen
    "no jitter": {"v100": 0.0, "a100": 0.0},
    "log-normal, spread of SGEMM on V100 for all (0.0172)": {"v100": 0.0172, "a100": 0.0172},
    "log-normal, sd within whiskers (0.0198, 0.0195)": {"v100": 0.0198, "a100": 0.0195},
    "log-normal, with run-to-run (0.043, 0.043)": {"v100": 0.043, "a100": 0.043},
}


def imagenet() -> ModelCosts:
    """ResNet-50 with gradients in 16 bits, but those of norms in fp32, marked so that a policy can set them apart."""
    with torch.device("meta"):
        model = resnet50()
    net = model_costs("resnet50", model, (3, 224, 224)).with_gradients(2)
    shapes = {name: p.ndim for name, p in model.named_parameters()}
    norms = {name for name, ndim in shapes.items() if ndim == 1 and not name.startswith("fc")}
    marked = [
        tuple(replace(t, kind="norm", size=4 * t.elements) if t.name in norms else t for t in some)
        for some in (net.tensors, net.defined)
    ]
    return replace(net, tensors=marked[0], defined=marked[1])


def simulated(row: Row, net: ModelCosts, cluster: Cluster, *, spread: float | None = None) -> float:
    """Milliseconds of a row."""
    step = Simulator(cluster, net, row.sharing, spread).step(row.gpus, row.gpus * row.images)
    return 1e3 * step.step_s


def measured(cluster: Cluster, alpha_ms: float, beta_ms: float) -> Cluster:
    """The cluster with other constants of its GPU."""
    return replace(cluster, gpu="", own_gpu=replace(cluster.device, alpha_ms=alpha_ms, beta_ms=beta_ms))


def calibrated(gpu: str, net: ModelCosts) -> tuple[float, float]:
    """Alpha and beta in ms: least squares over the rows that calibrate, by Gauss and Newton on their logarithms."""
    rows = [row for row in ROWS if row.calibrates and load(row.cluster).device.name == gpu]
    x = [math.log(5.0), math.log(0.3)]

    def off(x: Sequence[float]) -> list[float]:
        each = (
            simulated(r, net, measured(r.cluster_as_run(), math.exp(x[0]), math.exp(x[1]))) / r.step_ms for r in rows
        )
        return [math.log(ratio) for ratio in each]

    h = 1e-5
    for _ in range(20):
        here = off(x)
        moved = off([x[0] + h, x[1]]), off([x[0], x[1] + h])
        u, v = ([(b - a) / h for a, b in zip(here, there, strict=True)] for there in moved)
        uu, uv, vv = _dot(u, u), _dot(u, v), _dot(v, v)
        along, across = _dot(u, here), _dot(v, here)
        det = uu * vv - uv * uv
        move = (uv * across - vv * along) / det, (uv * along - uu * across) / det
        x = [x[0] + max(-1.0, min(1.0, move[0])), x[1] + max(-1.0, min(1.0, move[1]))]
        if max(map(abs, move)) < 1e-10:
            break
    return math.exp(x[0]), math.exp(x[1])


def _dot(u: Sequence[float], v: Sequence[float]) -> float:
    return sum(p * q for p, q in zip(u, v, strict=True))


def published_ms(row: Row, net: ModelCosts) -> float:
    """Milliseconds of a row's step; of one that has an efficiency, from a simulated GPU alone."""
    alone = Simulator(row.cluster_as_run(), net, spread=0.0).step(1, row.images)
    return row.step_ms or 1e3 * alone.step_s / row.efficiency


def error(row: Row, net: ModelCosts) -> float:
    return simulated(row, net, row.cluster_as_run()) / published_ms(row, net) - 1


def within_range(row: Row, net: ModelCosts) -> bool:
    """Whether the published step lies between those of a fast and of a slow case."""
    cases = extremes(Simulator(row.cluster_as_run(), net, row.sharing))
    fast, slow = (1e3 * case.step(row.gpus, row.gpus * row.images).step_s for case in cases)
    print(f"{row.name}: {fast:.2f} to {slow:.2f} ms, published {published_ms(row, net):.2f}")
    return fast <= published_ms(row, net) <= slow


def without(net: ModelCosts) -> dict[str, dict[str, float]]:
    """Errors of the scored rows without each cause."""

    def left_out(row: Row, cause: str) -> Cluster:
        cluster = row.cluster_as_run()
        gpu = cluster.device
        return {
            "jitter of steps": replace(cluster, own_gpu=replace(gpu, jitter=0.0)),
            "spread of GPUs": replace(cluster, own_gpu=replace(gpu, spread=0.0)),
            "computing slowed by transfers": replace(cluster, own_gpu=replace(gpu, compute_share=1.0)),
            "polling": replace(cluster, cycle_ms=0.0),
            "shared PCIe": replace(cluster, node=replace(cluster.node, pcie_gb_s=0.0)),
            "protocols of the entry": replace(cluster, protocols=load(row.cluster).protocols),
        }[cause]

    causes = ("jitter of steps", "spread of GPUs", "computing slowed by transfers", "polling", "shared PCIe")
    scored = [row for row in ROWS if not row.calibrates]
    return {
        cause: {row.name: simulated(row, net, left_out(row, cause)) / row.step_ms - 1 for row in scored}
        for cause in (*causes, "protocols of the entry")
    }


def errors(net: ModelCosts, spread: dict[str, float] | None = None, *, alone: bool = False) -> dict[str, float]:
    """Relative errors of the scored rows; with other spreads, or of computing alone."""
    errors = {}
    for row in (row for row in ROWS if not row.calibrates):
        cluster = row.cluster_as_run()
        if alone:
            ms = 1e3 * Simulator(cluster, net, row.sharing, 0.0).step(row.gpus, row.gpus * row.images).compute_s
        else:
            ms = simulated(row, net, cluster, spread=spread[cluster.device.name.lower()] if spread else None)
        errors[row.name] = ms / row.step_ms - 1
    return errors


def main() -> None:
    parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter))
    net = imagenet()
    constants = {name: calibrated(name, net) for name in ("V100", "A100", "H100")}
    shipped = {load(c).device.name: load(c).device for c in ("abci", "dgx-a100", "dgx-h100")}
    for name, (alpha, beta) in constants.items():
        gpu = shipped[name]
        print(f"{name}: alpha {alpha:.4g} ms, beta {beta:.4g} ms (shipped: {gpu.alpha_ms}, {gpu.beta_ms})")
    rows = {}
    for row in ROWS:
        step = Simulator(row.cluster_as_run(), net, row.sharing).step(row.gpus, row.gpus * row.images)
        each = (1e3 * s for s in (step.compute_s, step.straggler_s, step.exposed_s))
        parts = "compute {:.2f} + slowest rank {:.2f} + exposed {:.2f}".format(*each)
        off = step.step_s / row.step_ms * 1e3 - 1
        note = "calibrates" if row.calibrates else "SCORED"
        rows[f"{row.name}, {row.gpus:,} x {row.images}"] = (
            f"{row.step_ms:6.1f} ms published, {1e3 * step.step_s:6.2f} simulated ({off:+.1%}) = {parts}; {note}"
        )
    print_table("steps", rows)
    scored, alone = errors(net), errors(net, alone=True)
    sizes = {name: max(map(abs, errors(net, law).values())) for name, law in LAWS.items()}
    medians = {name: statistics.median(map(abs, errors(net, law).values())) for name, law in LAWS.items()}
    for name in LAWS:
        print(f"{name}: would give median {medians[name]:.4f}, max {sizes[name]:.4f}")
    causes = without(net)
    for cause, those in causes.items():
        print(f"without {cause}: " + ", ".join(f"{name} {off:+.1%}" for name, off in those.items()))
    unseen = {row.name: error(row, net) for row in UNSEEN}
    for row in UNSEEN:
        print(
            f"UNSEEN {row.name}, {row.gpus:,} x {row.images}: {published_ms(row, net):.2f} ms, {unseen[row.name]:+.1%}"
        )
    inside = {row: within_range(row, net) for row in (*ROWS, *UNSEEN)}
    tested = [held for row, held in inside.items() if not row.calibrates]
    abci = next(row for row in ROWS if row.name == "ABCI")
    costs = load("abci").costs
    wall = costs.setup_s + costs.first_epoch_s + EVALUATIONS * costs.evaluation_s
    wall += EPOCHS * STEPS * 1e-3 * simulated(abci, net, abci.cluster_as_run())
    drift = max(
        abs(b / a - 1)
        for name, fitted in constants.items()
        for a, b in zip(fitted, (shipped[name].alpha_ms, shipped[name].beta_ms), strict=True)
    )
    figures = {
        "median_abs_error": statistics.median(map(abs, scored.values())),
        "max_abs_error": max(map(abs, scored.values())),
        "mean_signed_error": statistics.fmean(scored.values()),
        "unseen_rows": unseen,
        "unseen_median_abs_error": statistics.median(map(abs, unseen.values())),
        "unseen_max_abs_error": max(map(abs, unseen.values())),
        "unseen_mean_signed_error": statistics.fmean(unseen.values()),
        "unseen_median_abs_error_n": len(unseen),
        "range_coverage": statistics.fmean(inside.values()),
        "range_coverage_of_tested_n": len(tested),
        "range_coverage_of_tested": statistics.fmean(tested),
        "outside_range": [row.name for row, held in inside.items() if not held],
        "without": causes,
        "no_communication_median_abs_error": statistics.median(map(abs, alone.values())),
        "errors": scored,
        "errors_of_computing_alone": alone,
        "abci_wall_s": wall,
        "abci_wall_error": wall / WALL_S - 1,
        "abci_wall_abs_error": abs(wall / WALL_S - 1),
        "abci_wall_abs_error_n": 1,
        "abci_abs_error_of_file": abs(error(replace(abci, jitter=0.0), net)),
        "n": len(scored),
        "constants_ms": {name: [round(v, 4) for v in pair] for name, pair in constants.items()},
        "shipped_constants_off": drift,
        "other_laws_median_max": {name: [medians[name], sizes[name]] for name in LAWS},
    }
    finish("simulate_published", {"rows": len(ROWS), "epochs": EPOCHS, "steps_an_epoch": STEPS}, figures, CLAIMS)


if __name__ == "__main__":
    main()
