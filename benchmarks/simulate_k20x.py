"""What does the simulator say of [003]'s curve to 64 GPUs, with nothing fitted to it?

    python benchmarks/simulate_k20x.py

[003]: AlexNet on up to 64 K20X, one a node; speed over one GPU with one all-reduce after backward (after), with
all-reduces of each layer behind backward (backward), and behind the next forward too, in the order that kasoku plans
(both; the slides name no order, and in that of backward the first layer waits for all others). The cluster is
tsubame25.toml with one GPU a node, which has the whole link; one latency, that of the cluster file; one batch of 256,
that of Caffe's AlexNet, shared by all GPUs, as the slides name neither batch nor link. It is the sweep of `kasoku
simulate --sweep strong=1:64`.
Published (press release of August 2016): 14.7 at 16 GPUs and 27 at 64, 1.46 and 1.71 times the scheme without overlap.
..._over_published: simulated over published. A layer takes at least the time of its weights in memory; further times
that do not depend on the batch are not published for this GPU, and its jitter is that of V100.
"""

from __future__ import annotations

import argparse

import torch

from common import finish
from kasoku.distributed import OneBucket, PerLayer, Planned
from kasoku.models import alexnet
from kasoku.simulate import Sharing, Simulator, load, model_costs
from kasoku.simulate.from_recipe import sweep

COUNTS, BATCH = (1, 2, 4, 8, 16, 32, 64), 256
PUBLISHED = {16: (14.7, 1.46), 64: (27.0, 1.71)}  # GPUs: speed with both, and that over the scheme without overlap
WAYS = {
    "after": Sharing(OneBucket()),
    "backward": Sharing(PerLayer()),
    "both": Sharing(Planned(), next_forward=True),
}


def speedups(batch: int = BATCH) -> dict[str, list[tuple[int, float]]]:
    """By way: (GPUs, speed over one GPU)."""
    with torch.device("meta"):
        net = model_costs("alexnet", alexnet(), (3, 224, 224))
    cluster = load("tsubame25", ["node.gpus=1"])
    simulators = {name: Simulator(cluster, net, way) for name, way in WAYS.items()}
    lines = sweep(simulators, "strong", COUNTS, gpus=1, batch=batch)
    return {
        name: [(n, step.images_per_s / line[0][1].images_per_s) for n, step in line] for name, line in lines.items()
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    lines = speedups()
    speed = {way: dict(points) for way, points in lines.items()}
    figures: dict[str, object] = {"speedups": lines}
    for gpus, (fast, gain) in PUBLISHED.items():
        both, after = speed["both"][gpus], speed["after"][gpus]
        figures |= {
            f"both_{gpus}": both,
            f"both_{gpus}_over_published": both / fast,
            f"gain_{gpus}": both / after,
            f"after_{gpus}_over_published": after / (fast / gain),
        }
    finish("simulate_k20x", {"batch": BATCH, "gpus": COUNTS[-1]}, figures)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
