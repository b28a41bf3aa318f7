"""Draws docs/simulated_*.svg: simulated and published curves, as [000] Fig. 8, 9, 10 and the curve of [003].

Seconds on one core. Only points whose values can be read are drawn: [000] gives its best throughput as a number and the
rest as pictures; the log of its team's MLPerf v0.6 entry gives the epochs (benchmarks/simulate_published.py).

Note: the extra time of the first epoch is not a prediction: it is in abci.toml, from the same log. Its time if NCCL
starts within it, [000]'s baseline, is published only as a picture and not drawn.

Note: ABCI's points lie below its curves, by what benchmarks/simulate_published.py misses too; no curve was adjusted.

Note: what benchmarks/simulate_k20x.py assumes of [003]'s machine and batch it says there; nothing was fitted to the
published points.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from svg import Panel, draw

from kasoku.simulate import ModelCosts, load
from kasoku.simulate.from_recipe import sizes, sweep

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "benchmarks"))

from simulate_abci import GPUS, WAYS, computing_alone, epochs, network, simulators, steps  # noqa: E402 - after its folder
from simulate_k20x import BATCH, PUBLISHED, speedups  # noqa: E402

IMAGES, STEPS = 42, 15  # of the MLPerf entry: images a GPU, steps an epoch
FIRST_S, EPOCH_S = 0.7445 + 0.6, 0.7445  # published: the first epoch and later ones


def draw_epochs(net: ModelCosts) -> None:
    """[000] Fig. 8: seconds of the first ten epochs."""
    lines = {f"simulated, {way}": epochs(net, way, IMAGES, STEPS) for way in WAYS}
    lines["published, MLPerf v0.6"] = [(1, FIRST_S), *((k, EPOCH_S) for k in range(2, 11))]
    title = f"ResNet-50 on {GPUS:,} V100 of ABCI, {GPUS * IMAGES:,} images a step"
    draw(DOCS / "simulated_epochs.svg", title, [Panel("seconds an epoch", lines, markers=True)], x_label="epoch")


def draw_batches(net: ModelCosts) -> None:
    """[000] Fig. 9 and 10: throughput by images a GPU, without and with optimised communication."""
    rates, exposed = {}, {}
    for way in WAYS:
        simulated = steps(net, way)
        rates[way] = [(s.images // GPUS, s.images_per_s / 1e6) for s in simulated]
        exposed[way] = [(s.images // GPUS, 1e3 * s.exposed_s) for s in simulated]
    rates["computing alone"] = [(images, rate / 1e6) for images, rate in computing_alone(net)]
    rates["published, [000]"] = [(40, 1.73)]
    rates["published, MLPerf v0.6"] = [(42, 1.733)]
    panels = [Panel("million images/s", rates, markers=True), Panel("exposed communication, ms", exposed, markers=True)]
    draw(DOCS / "simulated_batches.svg", f"ResNet-50 on {GPUS:,} V100 of ABCI", panels, x_label="images a GPU")


def scaling(net: ModelCosts) -> None:
    """Throughput and efficiency over 1 to 2,048 GPUs."""
    sweeps = sweep(simulators(net), "gpus", sizes(load("abci"), 1, GPUS), gpus=1, batch=40)
    rates = {name: [(n, s.images_per_s) for n, s in line] for name, line in sweeps.items()}
    first = {name: line[0][1].images_per_s / line[0][0] for name, line in sweeps.items()}
    shares = {name: [(n, s.images_per_s / n / first[name]) for n, s in line] for name, line in sweeps.items()}
    rates["published, [000]"], shares["published, arXiv 1903.12650"] = [(GPUS, 1.73e6)], [(GPUS, 0.77)]
    panels = [Panel("images/s", rates, log=True), Panel("efficiency", shares)]
    draw(DOCS / "simulated_scaling.svg", "ResNet-50 on ABCI, 40 images a GPU", panels, x_label="GPUs", x_log=True)


def draw_speedups() -> None:
    """[003]: the speed over one GPU, after backward, behind it, and behind the next forward too."""
    lines: dict[str, list[tuple[int, float]]] = {f"simulated, {way}": points for way, points in speedups().items()}
    lines["published, conventional"] = [(n, fast / gain) for n, (fast, gain) in PUBLISHED.items()]
    lines["published, with the next forward"] = [(n, fast) for n, (fast, _) in PUBLISHED.items()]
    panel = Panel("speed over one GPU", lines, markers=True)
    title = f"AlexNet on K20X, one a node; a batch of {BATCH} shared by all"
    draw(DOCS / "simulated_speedups.svg", title, [panel], x_label="GPUs")


def main() -> None:
    """Draws all four."""
    resnet = network()
    draw_epochs(resnet)
    draw_batches(resnet)
    scaling(resnet)
    draw_speedups()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
